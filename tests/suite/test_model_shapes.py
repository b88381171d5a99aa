"""The shapes of MiniMax-M3 and QSA in the perf lane: what is timed there, and what comparators are given."""

import inspect
from dataclasses import replace

import pytest
import torch

from nsa.testing.contestants import peers
from nsa.testing.contestants.contract import Contestant
from nsa.testing.contestants.m3 import APART, DENSE, M3, M3_16, _of_group
from nsa.testing.judge.forward import Oracle, assert_parity
from nsa.testing.matrix import m3, qsa
from nsa.testing.matrix.caches import E4M3, oracle
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.m3 import Group, Shape
from nsa.testing.report import summary, tables
from nsa.testing.report.table import markdown

STEP = Case(2, 16, 16, 48, 6, "decode", "fp16", HKV=2, S_kv=64, block_size=16)
CHUNK = Case(2, 16, 16, 48, 20, "prefill", "fp16", HKV=1, S=20, S_kv=64, block_size=16, shared=0.9)
RAGGED = Case(
    2, 16, 16, 48, 38, "prefill", "fp16", block_size=16, seqlens=(18, 18, 1, 1), kv_seqlens=(32, 32, 80, 80)
)  # fmt: skip
SMALL = {"step": Shape(STEP), "chunk": Shape(CHUNK), "ragged": Shape(RAGGED), "fp8": Shape(RAGGED, fp8=True)}


@pytest.fixture
def vllm(importable, monkeypatch):
    """vLLM's two functions in plain torch: their arguments and layouts, and which blocks they read."""
    monkeypatch.setattr(peers, "VLLM_BLOCK", 16)  # the blocks of `SMALL`; these functions take any

    def attend(position, sequence, q, kv_cache, topk_idx, block_table, num_kv_heads, sm_scale, output, scales):
        D, G = q.shape[-1], q.shape[1] // num_kv_heads
        size = kv_cache.shape[2]
        assert kv_cache.shape[1:] == (num_kv_heads, size, 2 * D)
        assert topk_idx.shape[:2] == (num_kv_heads, q.shape[0])
        pages = kv_cache.double()  # PyTorch cannot index fp8 everywhere
        for t in range(q.shape[0]):
            count = min(topk_idx.shape[-1], int(position[t]) // size + 1)
            for h in range(num_kv_heads):
                blocks = topk_idx[h, t, :count].long()
                kv = pages[block_table[sequence[t]][blocks].long(), h].flatten(0, 1)
                keys = (blocks[:, None] * size + torch.arange(size, device=q.device)).flatten() <= position[t]
                k, v = kv[keys, :D], kv[keys, D:]
                k, v = (k, v) if scales[0] is None else (k * scales[0], v * scales[1])
                mine = slice(h * G, (h + 1) * G)
                output[t, mine] = torch.softmax(q[t, mine].double() @ k.T * sm_scale, -1) @ v

    def minimax_m3_sparse_attn(
        q, kv_cache, topk_idx, block_table, cu_seqlens_q, seq_lens, prefix_lens, max_query_len, num_kv_heads, sm_scale,
        output, k_scale=None, v_scale=None,
    ):  # fmt: skip
        lengths = cu_seqlens_q.diff().long()
        assert max_query_len == lengths.max()
        assert torch.equal(prefix_lens + lengths, seq_lens)
        sequence = torch.repeat_interleave(lengths)
        position = torch.arange(q.shape[0], device=q.device) - cu_seqlens_q[sequence] + prefix_lens[sequence]
        called.append("chunks")
        scales = k_scale, v_scale
        attend(position, sequence, q, kv_cache, topk_idx, block_table, num_kv_heads, sm_scale, output, scales)

    def minimax_m3_sparse_attn_decode(
        q, kv_cache, topk_idx, block_table, seq_lens, num_kv_heads, sm_scale, output, decode_query_len, k_scale=None,
        v_scale=None,
    ):  # fmt: skip
        assert q.shape[0] == len(seq_lens) * decode_query_len
        token = torch.arange(q.shape[0], device=q.device)
        sequence = token // decode_query_len
        position = token % decode_query_len + seq_lens[sequence] - decode_query_len
        called.append("steps")
        scales = k_scale, v_scale
        attend(position, sequence, q, kv_cache, topk_idx, block_table, num_kv_heads, sm_scale, output, scales)

    called = []
    functions = (minimax_m3_sparse_attn, minimax_m3_sparse_attn_decode)
    importable(peers.VLLM, **{function.__name__: function for function in functions})
    return peers.vllm()["vllm"], called


@pytest.mark.parametrize(("name", "called"), [
    ("step", ["steps"]), ("chunk", ["chunks"]), ("ragged", ["chunks", "steps"]), ("fp8", ["chunks", "steps"]),
])  # fmt: skip
def test_all_compute_the_same_over_one_cache(vllm, device, name, called):
    problem = m3.make(SMALL[name], device)
    truth = Oracle.of(problem)
    cache = problem.derived(m3.combined)
    assert cache.pages.shape[1:] == (problem.case.HKV, 16, 32)
    assert (cache.pages.dtype == E4M3) == (cache.k.dtype == E4M3) == SMALL[name].fp8
    assert cache.k.data_ptr() == cache.pages.data_ptr()
    assert cache.v.data_ptr() == cache.pages[..., 16:].data_ptr()
    cached = oracle(problem.q, cache, problem.cu_seqlens, block_indices=problem.block_indices, block_size=16)[0]
    message = "the cache does not hold the problem's keys"
    torch.testing.assert_close(cached, truth.out, rtol=1e-12, atol=1e-12, msg=message)
    for impl in (M3, APART, M3_16, vllm[0]):
        assert impl.supports(problem.case) is None
        assert_parity(impl.run(problem), truth, impl.name)
    assert vllm[1] == called
    DENSE.other.check(problem, DENSE.run(problem))


def test_dense_attention_reads_the_keys_of_its_group(device):
    problem = m3.make(SMALL["ragged"], device)
    (_, k, v), steps = _of_group(problem, m3.groups(RAGGED)[1]), problem.cu_seqlens_k[2:]
    assert torch.equal(k.flatten(0, 1), problem.k[steps[0] : steps[2]])
    assert torch.equal(v.flatten(0, 1), problem.v[steps[0] : steps[2]])


def test_a_clone_has_its_own_cache(device):
    problem = m3.make(SMALL["fp8"], device)
    cache = problem.derived(m3.combined)
    other = problem.clone().derived(m3.combined)
    assert other.pages.data_ptr() != cache.pages.data_ptr()
    assert torch.equal(other.pages.view(torch.uint8), cache.pages.view(torch.uint8))


def test_a_key_in_fp8_is_half_as_many_bytes(device):
    plain, quantized = (m3.make(Shape(RAGGED, fp8), device).unique_bytes for fp8 in (False, True))
    rest = 38 * 2 * 32 * 2  # queries and outputs
    assert quantized - rest == (plain - rest) // 2


def test_groups_of_a_ragged_batch():
    assert m3.groups(RAGGED) == [Group(0, 0, 2, 18, 32), Group(2, 36, 2, 1, 80)]
    assert m3.groups(m3.NAMED["m3-ragged"].case) == [Group(0, 0, 3, 512, 65_536), Group(3, 1536, 61, 1, 16_384)]
    assert m3.groups(STEP) == [Group(0, 0, 3, 1, 64)]


def test_pages_are_whole(device):
    with pytest.raises(ValueError, match=r"whole pages of 16 keys, got \[60\]"):
        m3.combined(Case(2, 16, 16, 48, 6, "decode", "fp32", HKV=2, S_kv=60, block_size=16).make(device))


def test_what_is_timed():
    cases = {name: shape.case for name, shape in m3.NAMED.items()}
    assert len(m3.NAMED) == 19
    assert all((c.HQ, c.HKV, c.D, c.Dv, c.n, c.block_size) == (64, 4, 128, 128, 16, 128) for c in cases.values())
    assert all(shape.fp8 == ("fp8" in name) for name, shape in m3.NAMED.items())
    assert [(cases[f"m3-decode-B{B}"].B, cases[f"m3-decode-B{B}"].S_kv) for B in (1, 8, 64, 256)] == [
        (1, 65_536), (8, 65_536), (64, 16_384), (256, 8192)
    ]  # fmt: skip
    assert {name for name, c in cases.items() if c.large} == {
        name for name in cases if "chunk4096" in name or "prompt" in name
    }
    assert {name for name, c in cases.items() if c.shared} == {name for name in cases if name.endswith("shared0.9")}
    assert all(peers.vllm_supports(c) is None for c in cases.values())


def test_vllm_takes_blocks_of_128_alone():
    """Its kernels have no argument for the size, so that other sizes would be timed as wrong, not left out."""
    case = m3.NAMED["m3-chunk512"].case
    assert peers.vllm_supports(replace(case, block_size=64)) == "takes blocks of 128 keys, got 64"


@pytest.mark.parametrize("name", ["step", "fp8"])
def test_vllm_itself_takes_these_arguments(device, name):
    if not peers.vllm():
        pytest.skip("vLLM with kernels for MiniMax-M3 is not installed")
    problem, module = m3.make(SMALL[name], device), peers.installed(peers.VLLM)
    for _, arguments in peers.vllm_arguments(problem):
        step = "decode_query_len" in arguments
        function = module.minimax_m3_sparse_attn_decode if step else module.minimax_m3_sparse_attn
        inspect.signature(function).bind(**arguments, output=problem.q)


FACTS = [
    {"impl": "m3", "case": "m3-decode-B8, eager", "group": "m3, host", "median": 35e-6,
     "left_out": {"vllm": "wrong: error 1 > bound 0.1"}},
    {"impl": "m3", "case": "m3-fp8-decode-B64", "group": "m3, fp8", "median": 48e-6, "share_of_read": 0.925,
     "medians": {"m3": 48e-6, "vllm": 97.4e-6, "m3_bf16": 94.1e-6}, "share_of_ceiling": 0.9, "gbps": 2700.0},
    {"impl": "m3", "case": "m3-ragged", "group": "m3, ragged", "median": 8e-4, "medians": {"calls_apart": 7.84e-4}},
]  # fmt: skip


def test_a_run_ends_with_a_line_for_each_shape():
    lines = summary.lines(FACTS)
    start = next(i for i, line in enumerate(lines) if line.startswith("shape "))
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["ragged", "800.0", "-", "-", "0.98×", "-"],
        ["fp8-decode-B64", "48.0", "2.03×", "1.96×", "-", "92.5%"],
        ["decode-B8,", "eager", "35.0", *"----"],
    ]
    assert lines[start + 4] == "m3-decode-B8, eager: vllm not timed: wrong: error 1 > bound 0.1"
    assert not any("comparators not timed" in line for line in lines), "told once"
    assert not any("of ceiling" in line for line in lines), "in a table of their own, and in no other"


FACTS_OF_QSA = [
    {"case": "qsa-training-shared0.9", "group": "qsa, training: step", "S": 8192, "median": 9.88e-3,
     "ns_per_query": 1206.0, "memory_vs_flash": 0.56, "medians": {"ours": 9.88e-3, "dense_cudnn": 6.32e-3}},
    {"impl": "m3", "case": "qsa-decode-B1", "group": "qsa, decode", "median": 9.1e-6, "share_of_read": 0.15,
     "medians": {"m3": 9.1e-6, "vllm": 9.5e-6}, "share_of_ceiling": 0.15, "gbps": 464.0},
]  # fmt: skip


SHARDED = {
    "group": "context parallel", "name": "test_context_parallel[2gpus]", "world": 2, "tokens": 131_072,
    "median": 48.85e-3, "control": "one_gpu", "control_median": 90.46e-3, "ratio_to_control": 0.54, "speedup": 1.852,
    "hidden": 0.568, "memory": 1.121, "world_of_1": 0.998, "long": 1.298, "sharded": {},
}  # fmt: skip


@pytest.mark.parametrize(("facts", "title", "rows"), [
    (FACTS, "MiniMax-M3", [
        "| ragged | 800.0 | - | - | 784.0 (0.98×) | - |",
        "| fp8-decode-B64 | 48.0 | 97.4 (2.03×) | 94.1 (1.96×) | - | 92.5% |",
        "| decode-B8, eager | 35.0 | - | - | - | - |",
    ]),
    (FACTS_OF_QSA, "QSA", [
        "| decode-B1 | 9.1 | 9.5 (1.04×) | - | - | 15.0% |",
        "| training-shared0.9, step | 9880.0 | - | 6320.0 (0.64×) | 0.56× | - |",
    ]),
    ([SHARDED], "Context parallel", ["| 2 | 131072 | 48.85 | 90.46 (1.85×) | 57% | 1.12× | 1.00× | 1.30× |"]),
], ids=["m3", "qsa", "sharded"])  # fmt: skip
def test_a_page_has_a_table_with_a_line_for_each_shape(facts, title, rows):
    (table,) = tables.of(facts)
    assert table.title == title
    assert markdown(table).splitlines()[2:] == rows


# --- QSA: one list for all KV heads -----------------------------------------------------------------------------------

QSA_CHUNK = Case(2, 16, 16, 20, 12, "prefill", "fp16", HKV=2, S=6, S_kv=64, block_size=4, n=5, shared=0.9)
QSA_STEPS = Case(2, 16, 16, 20, 6, "decode", "fp16", HKV=2, S_kv=128, block_size=4, n=5)
QSA = {"chunk": Shape(QSA_CHUNK), "steps": Shape(QSA_STEPS), "fp8": Shape(QSA_CHUNK, fp8=True)}


def vllm_qsa(
    q, k_cache, v_cache, logical_indices, block_table, token_to_req, use_prefill_config, out, k_scale=1.0, v_scale=1.0,
    *, output_gate,
):  # fmt: skip
    """vLLM's function in plain torch: the first keys of a row, as many as its last column says."""
    page, G = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for t, row in enumerate(logical_indices):
        keys = row[: row[-1]].long()
        assert (keys >= 0).all()
        pages = block_table[token_to_req[t]].long()[keys // page]
        k, v = (
            x.double()[pages, keys % page].repeat_interleave(G, 1) * scale
            for x, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        p = torch.einsum("hd,lhd->hl", q[t].double(), k).mul(q.shape[-1] ** -0.5).softmax(-1)
        out[t] = torch.einsum("hl,lhd->hd", p, v).to(q.dtype) * output_gate.view_as(q)[t].sigmoid()


@pytest.mark.parametrize("shape", QSA.values(), ids=QSA)
def test_both_kernels_of_qsa_read_what_the_oracle_reads(shape, device):
    p = qsa.make(shape, device)
    assert p.block_indices.stride()[-2] == 0
    assert p.derived(m3.combined).pages.shape[2] == m3.SMALL_PAGE
    truth = Oracle.of(p)
    assert_parity(M3.run(p), truth, "ours")
    assert_parity(Contestant("vllm", peers.call_qsa(vllm_qsa), lse=False).run(p), truth, "vllm")


def test_shapes_of_qsa_are_those_of_the_model():
    for name, shape in qsa.NAMED.items():
        case = shape.case
        assert (case.HQ, case.HKV, case.D, case.block_size, case.n) == (24, 2, 256, 4, 513), name
        assert ("fp8" in name) == shape.fp8
        assert ("shared" in name) == bool(case.shared)
