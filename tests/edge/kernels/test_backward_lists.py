"""The backward kernels where calls are odd: lists in order, windows, shares, duplicates, nothing to read, too much."""

import math

import pytest
import torch

from nsa.call import Call
from nsa.kernels.backward import plan as backward
from nsa.kernels.backward import tiles as backward_tiles
from nsa.kernels.shared.errors import DoesNotFit
from nsa.kernels.shared.launch import Variant
from nsa.testing.plugin import current_lane

from ...conftest import bitwise
from .gradients import close, exact, gradients, like

Choice = backward_tiles.Choice
SHARES = Choice(16, 4, 2, 1, True, 16, 1, 1)  # one tile a share


@pytest.fixture
def limit(monkeypatch, fresh_plans):
    """`limit(DQ_BYTES=…)` for one test; plans that knew others are forgotten."""

    def make(**limits):
        for name, value in limits.items():
            monkeypatch.setattr(backward_tiles, name, value)

    return make


def random_blocks(seed, blocks, *shape, device):
    """Random block indices, some of them padding, some too far, some twice."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, blocks + 1, shape, generator=g).int().to(device)


@pytest.mark.parametrize("source", ["blocks", "ranges"])
def test_units_are_listed_in_order(draw, device, limit, monkeypatch, source):
    """Of tokens, then of slots, block by block, whatever the strips: what sums go by."""
    S, n, size, S_kv = 35, 3, 8, 40
    if current_lane() == "gpu":
        S, n, size, S_kv = 3000, 16 if source == "blocks" else 4, 16, 3000
    limit(STRIP=1 if current_lane() == "interpreter" else 16)
    q, k, v = draw(S=S, S_kv=S_kv)
    taken = {}
    real = Variant.launch

    def launch(self, grid, device, tensors, numbers, *rest):
        real(self, grid, device, tensors, numbers, *rest)
        if self.kernel.fn.__name__ == "_scatter_kernel":
            taken.update(block=tensors[0].tensor(), unit=tensors[-1].tensor())

    monkeypatch.setattr(Variant, "launch", launch)
    blocks = random_blocks(0, -(-S_kv // size), 1, S, 2, n, device=device)
    selection = {"block_indices": blocks, "block_size": size}
    if source == "ranges":  # two spans of a row share a block
        start = blocks.clamp(min=0) * size
        selection = {"ranges": torch.stack((start, start + blocks % 3 * size), -1)}
    gradients(q, k, v, like(q), **selection)
    block, unit = taken["block"].cpu().view(S, 2, -1), taken["unit"].cpu().view(2, -1)
    bits = max(block.shape[-1] - 1, 1).bit_length()
    for head in range(2):
        of_head = block[:, head].flatten()
        order = torch.sort(of_head, stable=True).indices
        order = order[of_head[order] >= 0]
        assert order.numel() > S
        want = (order // block.shape[-1] << bits) | order % block.shape[-1]
        assert torch.equal(unit[head, : want.numel()].long(), want)


WINDOWS = {  # how little room there is; heads and tokens of a window with all heads together, and with each head alone
    "one": ({}, (2, 12), (2, 12)),
    "strips": ({"STRIP": 4}, (2, 12), (2, 12)),
    "index": ({"INDEX_BYTES": 12 * 2 * 6 * 5}, (2, 5), (1, 10)),
    "sums": ({"SUM_BYTES": 1}, (2, 1), (1, 1)),
    "dq": ({"DQ_BYTES": 2 * 3 * 2 * 16 * 2 * 10}, (2, 5), (1, 10)),
    "ranges": ({"INDEX_BYTES": 2 * 6 * 16 * 4}, (2, 4), (1, 8)),
}


@pytest.mark.parametrize("alone", [False, True], ids=["heads together", "each head alone"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_and_strips_change_nothing(draw, device, limit, kind, alone):
    """A few queries a strip or window, several shares a block: sums go on from share to share and window to window."""
    limits, *windows = WINDOWS[kind]
    limit(**limits, HEAD_BYTES=backward_tiles.HEAD_BYTES if alone else 0)
    q, k, v = (x.half() for x in (draw(B=2, S=9, S_kv=150) if kind == "ranges" else draw(S=12, S_kv=40)))
    selection = {"block_indices": random_blocks(1, 5, 1, 12, 2, 6, device=device), "block_size": 8}
    if kind == "ranges":  # two spans, three blocks of the grid
        g = torch.Generator().manual_seed(2)
        selection = {"ranges": torch.randint(-9, 160, (2, 9, 2, 2, 2), generator=g, dtype=torch.int32).to(device)}
    launch = backward.plan(Call.of(q, k, v, **selection)).usual
    assert (launch.windows.heads, launch.windows.window) == windows[alone]
    assert (launch.windows.strip < 12) == (kind == "strips")
    assert launch.tile.keep_dq or kind != "dq"
    do = like(q)
    for choice in (SHARES, None) if kind == "dq" else (SHARES,):
        close(gradients(q, k, v, do, choice=choice, **selection), exact(q, k, v, do, **selection))


@pytest.mark.parametrize("ranges", [False, True], ids=["blocks", "ranges"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "varlen"])
def test_two_of_four_heads_at_once(draw, device, limit, ranges, packed):
    """Lists and parts of dQ are of the two, all else of the four; 7 + 9 tokens in windows of six."""
    q, k, v = (x.half() for x in draw(B=1, S=16, S_kv=60, HKV=4, G=3, D=16, Dv=24, varlen=packed))
    lead, g = q.shape[:-2], torch.Generator().manual_seed(3)
    selection = {"block_indices": torch.randint(-1, 8, (*lead, 4, 3), generator=g, dtype=torch.int32).to(device)}
    selection["block_size"] = 8
    if ranges:
        spans = torch.randint(-9, 70, (*lead, 4, 3, 2), generator=g, dtype=torch.int32)
        selection = {"ranges": spans.to(device)}
    if packed:
        selection["cu_seqlens"] = tuple(
            torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 7, 16], [0, 25, 60])
        )
    limit(INDEX_BYTES=4 * 3 * 3 * (16 if ranges else 12), HEAD_BYTES=6 * 3 * (16 + 24) * 2)
    launch = backward.plan(Call.of(q, k, v, **selection))
    w = launch.usual.windows
    assert (w.heads, w.window, launch.usual.tile.keep_dq) == (2, 6, not ranges)
    do = like(q.new_empty((*q.shape[:-1], 24)))
    close(gradients(q, k, v, do, choice=SHARES, **selection), exact(q, k, v, do, **selection))


@pytest.mark.parametrize("G", [1, 40, 128])
def test_heads_in_tiles(draw, device, G):
    """A unit's heads are one tile, several or a part of one."""
    q, k, v = (x.half() for x in draw(S=3, HKV=1, G=G))
    selection = {"block_indices": random_blocks(2, 3, 1, 3, 1, 2, device=device), "block_size": 8}
    do = like(q)
    for choice in (None, SHARES):
        close(gradients(q, k, v, do, choice=choice, **selection), exact(q, k, v, do, **selection))


@pytest.mark.parametrize("scale", [None, 0.3, -0.2, 0.0])
def test_scale_and_strides(draw, same, scale):
    """Inputs as views; the gradient of a sum has strides of 0."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw(S=4))
    selection = {"block_indices": same([1, 0], 1, 4, 2), "block_size": 8, "scale": scale}
    do = q.new_ones(1).expand(q.shape)
    close(gradients(q, k, v, do, **selection), exact(q, k, v, do, **selection))


@pytest.mark.parametrize("what", ["tokens", "keys", "slots", "selected"])
def test_nothing_to_do(draw, same, what):
    """No token, no key, no slot, or nothing in them: gradients are zero."""
    q, k, v = draw(S=0 if what == "tokens" else 3, S_kv=0 if what == "keys" else 24)
    blocks = same([-1, 99], 1, q.shape[1], 2)
    blocks = blocks[..., :0] if what == "slots" else blocks
    got = gradients(q, k, v, like(q), block_indices=blocks, block_size=8)
    for x, y in zip(got, (q, k, v), strict=True):
        assert x.shape == y.shape
        assert not x.any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of inf * 0
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_nobody_reads_reaches_no_gradient(draw, same, poison):
    """NaN and inf in keys that no span holds, in the same block of the grid: to spans keys are single ones."""
    q, k, v = draw(S=4, S_kv=24)
    selection = {"ranges": same([(3, 7)], 1, 4, 2)}
    do = like(q)
    want = gradients(q, k, v, do, **selection)
    bad = [x.clone() for x in (k, v)]
    for x in bad:
        x[:, :3], x[:, 7:] = poison, poison
    assert bitwise(gradients(q, *bad, do, **selection), want)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of inf * 0
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("keep_dq", [True, False])
def test_the_future_reaches_no_gradient(draw, same, device, poison, keep_dq):
    """NaN and inf in keys of a selected block that causality clamps away for every row, whichever way dQ is taken."""
    q, k, v = (x.half() for x in draw(S=4, S_kv=16))
    where = torch.arange(4, device=device)[None]
    selection = {"block_indices": same([0], 1, 4, 2), "block_size": 16, "q_positions": where}
    do = like(q)
    choice = SHARES._replace(keep_dq=keep_dq)
    want = gradients(q, k, v, do, choice=choice, **selection)
    for x in (k, v):
        x[:, 4:] = poison
    assert bitwise(gradients(q, k, v, do, choice=choice, **selection), want)


@pytest.mark.parametrize("keep_dq", [True, False])
def test_dq_overflows_no_sooner_than_it_must(draw, same, keep_dq):
    """In fp16: 65,504 is the largest number there is, and the scale comes before the rounding."""
    q, k, v = (x.half() for x in draw(S=3, S_kv=16, D=64, Dv=64))
    k, selection = k * 30, {"block_indices": same([0], 1, 3, 2), "block_size": 16, "scale": 1 / 64}
    do = like(q) * 1000
    want = exact(q, k, v, do, **selection)
    assert 65_504 / 64 < want[0].abs().max() < 65_504
    close(gradients(q, k, v, do, choice=SHARES._replace(keep_dq=keep_dq), **selection), want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of an overflow
@pytest.mark.parametrize("source", ["blocks", "ranges"])
def test_scores_far_below_zero(draw, same, source):
    """What a weight of a masked key would be is not finite."""
    q, k, v = draw(S=4, S_kv=20)
    q, k = q.abs() + 30, -k.abs() - 30
    selection = {"block_indices": same([2, 0], 1, 4, 2), "block_size": 13}
    if source == "ranges":
        selection = {"ranges": same([(0, 9), (17, 20)], 1, 4, 2)}
    do = like(q)
    for choice in (None, SHARES):
        got = gradients(q, k, v, do, choice=choice, **selection)
        for x, y in zip(got, exact(q, k, v, do, **selection), strict=True):
            torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-2 * float(y.abs().max()))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of inf - inf
def test_no_finite_score_adds_nothing_to_dv(draw, same):
    """The row's LSE is -inf, as that of one that reads nothing."""
    q, k, v = draw(S=2, S_kv=16, HKV=1)
    q = q.abs()
    k[:, :8] = -math.inf
    blocks = same([0], 1, 2, 1)
    blocks[0, 1] = 1
    dv = gradients(q, k, v, like(q), block_indices=blocks, block_size=8, causal=False)[2]
    assert not dv[:, :8].any()
    assert dv[:, 8:].all()


def test_a_bad_query_spoils_only_what_it_reads(draw, same):
    """dK and dV of keys in blocks that the query with the NaN did not select are as without it."""
    q, k, v = draw(S=2, S_kv=24, HKV=1)
    blocks = same([0], 1, 2, 1)
    blocks[0, 1] = 2
    selection = {"block_indices": blocks, "block_size": 8, "causal": False}
    do = like(q)
    want = gradients(q, k, v, do, **selection)
    q[0, 0] = math.nan
    dq, dk, dv = gradients(q, k, v, do, **selection)
    assert dq[0, 0].isnan().all()
    assert torch.equal(dq[0, 1], want[0][0, 1])
    assert torch.equal(dk[0, 8:], want[1][0, 8:])
    assert torch.equal(dv[0, 8:], want[2][0, 8:])


def test_too_much_to_count_is_refused(device):
    def ask(S_kv=64, HKV=1, S=1, n=4, size=None):
        q, k = (torch.empty(1, s, HKV, 16, device="meta") for s in (S, S_kv))
        shape = (1, S, HKV, n) if size else (1, S, HKV, n, 2)
        kind = "block_indices" if size else "ranges"
        backward.plan(Call(q, k, k, **{kind: torch.empty(shape, device="meta")}, block_size=size, causal=False))

    with pytest.raises(ValueError, match=r"backward: expected at most 2147483391 keys"):
        ask(S_kv=2**31)
    with pytest.raises(ValueError, match=r"65535 KV heads, got 64 and 70000"):
        ask(HKV=70_000)
    with pytest.raises(ValueError, match=r"lists of a row to fit .* max_selected bounds them"):
        ask(S_kv=2**29)
    with pytest.raises(ValueError, match=r"counters of blocks to fit"):
        ask(S_kv=2**31 - 1000, size=1)


@pytest.mark.parametrize("T", [8192, 65_536, 131_072, 1 << 20])
@pytest.mark.parametrize(("HQ", "HKV"), [(64, 4), (32, 4), (32, 8), (16, 16)])
@pytest.mark.parametrize("parts", [True, False])
def test_workspace_is_bounded(T, HQ, HKV, parts):
    """1.75 GiB beside the results and the fp32 sums of dK and dV, at any length."""
    tile = backward_tiles.select(90, 2, HQ // HKV, 128, 128, 64, False, parts=parts)
    blocks = -(-T // 64)
    w = backward_tiles.windows(T, HKV, HQ // HKV, 128, 128, 2, 16, blocks, 64, tile.share, tile.keep_dq, False)
    assert 0 < w.window <= T
    if parts:
        assert w.window * 16 * w.heads * HQ // HKV * 128 < 2**31, "offsets of parts of dQ are int32"
    units = w.window * w.heads * w.slots
    taken = 16 * units + 12 * w.heads * w.work + 4 * (-(-w.window // w.strip) + 3) * w.heads * w.blocks  # the lists
    taken += (units * HQ // HKV * 128 * 2 if tile.keep_dq else 0) + w.heads * w.several * 64 * 256 * 4  # and the parts
    assert taken <= 7 << 28
    assert 2**w.slot_bits * w.window <= 2**31


def test_tiles_fit_every_architecture():
    for capability in (80, 89, 90, 100, 120, 9):
        for itemsize in (2, 4):
            for G in (1, 3, 16, 128):
                for D in (16, 100, 256):
                    tile = backward_tiles.select(capability, itemsize, G, D, D, 64, False)
                    assert tile.BLOCK_M % tile.HEADS == 0
                    assert min(tile.BLOCK_M, tile.BLOCK_N) >= 16
                    assert not tile.keep_dq or tile.BLOCK_N >= 64


@pytest.mark.parametrize(
    ("capability", "itemsize", "stages", "pipelines", "keeps"),
    [
        (90, 2, 2, True, True),
        (90, 2, 1, True, False),
        (90, 2, 2, False, False),
        (90, 4, 1, True, True),
        (80, 2, 1, False, True),
    ],
)
def test_dq_is_not_taken_from_key_blocks_where_ptxas_loses_it(capability, itemsize, stages, pipelines, keeps):
    choice = Choice(32, 4, stages, 1, True, 16, 1, 1)
    tile = backward_tiles.select(capability, itemsize, 2, 64, 64, 32, False, choice, pipelines)
    assert (tile.keep_dq, tile.stages) == (keeps, stages if pipelines else 1)


@pytest.mark.parametrize(
    ("S_kv", "selection", "text"),
    [
        (2**27, {"ranges": torch.zeros(1, 1, 1, 2048, 2, dtype=torch.int32)}, "expected the lists of a row to fit"),
        (2**20, {"block_indices": torch.zeros(1, 1, 1, 2, dtype=torch.int32), "block_size": 2**20},
         "expected blocks of 1048560 keys or fewer, got 1048576"),
    ],
    ids=["units of a row", "keys of a block"],
)  # fmt: skip
def test_what_no_grid_holds_does_not_fit(S_kv, selection, text):
    """So `auto` recomputes it with packed SDPA. Keys are one row, expanded."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(16).expand(1, S_kv, 1, 16)
    with pytest.raises(DoesNotFit, match=f"^backward: {text}"):
        backward.plan(Call.of(q, k, k, **selection, causal=False))
