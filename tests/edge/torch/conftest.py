"""What the tests of PyTorch's tools share: long rows, and a small call."""

import pytest

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
