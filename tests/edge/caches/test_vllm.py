"""vLLM's functions of MiniMax-M3 on our kernels: against the oracle, against vLLM's own, and in vLLM's place."""

import dataclasses
import functools
import importlib
import logging
import sys
import warnings

import pytest
import torch

import nsa
from nsa import routing, settings
from nsa.integrations import vllm
from nsa.testing.matrix import caches

from .vllm_calls import DTYPE, GPU, D, close, refuse, refuses_other_axes, signature

pytestmark = pytest.mark.usefixtures("pristine")
HKV, G = (4, 16) if GPU else (2, 2)
SCALE = 0.3
PREFILL, DECODE = vllm.NAMES
USER, OPS = "vllm.models.minimax_m3.common.sparse_attention", "vllm.models.minimax_m3.common.ops"


@dataclasses.dataclass
class Step:
    """A call of one of the two functions: its arguments, and what the oracle says."""

    name: str
    arguments: dict
    buffer: torch.Tensor  # whose first rows are the argument `output`
    want: torch.Tensor

    def run(self, function):
        self.buffer.fill_(7.0)
        function(**self.arguments)
        return self.arguments["output"]


def selected(position, g):
    """Two blocks as vLLM's indexer selects them: the query's own and one before; -1 where there is none."""
    blocks = [-1] * 2
    if position >= 0:
        earlier = torch.randperm(position // 128, generator=g).tolist()
        blocks = [position // 128, *earlier, -1][:2]
    return blocks if blocks[1] < 0 or torch.rand(1, generator=g) < 0.5 else blocks[::-1]


def step(device, name, fp8=None, dtype=DTYPE, queries=2):
    """Three sequences, one of them empty; selections in a buffer of tokens first, as in vLLM."""
    lengths, counts = [300, 0, 129], [3, 0, 2] if name == PREFILL else [queries] * 3
    cache = caches.draw(lengths, 384, 128, HKV=HKV, D=D, Dv=D, device=device, dtype=dtype)
    if fp8 is not None:
        cache = caches.quantized(cache, per_head=False)
    g = torch.Generator().manual_seed(3)
    T = sum(counts)
    q = torch.randn(T + 2, G * HKV, D, generator=g).to(device, dtype)[:T]
    positions = [length - S + s for length, S in zip(lengths, counts, strict=True) for s in range(S)]
    picked = torch.tensor([[selected(t, g) for _ in range(HKV)] for t in [*positions, 0, 0]], dtype=torch.int32)
    picked = picked.to(device)[:T]
    buffer = torch.empty(T + 2, G * HKV, D, dtype=dtype, device=device)
    halves = (x.view(torch.uint8) if fp8 else x for x in (cache.k, cache.v))
    both = torch.cat(tuple(halves), -1).transpose(1, 2).contiguous()  # [pages, HKV, 128, 2 D]
    arguments = {
        "q": q, "kv_cache": both.view(caches.E4M3) if fp8 else both, "topk_idx": picked.transpose(0, 1),
        "block_table": cache.block_table, "seq_lens": cache.cache_seqlens, "num_kv_heads": HKV, "sm_scale": SCALE,
        "output": buffer[:T],
    }  # fmt: skip
    selection = {"block_indices": picked, "block_size": 128, "scale": SCALE}
    if fp8 == "scales":
        arguments |= {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    elif fp8 == "1.0":
        cache = dataclasses.replace(cache, k_scale=None, v_scale=None)
        q.div_(64)  # keys up to 448
    if name == PREFILL:
        cu = torch.tensor([0, *counts], device=device).cumsum(0).int()
        arguments |= {"cu_seqlens_q": cu, "max_query_len": 3}
        arguments |= {"prefix_lens": cache.cache_seqlens - cu.diff()}
        want = caches.oracle(q, cache, cu, **selection)[0]
    else:
        arguments |= {"decode_query_len": queries}
        shaped = selection | {"block_indices": picked.unflatten(0, (3, queries))}
        want = caches.oracle(q.unflatten(0, (3, queries)), cache, **shaped)[0].flatten(0, 1)
    return Step(name, arguments, buffer, want)


# --- the two functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [None, "scales", "1.0"], ids=["half", "fp8", "fp8-without-scales"])
@pytest.mark.parametrize("name", vllm.NAMES)
def test_equal_to_the_oracle(device, monkeypatch, name, fp8):
    """In place, in `output` alone, on a Triton route, and without gradients where they are enabled, as vLLM's own."""
    monkeypatch.setattr(vllm, "_own", refuse)
    made = step(device, name, fp8)
    made.arguments["q"] = made.arguments["q"].clone().requires_grad_()
    assert torch.is_grad_enabled()
    assert not made.run(getattr(vllm, name)).requires_grad
    close(made.arguments["output"], made.want)
    assert (made.buffer[len(made.want) :] == 7).all()
    assert {record.route for record in nsa.routes()} <= {"query_major", "key_major", "union"}


def test_scales_that_vllm_ignores_or_shapes_otherwise(device, monkeypatch):
    """A cache of 16 bits has none, whatever is passed; one element may be of any shape."""
    monkeypatch.setattr(vllm, "_own", refuse)
    for fp8, change in ((None, lambda x: torch.tensor(9.0, device=device)), ("scales", lambda x: x.view(1, 1))):
        made = step(device, DECODE, fp8, queries=1)
        made.arguments |= {name: change(made.arguments.get(name)) for name in ("k_scale", "v_scale")}
        close(made.run(vllm.minimax_m3_sparse_attn_decode), made.want)


def test_a_wrong_number_of_tokens_is_refused(device):
    made = step(device, DECODE)
    made.arguments["decode_query_len"] = 3
    with pytest.raises(ValueError, match="^q: expected 3 sequences of 3 queries, got 6 tokens$"):
        made.run(vllm.minimax_m3_sparse_attn_decode)


@pytest.mark.parametrize(("name", "axis", "got"), [("topk_idx", 1, "topk_idx has 5, output has 6"),
                                                   ("output", 0, "topk_idx has 6, output has 5")])  # fmt: skip
def test_fewer_rows_than_queries_are_refused(device, name, axis, got):
    made = step(device, DECODE)
    made.arguments[name] = made.arguments[name].narrow(axis, 0, 5)
    text = rf"^topk_idx, output: expected 6 tokens \(those of q\), {got}$"
    with pytest.raises(ValueError, match=text):
        vllm.minimax_m3_sparse_attn_decode(**made.arguments)


AXES = {"q": "[T, HQ, D]", "topk_idx": "[HKV, T, n]", "block_table": "[B, width]", "seq_lens": "[B]"}


@pytest.mark.parametrize("argument", AXES)
@pytest.mark.parametrize("name", vllm.NAMES)
def test_other_axes_are_refused(device, name, argument):
    refuses_other_axes(name, step(device, name).arguments, argument, AXES[argument])


@pytest.mark.skipif(not GPU, reason="only a GPU can sync")
@pytest.mark.parametrize("name", vllm.NAMES)
def test_calls_do_not_sync(device, monkeypatch, name):
    monkeypatch.setattr(vllm, "_own", refuse)
    made, function = step(device, name, "scales"), getattr(vllm, name)
    made.run(function)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.run(function)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not GPU, reason="graphs need a GPU")
@pytest.mark.parametrize("fp8", [None, "scales"])
def test_a_captured_step_replays_with_other_lengths(device, monkeypatch, fp8):
    monkeypatch.setattr(vllm, "_own", refuse)
    made, later = step(device, DECODE, fp8), step(device, DECODE, fp8)
    made.run(vllm.minimax_m3_sparse_attn_decode)
    made.arguments["seq_lens"].zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(vllm.minimax_m3_sparse_attn_decode)
    graph.replay()
    assert not made.arguments["output"].any()
    made.arguments["seq_lens"].copy_(later.arguments["seq_lens"])
    graph.replay()
    close(made.arguments["output"], made.want)


@functools.cache
def own_modules():
    """The modules of a vLLM that is installed. They are imported once, because they register operators of PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(vllm.OPS, exc_type=ImportError)
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}


@pytest.mark.skipif(not GPU, reason="Triton's interpreter cannot run vLLM's kernels")
@pytest.mark.parametrize("fp8", [None, "scales", "1.0"], ids=["half", "fp8", "fp8-without-scales"])
@pytest.mark.parametrize("name", vllm.NAMES)
def test_equal_to_vllm(device, name, fp8):
    sys.modules.update(own_modules())
    theirs = sys.modules[vllm.OPS]
    assert importlib.import_module("vllm").__version__.partition("+")[0] in vllm.VERSIONS
    made = step(device, name, fp8)
    want = made.run(getattr(theirs, name)).double()
    some = [i for i in range(len(want)) if name == PREFILL or i not in (2, 3)]  # an empty sequence may be NaN there
    vllm.install()
    got = made.run(getattr(theirs, name))
    assert getattr(theirs, name) is getattr(vllm, name)
    close(got[some], want[some])


# --- what goes to vLLM's own functions --------------------------------------------------------------------------------


def own_calls():
    return importlib.import_module(vllm.OPS).calls


REFUSED = {
    "page": (None, lambda a: {"kv_cache": a["kv_cache"][:, :, :64]}, f"kv_cache: expected [pages, HKV, 128, 2 D] = "
             f"[pages, {HKV}, 128, {2 * D}], got [pages, {HKV}, 64, {2 * D}]"),
    "bytes": ("scales", lambda a: {"kv_cache": a["kv_cache"].view(torch.uint8)}, "k_cache: expected dtype"),
    "e5m2": ("scales", lambda a: {"kv_cache": a["kv_cache"].view(torch.float8_e5m2)}, "k_cache: expected dtype"),
    "one-scale": ("scales", lambda a: {"v_scale": None}, "scales: expected both k_scale and v_scale, or neither"),
    "per-token": ("scales", lambda a: dict.fromkeys(("k_scale", "v_scale"), a["k_scale"].expand(HKV, 999)),
                  "k_scale: expected [], [1] or [HKV]"),
}  # fmt: skip


@pytest.mark.parametrize(("fp8", "change", "reason"), REFUSED.values(), ids=REFUSED)
def test_vllm_serves_what_we_cannot(device, fake, caplog, fp8, change, reason):
    vllm.install()
    made = step(device, DECODE, fp8)
    made.arguments |= change(made.arguments)
    function = getattr(importlib.import_module(OPS), DECODE)
    for _ in range(2):
        made.run(function)
    assert [call[0] is made.arguments["q"] for call in own_calls()] == [True, True]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert warned[0].startswith(f"{DECODE}: vLLM's own kernel serves such calls: {reason}")


def test_vllm_serves_where_the_gpu_cannot(device, fake, monkeypatch, caplog):
    monkeypatch.setattr(routing, "why_not_triton", lambda device: "this GPU is too old")
    vllm._why_not.cache_clear()
    vllm.install()
    step(device, PREFILL).run(vllm.minimax_m3_sparse_attn)
    assert len(own_calls()) == 1
    assert caplog.messages == [f"{PREFILL}: vLLM's own kernel serves such calls: this GPU is too old"]
    vllm._why_not.cache_clear()


FAILURES = {  # an error, and how often our function is asked in two calls; None: the error reaches the caller
    "broken": (RuntimeError("PassManager::run failed"), 1),
    "memory": (torch.OutOfMemoryError("full"), 2),
    "context": (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), None),
}


@pytest.mark.parametrize(("error", "tried"), FAILURES.values(), ids=FAILURES)
def test_a_kernel_that_fails(device, fake, monkeypatch, caplog, error, tried):
    """A broken one is not tried again; memory may suffice the next time; a lost context is raised."""
    asked = []

    def fail(*_, **__):
        asked.append(1)
        raise error

    monkeypatch.setattr(vllm, "selection_attention_with_kvcache", fail)
    vllm.install()
    made = step(device, DECODE)
    if tried is None:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            made.run(vllm.minimax_m3_sparse_attn_decode)
        assert own_calls() == []
        return
    for _ in range(2):
        made.run(vllm.minimax_m3_sparse_attn_decode)
    assert (len(asked), len(own_calls())) == (tried, 2)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    vllm.restore()  # forgets what failed
    vllm.install()
    made.run(vllm.minimax_m3_sparse_attn_decode)
    assert len(asked) == tried + 1


# --- in vLLM's place --------------------------------------------------------------------------------------------------

OURS = list(vllm.NAMES.values())


def held():
    """The functions as the modules of vLLM have them: where they are defined, twice where they are imported."""
    one, two, user = (importlib.import_module(name) for name in (vllm.OPS, OPS, USER))
    return [f for x in (one, two) for f in (getattr(x, PREFILL), getattr(x, DECODE))] + [
        getattr(user, PREFILL), user.decode,
    ]  # fmt: skip


def test_signatures_are_those_of_vllm(fake):
    for theirs, ours in zip(held()[:2], OURS, strict=True):
        assert [p for p in signature(ours) if p[0] not in vllm.NEWER] == signature(theirs)


def test_the_newer_signature_is_known(fake, caplog):
    last = "decode_query_len,\n            k_scale=None, v_scale=None,"
    fake(**{last: f"{last} query_start_loc=None, token_to_req_indices=None,"})
    assert signature(held()[1]) == signature(OURS[1])
    vllm.install()
    assert held() == OURS * 3


def test_steps_of_different_lengths(device, monkeypatch):
    """As newer versions pass them: the same as a chunk of so many queries."""
    monkeypatch.setattr(vllm, "_own", refuse)
    made = step(device, PREFILL)
    arguments = dict(made.arguments)
    del arguments["prefix_lens"]
    arguments |= {"query_start_loc": arguments.pop("cu_seqlens_q"), "decode_query_len": arguments.pop("max_query_len")}
    vllm.minimax_m3_sparse_attn_decode(**arguments, token_to_req_indices=None)
    close(made.arguments["output"], made.want)


@pytest.mark.parametrize("early", [False, True], ids=["before-vllm's-modules", "after-them"])
def test_install_and_restore(fake, monkeypatch, caplog, early):
    caplog.set_level(logging.INFO, "vllm.nsa")
    monkeypatch.setenv("NSA_VLLM", "1")
    settings.reload()
    before = held() if early else None
    for _ in range(2):
        vllm.plugin()
        assert bool(vllm.installed()) == early
        assert early or vllm.OPS not in sys.modules
    assert held() == OURS * 3
    assert vllm.installed() == sorted((vllm.OPS, OPS, USER))
    assert sum("in place in" in record.getMessage() for record in caplog.records) == 1
    for _ in range(2):
        vllm.restore()
        assert vllm.installed() == []
        after = held()
        assert after[:2] * 3 == after
        assert after == before or not early
        assert not {id(f) for f in after} & {id(f) for f in OURS}
    vllm.install()
    assert held() == OURS * 3


def test_restored_before_vllm_loads_its_modules(fake):
    vllm.install()
    vllm.restore()
    assert held()[0] is not OURS[0]


@pytest.mark.parametrize("value", [None, "0"])
def test_nothing_happens_unless_asked_for(fake, monkeypatch, caplog, value):
    if value is not None:
        monkeypatch.setenv("NSA_VLLM", value)
    settings.reload()
    found = list(sys.meta_path)
    vllm.plugin()
    assert sys.meta_path == found
    assert "vllm" not in sys.modules
    assert not set(held()) & set(OURS)
    assert caplog.records == []


@pytest.mark.parametrize("version", ["0.32.1", "0.33.1", "0.33.0rc1", "dev"])
def test_unknown_versions_are_refused_by_name(fake, monkeypatch, caplog, version):
    """The server starts, with vLLM's own functions."""
    fake(**{"0.33.0+cu129": version})
    text = f"vLLM {version} is unknown, expected one of: 0.33.0"
    with pytest.raises(RuntimeError, match=f"^{text}$"):
        vllm.install()
    monkeypatch.setenv("NSA_VLLM", "1")
    settings.reload()
    vllm.plugin()
    assert [record.getMessage() for record in caplog.records] == [f"nsa: {text}; vLLM keeps its own kernels"]
    assert not set(held()) & set(OURS)


@pytest.mark.parametrize(
    ("value", "cause"), [("maybe", "NSA_VLLM='maybe': expected one of"), ("1", "expected NVIDIA GPUs")]
)
def test_a_server_starts_without_us(fake, monkeypatch, caplog, value, cause):
    monkeypatch.setenv("NSA_VLLM", value)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    settings.reload()
    vllm.plugin()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"nsa: {cause}")
    assert not set(held()) & set(OURS)


def test_other_arguments_are_left_alone(fake, caplog):
    """A vLLM of this version that was changed."""
    fake(decode_query_len="query_len")
    vllm.install()
    assert not set(held()) & set(OURS)
    assert vllm.installed() == []
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage().startswith(f"nsa: {DECODE}: expected arguments ['q', ")
