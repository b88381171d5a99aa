"""A row's result does not depend on how many others share the call, bit by bit, from two rows a multiprocessor on; and
with `batch_invariant` never.
"""

import pytest
import torch

import nsa
from nsa.kernels.query_major import tiles
from nsa.kernels.shared import device as device_facts
from nsa.testing.plugin import current_lane

from ...conftest import bitwise

H100 = "NVIDIA H100 80GB HBM3"
SMS = 132
SHAPES = [  # itemsize, G, D, Dv, bound, spans
    (2, 8, 128, 128, 1024, 1),
    (2, 8, 128, 128, 65536, 1),
    (2, 4, 64, 64, 200, 8),
    (2, 16, 128, 128, 1024, 16),
    (2, 3, 96, 100, 700, 8),
    (2, 64, 128, 128, 1024, 64),
    (4, 8, 64, 64, 512, 1),
]


def chosen(shape, rows, **how):
    return tiles.tile_and_splits(how.pop("name", H100), 90, SMS, *shape, rows, largest=16, **how)


@pytest.mark.parametrize("name", [H100, None], ids=["table", "rules"])
@pytest.mark.parametrize("per_head", [False, True], ids=["group", "per-head"])
@pytest.mark.parametrize("block", [0, 16, 128], ids=["spans", "block16", "block128"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_full_launch_is_chosen_without_its_rows(shape, block, per_head, name):
    how = {"name": name, "per_head": per_head, "block": block}
    many = chosen(shape, 10**7, **how)
    assert many[1:] == (1, False)
    for rows in (2 * SMS, 300, 4 * SMS, 1000, 5000, 10**5):
        assert chosen(shape, rows, **how) == many
    for rows in (1, 8, 64, 2 * SMS - 1):
        assert chosen(shape, rows, invariant=True, **how) == many


def test_few_rows_are_split():
    assert chosen(SHAPES[0], 8)[1] > 1


@pytest.mark.parametrize("block_size", [64, 128, 192, 256])
@pytest.mark.parametrize("cached", [True, False], ids=["room", "company"])
def test_key_major_does_not_see_what_else_is_there(draw, device, block_size, cached):
    """A sequence of 100 keys, in a cache with more room, or packed beside a longer one."""
    q, k, v = draw(B=1, S=4, S_kv=400, HKV=1, G=16, dtype=torch.float16)
    blocks = torch.zeros(1, 4, 1, 1, dtype=torch.int32, device=device)
    how = {"block_size": block_size, "backend": "triton", "schedule": "key_major"}

    def alone(keys):
        lengths = torch.tensor([100], device=device)
        return nsa.selection_attention_with_kvcache(
            q, k[:, :keys], v[:, :keys], cache_seqlens=lengths, block_indices=blocks, **how
        )

    def packed(keys):
        ends = ([0, 4], [0, 100]) if keys == 100 else ([0, 4, 4], [0, 100, keys])
        cu = tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in ends)
        return nsa.selection_attention(q[0], k[0, :keys], v[0, :keys], cu_seqlens=cu, block_indices=blocks[0], **how)

    call = alone if cached else packed
    with nsa.configure(batch_invariant=True):
        assert torch.equal(call(100), call(400))


@pytest.mark.parametrize("schedule", ["query_major", "per_head"])
@pytest.mark.parametrize("source", ["ranges", "blocks"])
@pytest.mark.usefixtures("fresh_plans")
def test_alone_and_in_company(draw, device, monkeypatch, source, schedule):
    """Rows in a call of their own; one row is dealt to three programs, unless the setting forbids it."""
    monkeypatch.setattr(tiles, "measured", lambda *_: None)
    monkeypatch.setattr(tiles, "split_count", lambda programs, *_: 3 if programs <= 4 else 1)
    q, k, v = draw(B=3, S=1, S_kv=1000, HKV=1, G=4)
    if source == "ranges":
        selection = {"ranges": torch.tensor([[[[[3, 400], [390, 1000]]]]], device=device).repeat(3, 1, 1, 1, 1)}
    else:
        selection = {"block_indices": torch.tensor([[[[0, 7, 3, 14]]]], device=device).repeat(3, 1, 1, 1)}

    def call(rows):
        own = {name: x[rows] for name, x in selection.items()} | ({"block_size": 64} if source == "blocks" else {})
        how = {"backend": "triton", "schedule": schedule, "return_lse": True, "max_selected": 1010}
        return nsa.selection_attention(q[rows], k[rows], v[rows], **own, **how)

    with nsa.configure(batch_invariant=True):
        together = call(slice(0, 3))
        for row in range(3):
            assert bitwise([x[row : row + 1] for x in together], call(slice(row, row + 1)))
    before = nsa.kernels.launches["split"]
    alone = call(slice(0, 1))
    assert nsa.kernels.launches["split"] == before + 1, "else there was nothing to forbid"
    assert all(torch.allclose(a[:1], b, atol=1e-4) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("source", ["ranges", "rows", "batch"])
@pytest.mark.usefixtures("fresh_plans")
def test_beside_a_longer_row(monkeypatch, device, source):
    """Keys of all rows lie in one tensor, whose length would choose tiles where no `max_selected` is given."""
    chip = device_facts.chip(device)._replace(name=H100)
    monkeypatch.setattr(device_facts, "chip", lambda device: chip)
    n = [100, 900]
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 64, generator=g).half().to(device)
    k, v = (torch.randn(sum(n), 64, generator=g).half().to(device) for _ in range(2))
    cu = torch.tensor([0, n[0], sum(n)], dtype=torch.int32, device=device)
    ranges = torch.tensor([[0, n[0]], [0, n[1]]], dtype=torch.int32, device=device)[:, None, None]

    def call(rows, keys):
        own = q[:rows], k[:keys], v[:keys]
        if source == "rows":
            return nsa.sel_attn_fwd_varlen_group(*own, cu[: rows + 1], return_lse=True)
        own = q[:rows], k[:keys, None], v[:keys, None]
        how = {"ranges": ranges[:rows], "causal": False, "backend": "triton", "return_lse": True}
        if source == "batch":
            return [
                x[0] for x in nsa.selection_attention(*(x[None] for x in own), **how | {"ranges": ranges[None, :rows]})
            ]
        queries = torch.arange(rows + 1, dtype=torch.int32, device=device)
        return nsa.selection_attention(*own, **how, cu_seqlens=(queries, cu[: rows + 1]))

    with nsa.configure(batch_invariant=True):
        assert bitwise([x[:1] for x in call(2, sum(n))], call(1, n[0]))
    alone, together = (
        chosen((2, 4, 64, 64, keys, 1 if source == "rows" else 8), 1, invariant=True) for keys in (n[0], 1000)
    )
    assert alone != together, "else there was nothing to forbid"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", ["query_major", "key_major", "auto"])
def test_a_crowd_of_any_size(device, dtype, schedule):
    """A full launch, half of it, and the same rows among ten times as many. No setting where the schedule is named."""
    assert current_lane() == "gpu"
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    g = torch.Generator(device).manual_seed(0)
    rows = 20 * sms
    q = torch.randn(1, rows, 8, 128, generator=g, device=device, dtype=dtype)
    k, v = (torch.randn(1, 8192, 1, 128, generator=g, device=device, dtype=dtype) for _ in range(2))
    blocks = torch.randint(0, 128, (1, rows, 1, 16), generator=g, device=device, dtype=torch.int32)
    how = {"block_size": 64, "causal": False, "backend": "triton", "schedule": schedule}

    def call(first, last):
        own = q[:, first:last], k, v
        return nsa.selection_attention(*own, block_indices=blocks[:, first:last], **how, return_lse=True)

    with nsa.configure(batch_invariant=schedule == "auto"):
        everybody = call(0, rows)
        for first, last in ((0, 2 * sms), (7, 7 + 2 * sms), (100, 100 + 5 * sms), (3 * sms, 19 * sms)):
            assert bitwise([x[:, first:last] for x in everybody], call(first, last))
