"""What tests of the functions for vLLM share: `PACKAGE` is a vLLM of a few lines, with the modules and signatures of
0.33.0.
"""

import importlib
import sys
import textwrap

import pytest

from nsa import settings
from nsa.integrations import vllm

PREFILL, DECODE = vllm.NAMES
PACKAGE = {
    "vllm/__init__.py": "__version__ = '0.33.0+cu129'",
    "vllm/models/__init__.py": "",
    "vllm/models/minimax_m3/__init__.py": "",
    "vllm/models/minimax_m3/common/__init__.py": "",
    "vllm/models/minimax_m3/common/ops/__init__.py": f"""
        from .sparse_attn import {PREFILL}, {DECODE}
        """,
    "vllm/models/minimax_m3/common/ops/sparse_attn.py": f"""
        calls = []
        def {PREFILL}(
            q, kv_cache, topk_idx, block_table, cu_seqlens_q, seq_lens, prefix_lens, max_query_len, num_kv_heads,
            sm_scale, output, k_scale=None, v_scale=None,
        ):
            calls.append((q, output, k_scale))
        def {DECODE}(
            q, kv_cache, topk_idx, block_table, seq_lens, num_kv_heads, sm_scale, output, decode_query_len,
            k_scale=None, v_scale=None,
        ):
            calls.append((q, output, k_scale))
        """,
    "vllm/models/qwen4_exp/__init__.py": "",
    "vllm/models/qwen4_exp/nvidia/__init__.py": "",
    "vllm/models/qwen4_exp/nvidia/ops/__init__.py": "",
    "vllm/models/qwen4_exp/nvidia/ops/qsa.py": """
        calls = []
        def qsa_sparse_paged_attention(
            q, k_cache, v_cache, logical_indices, block_table, token_to_req, use_prefill_config, out=None, k_scale=None,
            v_scale=None, *, output_gate,
        ):
            calls.append(q)
            return out
        """,
    "vllm/models/minimax_m3/common/sparse_attention.py": f"""
        from vllm.models.minimax_m3.common.ops.sparse_attn import {PREFILL}, {DECODE} as decode
        """,
}


@pytest.fixture
def pristine(monkeypatch, fresh_routes):
    """No vLLM is loaded, nothing of ours is installed, and NSA_VLLM is unset; and so it is for tests that follow."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    monkeypatch.delenv("NSA_VLLM", raising=False)
    settings.reload()
    yield
    vllm.restore()
    monkeypatch.undo()
    settings.reload()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(others)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Writes `PACKAGE`, with changes, where it is imported."""

    def write(**changed):
        for name, text in PACKAGE.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for before, after in changed.items():
                text = text.replace(before, after)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write()
    return write
