"""What a wrong call is told, word for word: what was expected and what came, on every backend."""

import pytest
import torch

import nsa

from .refusals import META, floats, ints, move, refuses, wrong

B, S, KEYS, HKV, G, D, DV = 2, 3, 20, 2, 2, 16, 24
BATCH = {
    "q": floats(B, S, HKV * G, D), "k": floats(B, KEYS, HKV, D), "v": floats(B, KEYS, HKV, DV),
    "ranges": ints(B, S, HKV, 4, 2),
}  # fmt: skip
BLOCKS = {**BATCH, "ranges": None, "block_indices": ints(B, S, HKV, 4), "block_size": 16}
VARLEN = {
    "q": floats(S, HKV * G, D), "k": floats(KEYS, HKV, D), "v": floats(KEYS, HKV, DV), "ranges": ints(S, HKV, 4, 2),
    "cu_seqlens": ints(3),
}  # fmt: skip
GROUP, CU = "heads: expected HQ = G * HKV with G from 1 to 128, got", "[B + 1] with B >= 0, got shape"
K, V, RANGES = "[B, S_kv, HKV, D] = [2, 20, 2, 16]", "[B, S_kv, HKV, Dv] = [2, 20, 2, 24]", "[B, S, HKV, n, 2]"
FLOATS, INTS = "expected dtype float16, bfloat16, float32, float64, got", "expected dtype int32, int64, got"
N = "block_indices: expected [B, S, HKV, n]"
SQUEEZE = "nsa takes packed sequences as [T_kv, HKV, D]: call squeeze(0)"
# What is changed in a good call, and what the call then says.
SHAPES = [
    *wrong(
        BATCH,
        ({"q": floats(S, 4, D)}, "q: expected [B, S, HQ, D], got shape [3, 4, 16]"),
        ({"q": floats(1, 1, S, 4, D)}, "q: expected [B, S, HQ, D], got shape [1, 1, 3, 4, 16]"),
        ({"k": floats(KEYS, 2, D)}, "k: expected [B, S_kv, HKV, D], got shape [20, 2, 16]"),
        ({"v": floats(KEYS, 2, D)}, "v: expected [B, S_kv, HKV, Dv], got shape [20, 2, 16]"),
        ({"k": floats(3, KEYS, 2, D)}, f"k: expected {K}, got [3, 20, 2, 16]"),
        ({"k": floats(B, KEYS, 2, 32)}, f"k: expected {K}, got [2, 20, 2, 32]"),
        ({"v": floats(B, 21, 2, DV)}, f"v: expected {V}, got [2, 21, 2, 24]"),
        ({"v": floats(B, KEYS, 1, DV)}, f"v: expected {V}, got [2, 20, 1, 24]"),
        ({"ranges": ints(B, S, 4, 2)}, f"ranges: expected {RANGES}, got shape [2, 3, 4, 2]"),
        ({"ranges": ints(B, S, 4, 4, 2)}, f"ranges: expected {RANGES} = [2, 3, 2, 4, 2], got [2, 3, 4, 4, 2]"),
        ({"ranges": ints(B, 1, 2, 4, 2)}, f"ranges: expected {RANGES} = [2, 3, 2, 4, 2], got [2, 1, 2, 4, 2]"),
        ({"ranges": ints(B, S, 2, 4, 3)}, f"ranges: expected {RANGES} = [2, 3, 2, 4, 2], got [2, 3, 2, 4, 3]"),
        ({"q_positions": ints(B, 4)}, "q_positions: expected [B, S] = [2, 3], got [2, 4]"),
        ({"q_positions": ints(S)}, "q_positions: expected [B, S] = [2, 3], got [3]"),
        ({"out": floats(B, S, 4, D)}, "out: expected [B, S, HQ, Dv] = [2, 3, 4, 24], got [2, 3, 4, 16]"),
        ({"out": floats(S, 4, DV)}, "out: expected [B, S, HQ, Dv] = [2, 3, 4, 24], got [3, 4, 24]"),
        ({"q": floats(B, S, 4, 8), "k": floats(B, KEYS, 2, 8)}, "head dim D: expected 16 to 256, got 8"),
        ({"q": floats(B, S, 4, 257), "k": floats(B, KEYS, 2, 257)}, "head dim D: expected 16 to 256, got 257"),
        ({"v": floats(B, KEYS, 2, 15)}, "head dim Dv: expected 16 to 256, got 15"),
        ({"v": floats(B, KEYS, 2, 320)}, "head dim Dv: expected 16 to 256, got 320"),
        ({"q": floats(B, S, 5, D)}, f"{GROUP} HQ=5, HKV=2"),
        ({"q": floats(B, S, 1, D)}, f"{GROUP} HQ=1, HKV=2"),
        ({"q": floats(B, S, 0, D)}, f"{GROUP} HQ=0, HKV=2"),
        ({"k": floats(B, KEYS, 0, D), "v": floats(B, KEYS, 0, DV)}, f"{GROUP} HQ=4, HKV=0"),
        ({"q": floats(B, S, 258, D)}, f"{GROUP} HQ=258, HKV=2"),
        ({"cu_seqlens": ints(3)}, "q: expected [T, HQ, D], got shape [2, 3, 4, 16]"),
    ),
    *wrong(
        BLOCKS,
        ({"block_indices": ints(B, S, 2, 4, 2)}, f"{N}, got shape [2, 3, 2, 4, 2]"),
        ({"block_indices": ints(B, S, 3, 4)}, f"{N} = [2, 3, 2, 4], got [2, 3, 3, 4]"),
    ),
    *wrong(
        VARLEN,
        ({"q": floats(2, S, 4, D)}, "q: expected [T, HQ, D], got shape [2, 3, 4, 16]"),
        ({"k": floats(1, KEYS, 2, D)}, f"k: expected [T_kv, HKV, D], got shape [1, 20, 2, 16]; {SQUEEZE}"),
        ({"v": floats(21, 2, DV)}, "v: expected [T_kv, HKV, Dv] = [20, 2, 24], got [21, 2, 24]"),
        ({"ranges": ints(S, 4, 2)}, "ranges: expected [T, HKV, n, 2], got shape [3, 4, 2]"),
        ({"ranges": ints(4, 2, 4, 2)}, "ranges: expected [T, HKV, n, 2] = [3, 2, 4, 2], got [4, 2, 4, 2]"),
        (
            {"ranges": None, "block_indices": ints(S, 2), "block_size": 16},
            "block_indices: expected [T, HKV, n], got shape [3, 2]",
        ),
        ({"q_positions": ints(1, S)}, "q_positions: expected [T] = [3], got [1, 3]"),
        ({"out": floats(S, 4, D)}, "out: expected [T, HQ, Dv] = [3, 4, 24], got [3, 4, 16]"),
        ({"cu_seqlens": ints(1, 3)}, f"cu_seqlens_q: expected {CU} [1, 3]"),
        ({"cu_seqlens": ints(0)}, f"cu_seqlens_q: expected {CU} [0]"),
        ({"cu_seqlens": (ints(3), ints())}, f"cu_seqlens_k: expected {CU} []"),
        ({"cu_seqlens": (ints(3), ints(4))}, "cu_seqlens_k: expected [3] (that of cu_seqlens_q), got [4]"),
        ({"cu_seqlens": None}, "q: expected [B, S, HQ, D], got shape [3, 4, 16]"),
    ),
]
TYPES = [
    *wrong(
        BATCH,
        ({"q": ints(B, S, 4, D)}, f"q: {FLOATS} int32"),
        ({"q": floats(B, S, 4, D, dtype=torch.float8_e5m2)}, f"q: {FLOATS} float8_e5m2"),
        ({"k": floats(B, KEYS, 2, D).half()}, "k: expected dtype float32 (that of q), got float16"),
        ({"v": floats(B, KEYS, 2, DV).double()}, "v: expected dtype float32 (that of q), got float64"),
        ({"out": floats(B, S, 4, DV).bfloat16()}, "out: expected dtype float32 (that of q), got bfloat16"),
        ({"ranges": floats(B, S, 2, 4, 2)}, f"ranges: {INTS} float32"),
        ({"ranges": ints(B, S, 2, 4, 2, dtype=torch.int16)}, f"ranges: {INTS} int16"),
        ({"q_positions": floats(B, S)}, f"q_positions: {INTS} float32"),
        ({"q": [1.0]}, "q: expected a torch.Tensor, got list"),
        ({"k": None}, "k: expected a torch.Tensor, got NoneType"),
        ({"v": floats(B, KEYS, 2, DV).numpy()}, "v: expected a torch.Tensor, got ndarray"),
        ({"ranges": [[0, 4]]}, "ranges: expected a torch.Tensor, got list"),
        ({"q_positions": 3}, "q_positions: expected a torch.Tensor, got int"),
        ({"out": "here"}, "out: expected a torch.Tensor, got str"),
        ({"scale": "x"}, "scale: expected a number or None, got str"),
        ({"scale": torch.ones(1)}, "scale: expected a number or None, got Tensor"),
        ({"max_selected": 7.5}, "max_selected: expected an int, got float"),
        ({"max_selected": True}, "max_selected: expected an int, got bool"),
        ({"max_selected": [7]}, "max_selected: expected an int, got list"),
        *(({"causal": x}, f"causal: expected a bool, got {type(x).__name__}") for x in ("no", 1, None, [True])),
    ),
    *wrong(
        BLOCKS,
        ({"block_indices": ints(B, S, 2, 4, dtype=torch.uint8)}, f"block_indices: {INTS} uint8"),
        ({"block_indices": [0]}, "block_indices: expected a torch.Tensor, got list"),
        ({"block_size": 16.5}, "block_size: expected an int, got float"),
        ({"block_size": True}, "block_size: expected an int, got bool"),
        ({"block_size": [16]}, "block_size: expected an int, got list"),
        ({"block_size": torch.tensor(16)}, "block_size: expected an int, got Tensor"),
    ),
    *wrong(
        VARLEN,
        ({"cu_seqlens": floats(3)}, f"cu_seqlens_q: {INTS} float32"),
        ({"cu_seqlens": (ints(3), ints(3, dtype=torch.int8))}, f"cu_seqlens_k: {INTS} int8"),
        ({"cu_seqlens": [0, 1, 3]}, "cu_seqlens_q: expected a torch.Tensor, got list"),
        ({"cu_seqlens": (None, ints(3))}, "cu_seqlens: expected a tensor or a pair of tensors, got a pair with None"),
        ({"cu_seqlens": (ints(3),)}, "cu_seqlens: expected a tensor or a pair of tensors, got a tuple of 1"),
    ),
]
ELSEWHERE = "expected device {device} (that of q), got meta"
DEVICES = [
    *wrong(BATCH, *(({name: BATCH[name].to(META)}, f"{name}: {ELSEWHERE}") for name in ("k", "v", "ranges"))),
    *wrong(BLOCKS, ({"block_indices": ints(B, S, HKV, 4).to(META)}, f"block_indices: {ELSEWHERE}")),
    *wrong(
        BATCH,
        ({"out": floats(B, S, 4, DV).to(META)}, f"out: {ELSEWHERE}"),
        ({"q_positions": ints(B, S).to(META)}, f"q_positions: {ELSEWHERE}"),
    ),
    *wrong(
        VARLEN,
        ({"cu_seqlens": ints(3).to(META)}, f"cu_seqlens_q: {ELSEWHERE}"),
        ({"cu_seqlens": (ints(3), ints(3).to(META))}, f"cu_seqlens_k: {ELSEWHERE}"),
    ),
]
ONE = "selection: expected exactly one of ranges and block_indices, got"
VALUES = [
    *wrong(
        BATCH,
        ({"ranges": None}, f"{ONE} neither"),
        ({"block_size": 16}, "block_size: expected None with ranges, got 16"),
        ({"max_selected": -1}, "max_selected: expected an int >= 0, got -1"),
        (
            {"causal": False, "q_positions": ints(B, S)},
            "causal: expected True with q_positions, which causal=False does not read, got False",
        ),
    ),
    *wrong(
        BLOCKS,
        ({"ranges": ints(B, S, 2, 4, 2)}, f"{ONE} both"),
        ({"block_size": None}, "block_size: expected an int >= 1 with block_indices, got None"),
        ({"block_size": 0}, "block_size: expected an int >= 1, got 0"),
        ({"block_size": -16}, "block_size: expected an int >= 1, got -16"),
    ),
]


REFUSED = [(ValueError, SHAPES), (TypeError, TYPES), (ValueError, DEVICES), (ValueError, VALUES)]


@pytest.mark.parametrize(
    ("error", "call", "text"),
    [pytest.param(error, *row.values, id=row.id) for error, rows in REFUSED for row in rows],
)
def test_refusals(attend, device, error, call, text):
    refuses(error, text, device, attend, **call)


BACKEND = "backend: expected one of auto, triton, sdpa, reference, got"
SCHEDULE = "schedule: expected one of auto, query_major, key_major, union, small_blocks, per_head, got"
OPTIONS = wrong(
    BATCH,
    ({"backend": "cuda"}, f"{BACKEND} 'cuda'"),
    ({"backend": None}, f"{BACKEND} None"),
    ({"schedule": "fast"}, f"{SCHEDULE} 'fast'"),
    *(
        ({"backend": backend, "schedule": name}, f"schedule: expected auto with backend='{backend}', got '{name}'")
        for backend, name in (("sdpa", "per_head"), ("sdpa", "key_major"), ("reference", "query_major"))
    ),
)


@pytest.mark.parametrize(("call", "text"), OPTIONS)
def test_options(device, call, text):
    refuses(ValueError, text, device, nsa.selection_attention, **call)


@pytest.mark.parametrize("base", [BATCH, BLOCKS, VARLEN], ids=["ranges", "blocks", "varlen"])
def test_the_calls_that_were_spoiled_are_good(attend, device, base):
    assert attend(**{name: move(x, device) for name, x in base.items()}).shape[-1] == DV


@pytest.mark.parametrize(("name", "base"), [("block_size", BLOCKS), ("max_selected", BATCH)])
def test_equal_numbers_of_another_type_are_refused_too(attend, device, name, base):
    """`1 == 1.0 == True`: a call remembered by its metadata must not let them pass."""
    base = {argument: move(x, device) for argument, x in base.items()}
    attend(**base | {name: 1})
    for number, kind in ((True, "bool"), (1.0, "float")):
        refuses(TypeError, f"{name}: expected an int, got {kind}", device, attend, **base | {name: number})
