"""A child makes a small call that compiles what the caller's will, finds right kernels right, and wrong ones wrong.

Here the child is this process: what it is asked, and answers, is the same.
"""

import functools
import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import nsa
from nsa import failures, settings
from nsa.guard import child, parent
from nsa.kernels import pinned
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.families import BACKWARDS, FAMILIES
from nsa.kernels.key_major import tiles as key_tiles
from nsa.kernels.query_major import tiles
from nsa.kernels.shared import asking, sources
from nsa.kernels.shared import launch as launching
from nsa.kernels.shared.launch import Variant
from nsa.kernels.shared.sizes import ALWAYS
from nsa.kernels.union import tiles as union_tiles
from nsa.plain.oracle import beyond_rounding
from nsa.testing.compile.points import ARCHITECTURES
from nsa.testing.matrix import strategies
from nsa.testing.matrix.strategies import Drawn
from nsa.testing.profiles import drawing

pytestmark = pytest.mark.usefixtures("fresh_routes", "fresh_plans", "untried")
SCRIPT = Path(__file__).with_name("guard_variants.py")


def test_it_launches_what_the_parent_would(compiling):
    """Points of the compile matrix, with tensors without data for GPUs that are not there."""
    report = json.loads(compiling(SCRIPT))
    assert {name: x["differs"] for name, x in report.items() if x["differs"]} == {}
    assert {name.split()[0] for name in report} == {name for name in ARCHITECTURES if name.startswith("sm_")}
    folders = [*(family.name for family in (*FAMILIES, *BACKWARDS)), "shared"]
    functions = {name for folder in folders for name in sources.functions(folder) if name.endswith("_kernel")}
    assert {name.split()[-1] for name in report} == functions
    assert any(x["cluster"] for x in report.values())


@pytest.fixture
def asked(monkeypatch, device):
    """`[(what, verdict)]` of all calls from now on, which this process answers in place of a child."""
    found = []

    def ask(what, _):
        says = {}
        what = json.loads(json.dumps(what))
        launching.forget()
        with monkeypatch.context() as patch:
            patch.setattr(asking, "ask", asking.ask)
            with torch.enable_grad():  # which a backward pass switches off, in this process only
                wrong = child.answer(what, device, says.__setitem__)
        verdict = parent.judge(0, says | {"phase": "comparing", "result": wrong or "right"}, "")
        found.append((what, verdict))
        return verdict

    monkeypatch.setattr(parent, "ask", ask)
    return found


@pytest.fixture
def right(asked):
    """`right(call) -> kernels`: makes a call, and checks that its kernels were tried and found right, all at once."""

    def make(call):
        before = len(asked)
        settings.reload()
        launching.forget()
        call()
        new = asked[before:]
        assert [verdict.cause for _, verdict in new] == [None] * len(new)
        assert not failures.broken, "what was about to be compiled was not among what the child compiled"
        return [variant["kernel"] for _, verdict in new for variant in verdict.variants]

    return make


def misaligned(x):
    padded = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return padded[1:].view(x.shape).copy_(x)


def of_drawn(drawn, device):
    """A call that Hypothesis drew."""
    p = (drawn if isinstance(drawn, Drawn) else drawn.call).problem(device)
    if isinstance(drawn, Drawn):
        return functools.partial(nsa.selection_attention, p.q, p.k, p.v, **p.selection)
    cache, q = drawn.cache(device), p.q.half() if drawn.e4m3 else p.q
    name, size = ("ranges", None) if p.block_indices is None else ("block_indices", p.block_size)
    rows, cu = getattr(p, name), None
    if drawn.ends:
        q, rows, cu = q.flatten(0, 1), rows.flatten(0, 1), drawn.cu_seqlens_q(device)
    return functools.partial(
        nsa.selection_attention_with_kvcache, q, cache.k, cache.v, **cache.arguments, **{name: rows}, block_size=size,
        causal=p.causal, cu_seqlens_q=cu,
    )  # fmt: skip


SPANS_AND_BLOCKS = st.sampled_from(("ranges", "blocks"))
ANY = st.one_of(
    st.sampled_from(("ranges", "blocks", "packed")).flatmap(strategies.calls),
    SPANS_AND_BLOCKS.flatmap(strategies.cached_calls),
    SPANS_AND_BLOCKS.flatmap(strategies.ragged_calls),
)


@hypothesis.settings(drawing(4 / 5), suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(ANY, st.sampled_from(["query_major", "per_head", "key_major"]), st.booleans())
def test_right_kernels_of_any_call_are_right(device, right, drawn, schedule, lse):
    """Spans and blocks of any kind, caches and pages, sequences, positions, int64, head dims and groups."""
    right(lambda: of_drawn(drawn, device)(schedule=schedule, return_lse=lse))


@pytest.fixture
def calls(draw, same, device):
    """Calls of the suite's other tests, and what is not drawn, by name."""
    q, k, v = draw()
    ranges = {"ranges": same([(0, 7), (9, 13)], 1, 3, 2)}
    blocks = {"block_indices": same([1, -1, 0], 1, 3, 2), "block_size": 16}
    long = [x[:, :, 0].half() for x in draw(B=2, S=1, S_kv=120, HKV=1, G=1, D=128, Dv=128)]
    rows = q[0].flatten(0, 1)[:, None], *(x[0].transpose(0, 1).repeat(6, 1, 1) for x in (k, v))
    n = torch.arange(rows[0].shape[0] + 1, dtype=torch.int64, device=device) * 3
    front = nsa.selection_attention
    lengths = torch.tensor([20, 20], dtype=torch.int32, device=device)
    pages = [x.view(3, 8, *x.shape[2:]) for x in (k, v)]
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device).repeat(2, 2)
    return {
        "more-spans-than-one-holds": lambda: front(q, k, v, ranges=same([(0, 7), (9, 13)] * 40, 1, 3, 2)),
        "more-blocks-in-one-tile": lambda: front(q, k, v, block_indices=same([1, -1, 0] * 30, 1, 3, 2), block_size=1),
        "sliced-table": lambda: nsa.selection_attention_with_kvcache(
            torch.cat((q, q)), *pages, cache_seqlens=lengths, block_table=table[:, 1:4],
            block_indices=blocks["block_indices"].repeat(2, 1, 1, 1), block_size=16,
        ),
        "lse": functools.partial(front, q, k, v, **ranges, return_lse=True),
        "fp16": lambda: front(q.half(), k.half(), v.half(), **ranges),
        "long": lambda: nsa.sel_attn_fwd_dense_group(*long),
        "misaligned": lambda: front(misaligned(q), k, misaligned(v), ranges=misaligned(ranges["ranges"])),
        "dense": lambda: nsa.sel_attn_fwd_dense_group(*rows, return_lse=True),
        "packed": lambda: nsa.sel_attn_fwd_varlen_group(
            rows[0], rows[1].flatten(0, 1), rows[2].flatten(0, 1), n, max_selected=3
        ),
    }  # fmt: skip


@pytest.fixture
def key_major_calls(draw, same, device):
    """Calls of the key-major kernels whose merge reads keys, and one whose merge reads none, by name."""
    how = {"schedule": "key_major", "return_lse": True, "block_size": 16}
    wide = [x.half() for x in draw(S=16, S_kv=32, G=9, HKV=1)]
    walked = same([1, -1, 0], 1, 16, 1)
    lengths = torch.tensor([27], dtype=torch.int32, device=device)
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    pages = [x.view(2, 16, *x.shape[2:]) for x in wide[1:]]
    cached = functools.partial(
        nsa.selection_attention_with_kvcache, wide[0], **how, cache_seqlens=lengths, block_indices=walked
    )
    e4m3 = [torch.cat((x, x), -1).to(torch.float8_e4m3fn) for x in wide[1:]]
    e4m3[0] = e4m3[0][..., : wide[0].shape[-1]]  # values of 32 elements are read in pairs
    front = functools.partial(nsa.selection_attention, **how)
    return {
        "blocks": functools.partial(front, *draw(), block_indices=same([1, -1, 0], 1, 3, 2)),
        "tiled-walk": lambda: front(*wide, block_indices=walked),
        "walk": lambda: front(*wide, block_indices=walked, block_size=7),
        "cache-walk": lambda: cached(*wide[1:]),
        "e4m3-walk": lambda: cached(*e4m3, v_scale=torch.ones(1, device=device)),
        "pages-walk": lambda: cached(*pages, block_table=table),
    }


@pytest.fixture(params=["few units", "many units"])
def of_key_major(request, monkeypatch):
    """The kernels of a call of key-major, with the lists that one program makes and with those of three launches."""
    if request.param == "few units":
        return ["_lists_kernel", "_partial_kernel", "_merge_kernel"]
    monkeypatch.setattr(key_tiles, "FEW_UNITS", 0)
    return ["_count_kernel", "_scan_kernel", "_scatter_kernel", "_partial_kernel", "_merge_kernel"]


def test_right_kernels_are_right(calls, right):
    for name, call in calls.items():
        assert right(call) == ["_fwd_kernel"], name


def test_right_kernels_of_key_major_are_right(key_major_calls, of_key_major, right):
    for name, call in key_major_calls.items():
        assert right(call) == of_key_major, name


SORT = ["_order_kernel", "_strip_kernel", "_scan_kernel", "_scatter_kernel", "_dkdv_kernel", "_sum_kernel"]


@pytest.mark.parametrize("splits", [1, 2], ids=["whole", "split"])
@pytest.mark.parametrize("schedule", ["key_major", "union"])
def test_right_kernels_of_steps_are_right(draw, device, right, of_key_major, schedule, splits):
    """A chunk, a step and a token of no sequence."""
    q, k, v = draw(S=12, S_kv=32)
    blocks = torch.tensor([[1, 0]], dtype=torch.int32, device=device).repeat(12, 2, 1)
    cu, lengths = (torch.tensor(x, device=device) for x in ([0, 10, 11], [30, 32]))
    k, v = (x.repeat(2, 1, 1, 1) for x in (k, v))
    call = functools.partial(
        nsa.selection_attention_with_kvcache, q[0], k, v, cache_seqlens=lengths, cu_seqlens_q=cu, block_indices=blocks,
        block_size=16, schedule=schedule, backend="triton", return_lse=True,
    )  # fmt: skip
    of_union = ["_list_kernel", "_union_kernel"] * (schedule == "union")
    with pinned(query_major=tiles.Choice(splits, 1, 16, 4, 2, 0)):
        assert right(call) == [*["_fwd_kernel", "_combine_kernel"][:splits], *of_union, *of_key_major]
        all_long = right(functools.partial(call, max_seqlen_q=1))
        assert all_long == [*of_union, *of_key_major], "all sequences must be long"


def test_right_kernels_of_rows_beside_unions_are_right(draw, device, right, pin):
    """Query-major that skips rows is tried in a child that launches it beside unions, too."""
    q, k, v = draw(S=12, S_kv=64, HKV=1, G=4)
    blocks = torch.tensor([[0, 1]] * 6 + [[0, 2], [1, 3]] * 3, dtype=torch.int32, device=device).view(1, 12, 1, 2)
    pin(union=union_tiles.Choice(by_row=True))
    call = functools.partial(
        nsa.selection_attention, q, k, v, block_indices=blocks, block_size=16, schedule="union", backend="triton"
    )
    assert sorted(right(call)) == ["_fwd_kernel", "_list_kernel", "_union_kernel"]


def trained(qkv, **selection):
    """A function: a training step. Its forward pass has been tried."""

    def step():
        leaves = [x.detach().requires_grad_() for x in qkv]
        with nsa.configure(probe="never"):
            o = nsa.selection_attention(*leaves, **selection, backend="triton", schedule="query_major")
            planned = o.grad_fn
        planned.rest = planned.rest[0][:-1] + (settings.get(),), *planned.rest[1:]  # the backward pass asks
        o.sum().backward()

    return step


@pytest.fixture
def steps(draw, same, device):
    """Training steps whose backward passes compile different variants, by name."""
    cu = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    ranges, blocks = same([(0, 7), (9, 13)], 1, 3, 2), same([1, -1, 0], 1, 3, 2)
    where = torch.zeros(1, 3, dtype=torch.int64, device=device)
    halves = [x.half() for x in draw(G=3, D=20, Dv=36)]
    large = [x.half() for x in draw(S_kv=200, G=8)]
    return {
        "ranges": trained(draw(), ranges=ranges, q_positions=where),
        "blocks": trained(halves, block_indices=blocks, block_size=16, causal=False),
        "large-blocks": trained(large, block_indices=blocks.long(), block_size=96),
        "varlen": trained(draw(S=3, S_kv=21, varlen=True), ranges=ranges[0], cu_seqlens=(cu, cu.long() * 7)),
    }


@pytest.mark.parametrize("name", ["ranges", "blocks", "large-blocks", "varlen"])
def test_right_backward_kernels_are_right(steps, right, name):
    dq = ["_gather_kernel"] if name == "blocks" else ["_dq_kernel"]
    assert sorted(right(steps[name])) == sorted(["_delta_kernel", *SORT, *dq])


def test_a_training_step_asks_twice(draw, same, asked, kept):
    """What a step costs is two small calls, one for each pass."""
    qkv = [x.requires_grad_() for x in draw(S=8, S_kv=8)]
    o = nsa.selection_attention(*qkv, block_indices=same([1, -1, 0], 1, 8, 2), block_size=4, schedule="key_major")
    o.sum().backward()
    assert {record.route for record in nsa.routes()} == {"key_major", "backward"}
    assert len(asked) == len(kept()) == 2
    assert sorted(len(json.loads(path.read_text())["variants"]) for path in kept()) == [3, 8]


@pytest.fixture
def unions(draw, same, pin):
    """A training step whose backward pass has unions."""
    pin(backward_unions=backward_tiles.Unions(0, 1, ALWAYS))
    q, k, v = (x.half() for x in draw(S=9, G=9))
    return trained((q, k, v), block_indices=same([1, -1, 0], 1, 9, 2), block_size=16)


def test_right_kernels_of_backward_unions_are_right(unions, right):
    """Rows with unions and rows without are listed by one order kernel, and have a kernel of dK and dV each."""
    assert sorted(right(unions)) == sorted(
        ["_delta_kernel", "_list_kernel", "_union_dq_kernel", *SORT, *SORT, "_gather_kernel"]
    )


@pytest.fixture
def said(asked, monkeypatch):
    """`said(call, kernel, change)`: the verdict on a call whose launches of `kernel` are followed by `change`."""
    real = Variant.launch

    def make(call, kernel, change):
        def launch(self, grid, device, tensors, *rest):
            real(self, grid, device, tensors, *rest)
            if self.kernel.fn.__name__ in kernel.split():
                given = [x.tensor() if isinstance(x, launching.Piece) else x for x in tensors]
                change(dict(zip(self.kernel.arg_names, given, strict=False)))

        with monkeypatch.context() as patch:
            patch.setattr(Variant, "launch", launch)
            with pytest.raises(nsa.guard.ProbeFailed):
                call()
        return asked[-1][1].cause

    return make


def off(name, by):
    def change(given):
        if given[name] is not None:  # an earlier kernel of the same call may not have it
            given[name][(0,) * given[name].dim()] += by

    return change


def swapped(given):
    """Of the list of units, another takes the first one's place."""
    given["unit_ptr"][0] = given["unit_ptr"][1]


@pytest.mark.parametrize("by", [0.1, float("nan")])
@pytest.mark.parametrize(("name", "text"), [("o_ptr", "max error"), ("lse_ptr", "max LSE error")])
def test_a_wrong_kernel_is_wrong(calls, said, name, text, by):
    call = functools.partial(calls["lse"], backend="triton")
    assert said(call, "_fwd_kernel", off(name, by)).startswith(f"wrong result: {text}")


@pytest.mark.parametrize(("name", "text"), [("o_ptr", "max error"), ("lse_ptr", "max LSE error")])
def test_a_wrong_merge_is_wrong(calls, key_major_calls, said, split, name, text):
    one, other = (functools.partial(call, backend="triton") for call in (calls["lse"], key_major_calls["blocks"]))
    for call, of in ((one, "_fwd_kernel _combine_kernel"), (other, "_merge_kernel")):  # in a cluster the first merges
        assert said(call, of, off(name, 0.1)).startswith(f"wrong result: {text}")


@pytest.mark.parametrize(("kernel", "change"), [("_lists_kernel", swapped), ("_partial_kernel", off("part_ptr", -9))])
def test_a_lost_unit_is_wrong(key_major_calls, said, kernel, change):
    call = functools.partial(key_major_calls["blocks"], backend="triton")
    assert said(call, kernel, change).startswith("wrong result: max")


@pytest.mark.parametrize(("kernel", "change", "text"), [
    ("_delta_kernel", off("stats_ptr", 0.5), "max d"),
    ("_dkdv_kernel", off("dk_ptr", 0.5), "max dk error"),
    ("_dkdv_kernel", off("dv_ptr", 0.5), "max dv error"),
    ("_gather_kernel", off("dq_ptr", 0.5), "max dq error"),
    ("_scatter_kernel", swapped, "max d"),
    ("_sum_kernel", off("dk_ptr", 0.5), "max dk error"),
    ("_sum_kernel", off("dv_ptr", 0.5), "max dv error"),
])  # fmt: skip
def test_wrong_backward_kernels_are_wrong(steps, said, kernel, change, text):
    assert said(steps["blocks"], kernel, change).startswith(f"wrong result: {text}")


def test_wrong_kernels_of_backward_unions_are_wrong(unions, said):
    assert said(unions, "_union_dq_kernel", off("dq_ptr", 0.5)).startswith("wrong result: max dq error")


def lost_tail(c, tensors, numbers):
    """The end of the cache, less than a tile."""
    assert 0 < numbers[2] % c["BLOCK_L"]
    return tensors, (*numbers[:2], numbers[2] - numbers[2] % c["BLOCK_L"], *numbers[3:])


def lost_first_key(c, tensors, numbers):
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
def test_a_kernel_that_is_hardly_wrong_is_wrong(calls, asked, monkeypatch, name, mutate):
    """The real kernel, given something else than the reference is."""
    real = Variant.launch

    def launch(self, grid, device, tensors, numbers, *rest):
        q = tensors[0].clone(memory_format=torch.preserve_format)
        real(self, grid, device, *mutate(self.constexprs, tensors, numbers), *rest)
        tensors[0].copy_(q)

    monkeypatch.setattr(Variant, "launch", launch)
    try:
        calls[name]()
    except nsa.guard.ProbeFailed:
        assert name == "long", "packed rows have no fallback"
    assert asked[-1][1].cause.startswith("wrong result: max error")


def test_nothing_but_zeros_is_compared_too():
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    assert beyond_rounding(nothing.half(), nothing, torch.float16) is None
    assert beyond_rounding(nothing.half() + 0.01, nothing, torch.float16).startswith("max error 0.01")
    assert beyond_rounding(nothing - torch.inf, nothing - torch.inf, torch.float32) is None
