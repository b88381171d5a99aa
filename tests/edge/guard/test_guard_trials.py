"""A trial compiles what the parent is about to, finds right kernels right, and wrong ones wrong."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nsa
from nsa import settings
from nsa.call import Call
from nsa.guard import child
from nsa.guard.trials import TRIALS, Trial
from nsa.kernels import pinned
from nsa.kernels.backward import plan as backward
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.query_major import tiles
from nsa.kernels.shared import asking
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared.launch import Variant
from nsa.plain.oracle import beyond_rounding
from nsa.testing.compile.points import ARCHITECTURES

pytestmark = pytest.mark.usefixtures("fresh_routes", "fresh_plans")
SCRIPT = Path(__file__).with_name("guard_variants.py")
ROOT = Path(nsa.__file__).parents[1]


def test_it_launches_what_the_parent_would():
    """Every point of the compile matrix, with tensors without data for GPUs that are not there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "TRITON_"))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {name: x["differs"] for name, x in report.items() if x["differs"]} == {}
    assert {name.split()[0] for name in report} == {name for name in ARCHITECTURES if name.startswith("sm_")}
    assert {name.split()[-1] for name in report} == set(TRIALS)
    assert any(x["cluster"] for x in report.values())


def fresh():
    """Nothing is planned, so that a tile given to the trial is not taken for that of the call."""
    settings.reload()
    launching.forget()


@pytest.fixture
def launches_of(monkeypatch):
    """`launches_of(call)`: what a parent would ask a child about the call."""

    def make(call):
        asked = []
        with monkeypatch.context() as patch:
            patch.setattr(asking, "ask", lambda variant, device, tensors: asked.append((variant, tensors)))
            fresh()
            call()
        return [json.loads(json.dumps(variant.describe(tensors))) for variant, tensors in asked]

    return make


@pytest.fixture
def attempt(monkeypatch, device):
    """`attempt(what)`: what the child would answer, without a process of its own."""

    def make(what):
        with monkeypatch.context() as patch:
            patch.setattr(asking, "ask", asking.ask)
            seen = child.watch(what)
            wrong = TRIALS[what["kernel"]](Trial(what, device, lambda kind, text: None))
            assert what in seen
        fresh()
        return wrong

    return make


def misaligned(x):
    padded = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return padded[1:].view(x.shape).copy_(x)


@pytest.fixture
def calls(draw, same, device):
    """Calls that compile different variants, by name."""
    q, k, v = draw()
    ranges = {"ranges": same([(0, 7), (9, 13)], 1, 3, 2)}
    blocks = {"block_indices": same([1, -1, 0], 1, 3, 2), "block_size": 16}
    odd = draw(G=3, D=20, Dv=36, HKV=1)
    cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    packed = draw(S=3, S_kv=21, varlen=True)
    long = [x[:, :, 0].half() for x in draw(B=2, S=1, S_kv=120, HKV=1, G=1, D=128, Dv=128)]
    rows = q[0].flatten(0, 1)[:, None], *(x[0].transpose(0, 1).repeat(6, 1, 1) for x in (k, v))
    n = torch.arange(rows[0].shape[0] + 1, dtype=torch.int64, device=device) * 3
    front = nsa.selection_attention
    lengths = torch.tensor([20], dtype=torch.int32, device=device)
    pages = [x.view(3, 8, *x.shape[2:]) for x in (k, v)]
    cached = functools.partial(nsa.selection_attention_with_kvcache, q, cache_seqlens=lengths)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    scales = {"k_scale": torch.ones(2, device=device), "v_scale": torch.ones([], device=device)}
    cached_e4m3 = functools.partial(nsa.selection_attention_with_kvcache, q.half(), cache_seqlens=lengths, **scales)
    return {
        "more-spans-than-one-holds": lambda: front(q, k, v, ranges=same([(0, 7), (9, 13)] * 40, 1, 3, 2)),
        "more-blocks-in-one-tile": lambda: front(q, k, v, block_indices=same([1, -1, 0] * 30, 1, 3, 2), block_size=1),
        "cache": lambda: cached(k, v, **ranges),
        "int64-cache": lambda: cached(k, v, **blocks | {"cache_seqlens": lengths.long()}),
        "pages": lambda: cached(*pages, **blocks, block_table=table),
        "ragged": lambda: nsa.selection_attention_with_kvcache(
            q[0], *pages, cache_seqlens=lengths, cu_seqlens_q=cu[[0, 2]], block_table=table,
            block_indices=blocks["block_indices"][0], block_size=16,
        ),
        "e4m3": lambda: cached_e4m3(*(x.to(torch.float8_e4m3fn) for x in pages), **blocks, block_table=table),
        "spans-in-pages": lambda: cached(*pages, **ranges, block_table=table.long(), return_lse=True),
        "ranges": lambda: front(q, k, v, **ranges),
        "lse": lambda: front(q, k, v, **ranges, return_lse=True),
        "fp16": lambda: front(q.half(), k.half(), v.half(), **ranges),
        "long": lambda: nsa.sel_attn_fwd_dense_group(*long),
        "int64": lambda: front(q, k, v, ranges=ranges["ranges"].long(), causal=False),
        "misaligned": lambda: front(misaligned(q), k, misaligned(v), ranges=misaligned(ranges["ranges"])),
        "positions": lambda: front(q, k, v, **ranges, q_positions=torch.zeros(1, 3, dtype=torch.int64, device=device)),
        "blocks": lambda: front(q, k, v, block_indices=blocks["block_indices"], block_size=7),
        "tiled": lambda: front(q, k, v, **blocks),
        "odd": lambda: front(*odd, ranges=same([(0, 7)], 1, 3, 1)),
        "one": lambda: front(*draw(S=1, HKV=1), ranges=same([(0, 7)], 1, 1, 1)),
        "per-head": lambda: front(q, k, v, **ranges, schedule="per_head"),
        "varlen": lambda: front(*packed, ranges=same([(0, 7), (9, 13)], 3, 2), cu_seqlens=(cu, cu.long() * 7)),
        "dense": lambda: nsa.sel_attn_fwd_dense_group(*rows, return_lse=True),
        "packed": lambda: nsa.sel_attn_fwd_varlen_group(
            rows[0], rows[1].flatten(0, 1), rows[2].flatten(0, 1), n, max_selected=3
        ),
    }


KEY_MAJOR = "ranges blocks odd varlen positions int64 tiled-walk walk cache-walk e4m3-walk pages-walk pages".split()
KEY_MAJOR += ["ragged"]
NAMES = "ranges lse fp16 long int64 misaligned positions blocks tiled odd one per-head varlen dense packed".split()
NAMES += "cache int64-cache pages e4m3 ragged spans-in-pages more-spans-than-one-holds more-blocks-in-one-tile".split()


@pytest.mark.parametrize("name", NAMES)
def test_right_kernels_are_right(calls, launches_of, attempt, name):
    assert sorted(calls) == sorted(NAMES)
    with nsa.configure(sel_triton_min_L=0):
        (what,) = launches_of(calls[name])
        assert attempt(what) is None


@pytest.fixture
def key_major_calls(draw, same, device):
    """Calls of the key-major kernels that compile different variants, by name."""
    how = {"schedule": "key_major", "return_lse": True}
    q, k, v = draw()
    ranges = {"ranges": same([(0, 7), (9, 13)], 1, 3, 2)}
    blocks = {"block_indices": same([1, -1, 0], 1, 3, 2), "block_size": 16}
    wide = [x.half() for x in draw(S=16, S_kv=32, G=9, HKV=1)]
    walked = same([1, -1, 0], 1, 16, 1)
    lengths = torch.tensor([27], dtype=torch.int32, device=device)
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    pages = [x.view(2, 16, *x.shape[2:]) for x in wide[1:]]
    cached = functools.partial(nsa.selection_attention_with_kvcache, wide[0], **how, cache_seqlens=lengths)
    e4m3 = [torch.cat((x, x), -1).to(torch.float8_e4m3fn) for x in wide[1:]]
    e4m3[0] = e4m3[0][..., : wide[0].shape[-1]]  # values of 32 elements are read in pairs
    cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    packed = draw(S=3, S_kv=21, varlen=True)
    front = functools.partial(nsa.selection_attention, **how)
    return {
        "ranges": lambda: front(q, k, v, **ranges),
        "blocks": lambda: front(q, k, v, **blocks),
        "odd": lambda: front(*draw(G=3, D=20, Dv=36), block_indices=blocks["block_indices"], block_size=300),
        "varlen": lambda: front(*packed, ranges=same([(0, 7), (9, 13)], 3, 2), cu_seqlens=(cu, cu.long() * 7)),
        "positions": lambda: front(q, k, v, **ranges, q_positions=torch.zeros(1, 3, dtype=torch.int64, device=device)),
        "int64": lambda: front(q.half(), k.half(), v.half(), ranges=ranges["ranges"].long(), causal=False),
        "tiled-walk": lambda: front(*wide, block_indices=walked, block_size=16),
        "walk": lambda: front(*wide, block_indices=walked, block_size=7),
        "cache-walk": lambda: cached(*wide[1:], block_indices=walked, block_size=16),
        "e4m3-walk": lambda: cached(*e4m3, block_indices=walked, block_size=16, v_scale=torch.ones(1, device=device)),
        "pages-walk": lambda: cached(*pages, block_indices=walked, block_size=16, block_table=table),
        "pages": lambda: cached(*pages, ranges=same([(0, 7), (9, 30)], 1, 16, 1), block_table=table),
        "ragged": lambda: nsa.selection_attention_with_kvcache(
            q[0], k, v, cache_seqlens=lengths, cu_seqlens_q=cu[[0, 2]], ranges=ranges["ranges"][0], **how
        ),
    }


@pytest.mark.parametrize("splits", [1, 2], ids=["whole", "split"])
@pytest.mark.parametrize("schedule", ["key_major", "union"])
def test_right_kernels_of_steps_are_right(draw, device, launches_of, attempt, schedule, splits):
    """A chunk, a step and a token of no sequence."""
    q, k, v = draw(S=12, S_kv=32)
    blocks = torch.tensor([[1, 0]], dtype=torch.int32, device=device).repeat(12, 2, 1)
    cu, lengths = (torch.tensor(x, device=device) for x in ([0, 10, 11], [30, 32]))
    k, v = (x.repeat(2, 1, 1, 1) for x in (k, v))
    call = functools.partial(
        nsa.selection_attention_with_kvcache, q[0], k, v, cache_seqlens=lengths, cu_seqlens_q=cu, block_indices=blocks,
        block_size=16, schedule=schedule, backend="triton", return_lse=True,
    )  # fmt: skip
    with pinned(query_major=tiles.Choice(splits, 1, 16, 4, 2, 0)):
        whats = launches_of(call)
    begin = ["_fwd_kernel", "_combine_kernel"][:splits] + ["_list_kernel", "_union_kernel"] * (schedule == "union")
    assert [what["kernel"] for what in whats] == [*begin, "_count_kernel", "_scan_kernel", "_scatter_kernel", *LAST]
    assert whats[0]["constexprs"]["STEPS"]
    assert [attempt(what) for what in whats if what["kernel"] != "_scatter_kernel"] == [None] * (len(whats) - 1)
    (without,) = (what for what in launches_of(functools.partial(call, max_seqlen_q=1)) if what["kernel"] == LAST[0])
    assert attempt(without) is None


@pytest.mark.parametrize("name", KEY_MAJOR)
def test_right_key_major_kernels_are_right(key_major_calls, launches_of, attempt, name):
    assert sorted(key_major_calls) == sorted(KEY_MAJOR)
    with nsa.configure(sel_triton_min_L=0):
        whats = launches_of(key_major_calls[name])
        assert [what["kernel"] for what in whats] == ["_count_kernel", "_scan_kernel", "_scatter_kernel", *LAST]
        assert whats[-1]["constexprs"]["WALK"] == ("walk" in name)
        alike = ("_scan_kernel", "_scatter_kernel")  # three variants: tried for a call of each
        tried = [what for what in whats if name in ("blocks", "walk", "int64") or what["kernel"] not in alike]
        assert [attempt(what) for what in tried] == [None] * len(tried)


def test_a_wrong_key_major_merge_is_wrong(key_major_calls, launches_of, attempt, damaged):
    with nsa.configure(sel_triton_min_L=0):
        what = launches_of(key_major_calls["blocks"])[-1]
        for wrong, begin in damaged(attempt, what):
            assert wrong.startswith(begin)


@pytest.mark.parametrize("kernel", ["_scatter_kernel", "_partial_kernel"])
def test_a_lost_unit_is_wrong(key_major_calls, launches_of, attempt, monkeypatch, kernel):
    """One unit of many: another takes its place in the list, or its result is off."""
    real = Variant.launch
    of = {"_scatter_kernel": "unit_ptr", "_partial_kernel": "part_ptr"}

    def launch(self, grid, device, tensors, *rest):
        real(self, grid, device, tensors, *rest)
        if self.kernel.fn.__name__ == kernel:
            x = tensors[self.kernel.arg_names.index(of[kernel])]
            x[0] = x[1] if kernel == "_scatter_kernel" else -9

    with nsa.configure(sel_triton_min_L=0):
        what = next(x for x in launches_of(key_major_calls["blocks"]) if x["kernel"] == kernel)
        with monkeypatch.context() as patch:
            patch.setattr(Variant, "launch", launch)
            assert "max" in attempt(what)


LAST = ["_partial_kernel", "_merge_kernel"]


@pytest.fixture
def backward_calls(draw, same, device):
    """Backward passes that compile different variants, by name."""
    cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    ranges, blocks = same([(0, 7), (9, 13)], 1, 3, 2), same([1, -1, 0], 1, 3, 2)

    def passing(qkv, selection, block_size=None, with_lse=False, **about):
        kind = "ranges" if block_size is None else "block_indices"
        call = Call(*qkv, **{kind: selection, "block_size": block_size, "causal": False} | about)

        def launch():
            q, v = call.q, call.v
            do = torch.ones(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=device)
            lse = torch.ones(q.shape[:-1], device=device)
            backward.backward(backward.plan(call), call, do, lse if with_lse else None, do, lse, "backward")

        return launch

    halves = [x.half() for x in draw(G=3, D=20, Dv=36)]
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu.long() * 7, "causal": True}
    where = torch.zeros(1, 3, dtype=torch.int64, device=device)
    return {
        "ranges": passing(draw(), ranges, causal=True, q_positions=where),
        "blocks": passing(halves, blocks, 16, with_lse=True),
        "large-blocks": passing([x.half() for x in draw(S_kv=200, G=8)], blocks.long(), 96, causal=True),
        "varlen": passing(draw(S=3, S_kv=21, varlen=True), ranges[0], **packed),
    }


@pytest.mark.parametrize("name", ["ranges", "blocks", "large-blocks", "varlen"])
def test_right_backward_kernels_are_right(backward_calls, launches_of, attempt, name):
    whats = launches_of(backward_calls[name])
    dq = ["_gather_kernel"] if name == "blocks" else ["_dq_kernel"]
    index = ["_order_kernel", "_strip_kernel", "_scan_kernel", "_scatter_kernel"]
    assert sorted(what["kernel"] for what in whats) == sorted(
        ["_delta_kernel", *index, "_dkdv_kernel", "_sum_kernel", *dq]
    )
    alike = ("_delta_kernel", "_strip_kernel", "_scan_kernel", "_scatter_kernel")  # tried once is enough
    tried = [what for what in whats if name == "blocks" or what["kernel"] not in alike]
    assert [attempt(what) for what in tried] == [None] * len(tried)


@pytest.mark.parametrize(
    ("kernel", "tensor", "said"),
    [
        ("_delta_kernel", "stats_ptr", "max d"),
        ("_dkdv_kernel", "dk_ptr", "max dk error"),
        ("_dkdv_kernel", "dv_ptr", "max dv error"),
        ("_gather_kernel", "dq_ptr", "max dq error"),
        ("_scatter_kernel", "unit_ptr", "max d"),
        ("_sum_kernel", "dk_ptr", "max dk error"),
        ("_sum_kernel", "dv_ptr", "max dv error"),
    ],
)
def test_wrong_backward_kernels_are_wrong(backward_calls, launches_of, attempt, monkeypatch, kernel, tensor, said):
    """One element of what it writes is off; of the list of units another takes its place."""
    real = Variant.launch

    def launch(self, grid, device, tensors, *rest):
        real(self, grid, device, tensors, *rest)
        if self.kernel.fn.__name__ == kernel:
            x = tensors[self.kernel.arg_names.index(tensor)].view(-1)
            x[0] = x[1] if tensor == "unit_ptr" else x[0] + 0.5

    what = next(x for x in launches_of(backward_calls["blocks"]) if x["kernel"] == kernel)
    with monkeypatch.context() as patch:
        patch.setattr(Variant, "launch", launch)
        assert attempt(what).startswith(said)


def test_split_and_merge(calls, launches_of, attempt, split):
    with nsa.configure(sel_triton_min_L=0):
        whats = launches_of(calls["lse"])
        assert [attempt(what) for what in whats] == [None] * len(whats)
        assert whats[0]["constexprs"]["SPLIT"]


@pytest.fixture(params=["o", "lse"])
def damaged(request, monkeypatch):
    """`damaged(attempt, what)`: answers where one element of the result or its LSE is off, or never written."""
    real = Variant.launch

    def make(attempt, what):
        for damage in (0.1, float("nan")):

            def launch(self, grid, device, tensors, *rest, damage=damage):
                real(self, grid, device, tensors, *rest)
                if self.kernel.fn.__name__ != what["kernel"]:
                    return
                x = tensors[self.kernel.arg_names.index(f"{request.param}_ptr")]
                if x is not None:
                    x[(0,) * x.dim()] += damage

            with monkeypatch.context() as patch:
                patch.setattr(Variant, "launch", launch)
                yield attempt(what), "max error" if request.param == "o" else "max LSE error"

    return make


def test_wrong_kernels_are_wrong(calls, launches_of, attempt, damaged):
    with nsa.configure(sel_triton_min_L=0):
        (what,) = launches_of(calls["lse"])
        for wrong, begin in damaged(attempt, what):
            assert wrong.startswith(begin)


def test_a_wrong_merge_is_wrong(calls, launches_of, attempt, damaged, split):
    with nsa.configure(sel_triton_min_L=0):
        what = launches_of(calls["lse"])[-1]  # of two kernels, or of one in a cluster
        for wrong, begin in damaged(attempt, what):
            assert wrong.startswith(begin)


def lost_tail(c, tensors, numbers):
    """The end of the cache, less than a tile."""
    at = 2  # S_kv
    assert 0 < numbers[at] % c["BLOCK_L"]
    return tensors, (*numbers[:at], numbers[at] - numbers[at] % c["BLOCK_L"], *numbers[at + 1 :])


def lost_first_key(c, tensors, numbers):
    """Of the cache."""
    q, k, v, *rest = tensors
    return (q, k[:, 1:], v[:, 1:], *rest), (*numbers[:2], numbers[2] - 1, *numbers[3:])


def dropped_element(c, tensors, numbers):
    """The last of a query's head dimension, and with it of the keys'."""
    tensors[0][..., -1] = 0
    return tensors, numbers


def wrong_scale(c, tensors, numbers):
    *sizes, scale, stride_tb = numbers
    return tensors, (*sizes, scale * 1.03, stride_tb)


@pytest.mark.parametrize("mutate", [lost_tail, lost_first_key, dropped_element, wrong_scale])
@pytest.mark.parametrize("name", ["fp16", "long"])
def test_a_kernel_that_is_hardly_wrong_is_wrong(calls, launches_of, attempt, monkeypatch, name, mutate):
    """The real kernel, given something else than the reference is."""
    real = Variant.launch

    def launch(self, grid, device, tensors, numbers, *rest):
        q = tensors[0].clone(memory_format=torch.preserve_format)
        real(self, grid, device, *mutate(self.constexprs, tensors, numbers), *rest)
        tensors[0].copy_(q)

    with nsa.configure(sel_triton_min_L=0):
        (what,) = launches_of(calls[name])
        monkeypatch.setattr(Variant, "launch", launch)
        assert what["tensors"]["lse_ptr"] is None
        assert attempt(what).startswith("max error")


def test_nothing_but_zeros_is_compared_too():
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    assert beyond_rounding(nothing.half(), nothing, torch.float16) is None
    assert beyond_rounding(nothing.half() + 0.01, nothing, torch.float16).startswith("max error 0.01")
    assert beyond_rounding(nothing - torch.inf, nothing - torch.inf, torch.float32) is None


@pytest.fixture
def backward_unions(draw, same, device, launches_of):
    """What a parent would ask a child about a backward pass with unions."""
    q, k, v = (x.half() for x in draw(S=9, G=9))
    call = Call.of(q, k, v, block_indices=same([1, -1, 0], 1, 9, 2), block_size=16, causal=True)
    lse = torch.ones(q.shape[:-1], device=device)
    with pinned(backward_unions=backward_tiles.Unions(rows=0)):
        call = call._replace(settings=settings.get())
    return launches_of(lambda: backward.backward(backward.plan(call), call, q, None, q, lse, "backward"))


def test_right_kernels_of_backward_unions_are_right(backward_unions, attempt):
    """Rows with unions and rows without are listed by one order kernel, and have a kernel of dK and dV each."""
    kernels = "delta list union_dq order strip scan scatter dkdv sum order strip scan scatter dkdv sum gather"
    assert [what["kernel"] for what in backward_unions] == [f"_{name}_kernel" for name in kernels.split()]
    special = ("_list_kernel", "_union_dq_kernel", "_order_kernel", "_dkdv_kernel", "_gather_kernel")
    tried = [what for what in backward_unions if what["kernel"] in special]
    assert [attempt(what) for what in tried] == [None] * len(tried)


def test_wrong_kernels_of_backward_unions_are_wrong(backward_unions, attempt, monkeypatch):
    real = Variant.launch

    def launch(self, grid, device, tensors, *rest):
        real(self, grid, device, tensors, *rest)
        if self.kernel.fn.__name__ == "_union_dq_kernel":
            tensors[self.kernel.arg_names.index("dq_ptr")].view(-1)[0] += 0.5

    what = next(x for x in backward_unions if x["kernel"] == "_union_dq_kernel")
    with monkeypatch.context() as patch:
        patch.setattr(Variant, "launch", launch)
        assert attempt(what).startswith("max dq error")
