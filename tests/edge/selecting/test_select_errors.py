"""What a wrong call of `nsa.select_blocks` is told."""

import numpy as np
import pytest
import torch

import nsa

Q, K = torch.zeros(2, 3, 4, 16), torch.zeros(2, 20, 2, 16)
GOOD = {"q": Q, "k": K, "n": 2, "block_size": 4}
ENDS = torch.tensor([0, 3, 6], dtype=torch.int32)
PACKED = {"q": torch.zeros(6, 4, 16), "k": torch.zeros(40, 2, 16), "cu_seqlens": (ENDS, ENDS)}
CACHE = {"cache_seqlens": torch.tensor([20, 9])}
TABLE = torch.zeros(2, 5, dtype=torch.int32)
HEADS = "heads: expected HI = G * lists with G from 1 to 128, and lists = a multiple of HK, got"
WRONG = [
    ({"score": "mean"}, "score: expected one of max, relu, softmax, got 'mean'"),
    ({"backend": "sdpa"}, "backend: expected one of auto, triton, torch, reference, got 'sdpa'"),
    ({"n": 0}, "n: expected an int >= 1, got 0"),
    ({"n": 2.0}, "n: expected an int, got float"),
    ({"first": 2, "newest": 1}, "n: expected at least first + newest, got n=2, first=2, newest=1"),
    ({"tail": 1}, "tail: expected a bool, got int"),
    (
        {"stride": 3, "window": 3},
        "stride: expected a divisor of block_size and of window, got stride=3, block_size=4, window=3",
    ),
    ({"q": [1]}, "q: expected a torch.Tensor, got list"),
    ({"q": torch.zeros(3, 4, 16)}, "q: expected [B, S, HI, D], got shape [3, 4, 16]"),
    ({"k": torch.zeros(20, 2, 16)}, "k: expected [B, rows, HK, D], got shape [20, 2, 16]"),
    ({"k": torch.zeros(3, 20, 2, 16)}, "k: expected [B, rows, HK, D] with B=2, got [3, 20, 2, 16]"),
    ({"k": torch.zeros(2, 20, 2, 32)}, "k: expected head dim 16 (that of q), got 32"),
    ({"k": K.half()}, "k: expected dtype float32 (that of q), got float16"),
    ({"k": K.to(torch.float8_e4m3fn)}, "q: expected dtype float16, bfloat16 with k of float8_e4m3fn, got float32"),
    (
        {"q": Q.half(), "k": K.to(torch.float8_e4m3fn)},
        "k: expected float8_e4m3fn only with cache_seqlens, got it without",
    ),
    ({"q": Q.int(), "k": K.int()}, "q: expected dtype float16, bfloat16, float32, float64, got int32"),
    ({"q": Q[..., :8], "k": K[..., :8]}, "head dim D: expected 16 to 256, got 8"),
    (
        {"q": torch.zeros(2, 3, 4, 32)[..., ::2]},
        "q: expected a contiguous last dimension (stride 1), got a strided one",
    ),
    ({"lists": 3}, f"{HEADS} HI=4, lists=3, HK=2"),
    ({"lists": 1}, f"{HEADS} HI=4, lists=1, HK=2"),
    ({"scale": 0.5}, "scale: expected None with score='max', whose order has no scale, got 0.5"),
    ({"weights": torch.zeros(2, 3, 4)}, "weights: expected None with score='max', got a tensor"),
    ({"score": "relu", "weights": torch.zeros(2, 3)}, "weights: expected [B, S, HI] = [2, 3, 4], got [2, 3]"),
    ({"lse": torch.zeros(2, 3, 4)}, "lse: expected None with score='max', got a tensor"),
    ({"q_positions": torch.zeros(2, 3)}, "q_positions: expected dtype int32, int64, got float32"),
    ({"q_positions": ENDS}, "q_positions: expected [B, S] = [2, 3], got [3]"),
    ({"block_table": TABLE}, "block_table: expected None without cache_seqlens, got a tensor"),
    ({"max_seqlen_q": 3}, "max_seqlen_q: expected None without cu_seqlens, got 3"),
    ({"k_scale": torch.ones(2)}, "k_scale: expected None unless k is float8_e4m3fn, got a tensor"),
    (CACHE | {"cache_seqlens": torch.tensor([1])}, "cache_seqlens: expected [B] = [2], got [1]"),
    ({"k": torch.zeros(5), "cache_seqlens": 3}, "k: expected [B, rows, HK, D], got shape [5]"),
    ({"cache_seqlens": 3, "block_table": TABLE[0]}, "block_table: expected [B, width], got shape [5]"),
    ({"cache_seqlens": 21}, "cache_seqlens: expected an int from 0 to 20, got 21"),
    (CACHE | {"block_table": TABLE.float()}, "block_table: expected dtype int32, int64, got float32"),
    (CACHE | {"block_table": TABLE[:1]}, "block_table: expected [B, width] = [2, 5], got [1, 5]"),
    (PACKED | {"cu_seqlens": (ENDS,)}, "cu_seqlens: expected a tensor or a pair of tensors, got a tuple of 1"),
    (PACKED | {"cu_seqlens": (ENDS, ENDS[:2])}, "cu_seqlens_k: expected [3] (that of cu_seqlens_q), got [2]"),
    (
        PACKED | {"cu_seqlens": ENDS, "window": 2, "stride": 2},
        "cu_seqlens: expected a pair (of queries, of index keys) with window > 1, got a tensor",
    ),
    ({"topk": 3}, "select_blocks() got an unexpected keyword argument 'topk'"),
]


IDS = [f"{said.partition(':')[0]}-{i}" for i, (_, said) in enumerate(WRONG)]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=IDS)
def test_what_a_wrong_call_is_told(change, said):
    with pytest.raises((ValueError, TypeError)) as error:
        nsa.select_blocks(**GOOD | change)
    assert str(error.value) == said


def test_sizes_may_be_integers_of_numpy():
    want = nsa.select_blocks(**PACKED, n=2, block_size=4, max_seqlen_q=3)
    got = nsa.select_blocks(**PACKED, n=np.int64(2), block_size=np.int32(4), max_seqlen_q=np.int64(3))
    assert torch.equal(got, want)


def test_triton_says_why_it_cannot():
    with pytest.raises(RuntimeError, match=r"backend='triton' cannot select: .*float64"):
        nsa.select_blocks(Q.double(), K.double(), n=2, block_size=4, backend="triton")
    how = {"score": "softmax", "n": 2, "block_size": 2, "stride": 2, "backend": "triton"}
    nsa.select_blocks(Q, K, window=4, **how)
    with pytest.raises(RuntimeError, match="cannot select: softmax with a window of more than block_size . stride"):
        nsa.select_blocks(Q, K, window=6, **how)
