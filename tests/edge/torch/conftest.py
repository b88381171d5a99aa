"""What the tests of PyTorch's tools share: long rows, and a small call."""

import pytest
import torch

import nsa


@pytest.fixture(autouse=True)
def long_rows(fresh_routes):
    """Triton serves rows of any length; no route is counted yet."""
    with nsa.configure(sel_triton_min_L=0):
        yield


@pytest.fixture
def qkv(draw):
    return draw(S=2, S_kv=9, HKV=1, Dv=24)


@pytest.fixture
def attend(same):
    """`attend(*tensors, backend=…) -> O`, two spans that overlap; other spans where they are given."""

    def call(q, *kv, ranges=None, **how):
        ranges = same([(0, 4), (2, 7)], 1, 2, kv[0].shape[-2]) if ranges is None else ranges
        return nsa.selection_attention(q, *kv, ranges=ranges, max_selected=9, **how)

    return call


@pytest.fixture(params=["ranges", "blocks", "positions", "varlen"])
def problem(request, draw, same, device):
    """`(q, k, v), selection`: overlapping spans or a block twice, keys that all rows list, and keys that none does."""
    kind, shape = request.param, {"S": 3, "S_kv": 12, "HKV": 2, "G": 2, "Dv": 24}
    spans = same([(0, 2), (1, 5)], 1, 3, 2)
    if kind == "varlen":
        cu = torch.tensor([0, 2, 3], dtype=torch.int32, device=device)
        return draw(varlen=True, **shape), {"ranges": spans[0], "cu_seqlens": (cu, cu * 4), "max_selected": 6}
    if kind == "blocks":
        return draw(**shape), {"block_indices": same([1, -1, 0, 1], 1, 3, 2), "block_size": 3, "scale": 0.3}
    where = {"q_positions": torch.tensor([[0, -1, 3]], device=device)} if kind == "positions" else {}
    return draw(**shape), {"ranges": spans, "max_selected": 6} | where
