"""What a wrong call is told, word for word: what was expected and what came, on every backend."""

import pytest
import torch

import nsa

B, S, KEYS, HKV, G, D, DV = 2, 3, 20, 2, 2, 16, 24
INT = torch.int32


def rand(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape, dtype=INT):
    return torch.zeros(shape, dtype=dtype)


BATCH = {
    "q": rand(B, S, HKV * G, D),
    "k": rand(B, KEYS, HKV, D),
    "v": rand(B, KEYS, HKV, DV),
    "ranges": ints(B, S, HKV, 4, 2),
}
BLOCKS = {**BATCH, "ranges": None, "block_indices": ints(B, S, HKV, 4), "block_size": 16}
VARLEN = {
    "q": rand(S, HKV * G, D),
    "k": rand(KEYS, HKV, D),
    "v": rand(KEYS, HKV, DV),
    "ranges": ints(S, HKV, 4, 2),
    "cu_seqlens": ints(3),
}

# What is changed in a good call, and what the call then says; {device} is the device of the good tensors.
META = torch.device("meta")
SHAPES = {
    "q-3d": (BATCH, {"q": rand(S, 4, D)}, "q: expected [B, S, HQ, D], got shape [3, 4, 16]"),
    "q-5d": (BATCH, {"q": rand(1, 1, S, 4, D)}, "q: expected [B, S, HQ, D], got shape [1, 1, 3, 4, 16]"),
    "k-3d": (BATCH, {"k": rand(KEYS, 2, D)}, "k: expected [B, S_kv, HKV, D], got shape [20, 2, 16]"),
    "v-3d": (BATCH, {"v": rand(KEYS, 2, D)}, "v: expected [B, S_kv, HKV, Dv], got shape [20, 2, 16]"),
    "k-batch": (
        BATCH,
        {"k": rand(3, KEYS, 2, D)},
        "k: expected [B, S_kv, HKV, D] = [2, 20, 2, 16], got [3, 20, 2, 16]",
    ),
    "k-dim": (BATCH, {"k": rand(B, KEYS, 2, 32)}, "k: expected [B, S_kv, HKV, D] = [2, 20, 2, 16], got [2, 20, 2, 32]"),
    "v-keys": (BATCH, {"v": rand(B, 21, 2, DV)}, "v: expected [B, S_kv, HKV, Dv] = [2, 20, 2, 24], got [2, 21, 2, 24]"),
    "v-heads": (
        BATCH,
        {"v": rand(B, KEYS, 1, DV)},
        "v: expected [B, S_kv, HKV, Dv] = [2, 20, 2, 24], got [2, 20, 1, 24]",
    ),
    "ranges-4d": (BATCH, {"ranges": ints(B, S, 4, 2)}, "ranges: expected [B, S, HKV, n, 2], got shape [2, 3, 4, 2]"),
    "ranges-heads": (
        BATCH,
        {"ranges": ints(B, S, 4, 4, 2)},
        "ranges: expected [B, S, HKV, n, 2] = [2, 3, 2, 4, 2], got [2, 3, 4, 4, 2]",
    ),
    "ranges-queries": (
        BATCH,
        {"ranges": ints(B, 1, 2, 4, 2)},
        "ranges: expected [B, S, HKV, n, 2] = [2, 3, 2, 4, 2], got [2, 1, 2, 4, 2]",
    ),
    "ranges-triples": (
        BATCH,
        {"ranges": ints(B, S, 2, 4, 3)},
        "ranges: expected [B, S, HKV, n, 2] = [2, 3, 2, 4, 2], got [2, 3, 2, 4, 3]",
    ),
    "blocks-5d": (
        BLOCKS,
        {"block_indices": ints(B, S, 2, 4, 2)},
        "block_indices: expected [B, S, HKV, n], got shape [2, 3, 2, 4, 2]",
    ),
    "blocks-heads": (
        BLOCKS,
        {"block_indices": ints(B, S, 1, 4)},
        "block_indices: expected [B, S, HKV, n] = [2, 3, 2, 4], got [2, 3, 1, 4]",
    ),
    "positions": (BATCH, {"q_positions": ints(B, 4)}, "q_positions: expected [B, S] = [2, 3], got [2, 4]"),
    "positions-1d": (BATCH, {"q_positions": ints(S)}, "q_positions: expected [B, S] = [2, 3], got [3]"),
    "out": (
        BATCH,
        {"out": rand(B, S, 4, D)},
        "out: expected [B, S, HQ, Dv] = [2, 3, 4, 24], got [2, 3, 4, 16]",
    ),
    "out-3d": (BATCH, {"out": rand(S, 4, DV)}, "out: expected [B, S, HQ, Dv] = [2, 3, 4, 24], got [3, 4, 24]"),
    "dim-small": (
        BATCH,
        {"q": rand(B, S, 4, 8), "k": rand(B, KEYS, 2, 8)},
        "head dim D: expected 16 to 256, got 8",
    ),
    "dim-large": (
        BATCH,
        {"q": rand(B, S, 4, 257), "k": rand(B, KEYS, 2, 257)},
        "head dim D: expected 16 to 256, got 257",
    ),
    "value-dim-small": (BATCH, {"v": rand(B, KEYS, 2, 15)}, "head dim Dv: expected 16 to 256, got 15"),
    "value-dim-large": (BATCH, {"v": rand(B, KEYS, 2, 320)}, "head dim Dv: expected 16 to 256, got 320"),
    "heads-not-a-multiple": (
        BATCH,
        {"q": rand(B, S, 5, D)},
        "heads: expected HQ = G * HKV with G from 1 to 128, got HQ=5, HKV=2",
    ),
    "heads-fewer": (
        BATCH,
        {"q": rand(B, S, 1, D)},
        "heads: expected HQ = G * HKV with G from 1 to 128, got HQ=1, HKV=2",
    ),
    "heads-none": (
        BATCH,
        {"q": rand(B, S, 0, D)},
        "heads: expected HQ = G * HKV with G from 1 to 128, got HQ=0, HKV=2",
    ),
    "kv-heads-none": (
        BATCH,
        {"k": rand(B, KEYS, 0, D), "v": rand(B, KEYS, 0, DV)},
        "heads: expected HQ = G * HKV with G from 1 to 128, got HQ=4, HKV=0",
    ),
    "group-too-large": (
        BATCH,
        {"q": rand(B, S, 258, D)},
        "heads: expected HQ = G * HKV with G from 1 to 128, got HQ=258, HKV=2",
    ),
    "varlen-q-4d": (VARLEN, {"q": rand(2, S, 4, D)}, "q: expected [T, HQ, D], got shape [2, 3, 4, 16]"),
    "varlen-k-4d": (
        VARLEN,
        {"k": rand(1, KEYS, 2, D)},
        "k: expected [T_kv, HKV, D], got shape [1, 20, 2, 16]; nsa takes packed sequences as [T_kv, HKV, D]: call "
        "squeeze(0)",
    ),
    "varlen-v": (VARLEN, {"v": rand(21, 2, DV)}, "v: expected [T_kv, HKV, Dv] = [20, 2, 24], got [21, 2, 24]"),
    "varlen-ranges": (VARLEN, {"ranges": ints(S, 4, 2)}, "ranges: expected [T, HKV, n, 2], got shape [3, 4, 2]"),
    "varlen-ranges-tokens": (
        VARLEN,
        {"ranges": ints(4, 2, 4, 2)},
        "ranges: expected [T, HKV, n, 2] = [3, 2, 4, 2], got [4, 2, 4, 2]",
    ),
    "varlen-blocks": (
        VARLEN,
        {"ranges": None, "block_indices": ints(S, 2), "block_size": 16},
        "block_indices: expected [T, HKV, n], got shape [3, 2]",
    ),
    "varlen-positions": (VARLEN, {"q_positions": ints(1, S)}, "q_positions: expected [T] = [3], got [1, 3]"),
    "varlen-out": (VARLEN, {"out": rand(S, 4, D)}, "out: expected [T, HQ, Dv] = [3, 4, 24], got [3, 4, 16]"),
    "cu-2d": (VARLEN, {"cu_seqlens": ints(1, 3)}, "cu_seqlens_q: expected [B + 1] with B >= 0, got shape [1, 3]"),
    "cu-empty": (VARLEN, {"cu_seqlens": ints(0)}, "cu_seqlens_q: expected [B + 1] with B >= 0, got shape [0]"),
    "cu-k-scalar": (
        VARLEN,
        {"cu_seqlens": (ints(3), ints())},
        "cu_seqlens_k: expected [B + 1] with B >= 0, got shape []",
    ),
    "cu-pair": (
        VARLEN,
        {"cu_seqlens": (ints(3), ints(4))},
        "cu_seqlens_k: expected [3] (that of cu_seqlens_q), got [4]",
    ),
    "cu-with-a-batch": (BATCH, {"cu_seqlens": ints(3)}, "q: expected [T, HQ, D], got shape [2, 3, 4, 16]"),
    "tokens-without-cu": (VARLEN, {"cu_seqlens": None}, "q: expected [B, S, HQ, D], got shape [3, 4, 16]"),
}
DTYPES = {
    "q-int": (BATCH, {"q": ints(B, S, 4, D)}, "q: expected dtype float16, bfloat16, float32, float64, got int32"),
    "q-float8": (
        BATCH,
        {"q": rand(B, S, 4, D).to(torch.float8_e5m2)},
        "q: expected dtype float16, bfloat16, float32, float64, got float8_e5m2",
    ),
    "k": (BATCH, {"k": rand(B, KEYS, 2, D).half()}, "k: expected dtype float32 (that of q), got float16"),
    "v": (BATCH, {"v": rand(B, KEYS, 2, DV).double()}, "v: expected dtype float32 (that of q), got float64"),
    "out": (BATCH, {"out": rand(B, S, 4, DV).bfloat16()}, "out: expected dtype float32 (that of q), got bfloat16"),
    "ranges": (BATCH, {"ranges": rand(B, S, 2, 4, 2)}, "ranges: expected dtype int32, int64, got float32"),
    "ranges-short": (
        BATCH,
        {"ranges": ints(B, S, 2, 4, 2, dtype=torch.int16)},
        "ranges: expected dtype int32, int64, got int16",
    ),
    "blocks": (
        BLOCKS,
        {"block_indices": ints(B, S, 2, 4, dtype=torch.uint8)},
        "block_indices: expected dtype int32, int64, got uint8",
    ),
    "positions": (BATCH, {"q_positions": rand(B, S)}, "q_positions: expected dtype int32, int64, got float32"),
    "cu": (VARLEN, {"cu_seqlens": rand(3)}, "cu_seqlens_q: expected dtype int32, int64, got float32"),
    "half-a-pair": (
        VARLEN,
        {"cu_seqlens": (None, ints(3))},
        "cu_seqlens: expected a tensor or a pair of tensors, got a pair with None",
    ),
    "cu-k": (
        VARLEN,
        {"cu_seqlens": (ints(3), ints(3, dtype=torch.int8))},
        "cu_seqlens_k: expected dtype int32, int64, got int8",
    ),
    "q-list": (BATCH, {"q": [1.0]}, "q: expected a torch.Tensor, got list"),
    "k-none": (BATCH, {"k": None}, "k: expected a torch.Tensor, got NoneType"),
    "v-array": (BATCH, {"v": rand(B, KEYS, 2, DV).numpy()}, "v: expected a torch.Tensor, got ndarray"),
    "ranges-list": (BATCH, {"ranges": [[0, 4]]}, "ranges: expected a torch.Tensor, got list"),
    "blocks-list": (BLOCKS, {"block_indices": [0]}, "block_indices: expected a torch.Tensor, got list"),
    "positions-int": (BATCH, {"q_positions": 3}, "q_positions: expected a torch.Tensor, got int"),
    "cu-one": (
        VARLEN,
        {"cu_seqlens": (ints(3),)},
        "cu_seqlens: expected a tensor or a pair of tensors, got a tuple of 1",
    ),
    "scale-str": (BATCH, {"scale": "x"}, "scale: expected a number or None, got str"),
    "scale-tensor": (BATCH, {"scale": torch.ones(1)}, "scale: expected a number or None, got Tensor"),
    "cu-list": (VARLEN, {"cu_seqlens": [0, 1, 3]}, "cu_seqlens_q: expected a torch.Tensor, got list"),
    "out-str": (BATCH, {"out": "here"}, "out: expected a torch.Tensor, got str"),
    "block-size-float": (BLOCKS, {"block_size": 16.5}, "block_size: expected an int, got float"),
    "block-size-bool": (BLOCKS, {"block_size": True}, "block_size: expected an int, got bool"),
    "block-size-tensor": (BLOCKS, {"block_size": torch.tensor(16)}, "block_size: expected an int, got Tensor"),
    "max-selected-float": (BATCH, {"max_selected": 7.5}, "max_selected: expected an int, got float"),
    "max-selected-bool": (BATCH, {"max_selected": True}, "max_selected: expected an int, got bool"),
}
DEVICES = {
    name: (base, {name: base[name].to(META)}, f"{name}: expected device {{device}} (that of q), got meta")
    for name, base in (("k", BATCH), ("v", BATCH), ("ranges", BATCH), ("block_indices", BLOCKS))
}
DEVICES |= {
    "out": (
        BATCH,
        {"out": rand(B, S, 4, DV).to(META)},
        "out: expected device {device} (that of q), got meta",
    ),
    "positions": (
        BATCH,
        {"q_positions": ints(B, S).to(META)},
        "q_positions: expected device {device} (that of q), got meta",
    ),
    "cu": (VARLEN, {"cu_seqlens": ints(3).to(META)}, "cu_seqlens_q: expected device {device} (that of q), got meta"),
    "cu-k": (
        VARLEN,
        {"cu_seqlens": (ints(3), ints(3).to(META))},
        "cu_seqlens_k: expected device {device} (that of q), got meta",
    ),
}
VALUES = {
    "selection-neither": (
        BATCH,
        {"ranges": None},
        "selection: expected exactly one of ranges and block_indices, got neither",
    ),
    "selection-both": (
        BLOCKS,
        {"ranges": ints(B, S, 2, 4, 2)},
        "selection: expected exactly one of ranges and block_indices, got both",
    ),
    "block-size-missing": (
        BLOCKS,
        {"block_size": None},
        "block_size: expected an int >= 1 with block_indices, got None",
    ),
    "block-size-zero": (BLOCKS, {"block_size": 0}, "block_size: expected an int >= 1, got 0"),
    "block-size-negative": (BLOCKS, {"block_size": -16}, "block_size: expected an int >= 1, got -16"),
    "block-size-with-ranges": (BATCH, {"block_size": 16}, "block_size: expected None with ranges, got 16"),
    "max-selected-negative": (BATCH, {"max_selected": -1}, "max_selected: expected an int >= 0, got -1"),
}


def call(base, changes, device, **keywords):
    def move(x):
        if isinstance(x, tuple):
            return tuple(move(y) for y in x)
        return x.to(device) if isinstance(x, torch.Tensor) and x.device != META else x

    return nsa.selection_attention(**{name: move(x) for name, x in (base | changes).items()}, **keywords)


def refuses(error, case, device, attend):
    """Exactly these words; again when the same call comes again."""
    base, changes, text = case
    for _ in range(2):
        with pytest.raises(error) as raised:
            call(base, changes, device, **attend.keywords)
        assert str(raised.value) == text.format(device=device)


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(attend, device, case):
    refuses(ValueError, SHAPES[case], device, attend)


@pytest.mark.parametrize("case", DTYPES)
def test_types(attend, device, case):
    refuses(TypeError, DTYPES[case], device, attend)


@pytest.mark.parametrize("case", DEVICES)
def test_devices(attend, device, case):
    refuses(ValueError, DEVICES[case], device, attend)


@pytest.mark.parametrize("case", VALUES)
def test_values(attend, device, case):
    refuses(ValueError, VALUES[case], device, attend)


OPTIONS = {
    "backend": ({"backend": "cuda"}, "backend: expected one of auto, triton, sdpa, reference, got 'cuda'"),
    "backend-none": ({"backend": None}, "backend: expected one of auto, triton, sdpa, reference, got None"),
    "schedule": (
        {"schedule": "fast"},
        "schedule: expected one of auto, query_major, key_major, union, per_head, got 'fast'",
    ),
    "schedule-of-sdpa": (
        {"backend": "sdpa", "schedule": "per_head"},
        "schedule: expected auto with backend='sdpa', got 'per_head'",
    ),
    "key-major-of-sdpa": (
        {"backend": "sdpa", "schedule": "key_major"},
        "schedule: expected auto with backend='sdpa', got 'key_major'",
    ),
    "schedule-of-reference": (
        {"backend": "reference", "schedule": "query_major"},
        "schedule: expected auto with backend='reference', got 'query_major'",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(device, case):
    keywords, text = OPTIONS[case]
    with pytest.raises(ValueError, match=r"^(backend|schedule): ") as raised:
        call(BATCH, {}, device, **keywords)
    assert str(raised.value) == text


@pytest.mark.parametrize("base", [BATCH, BLOCKS, VARLEN], ids=["ranges", "blocks", "varlen"])
def test_the_calls_that_were_spoiled_are_good(attend, device, base):
    assert call(base, {}, device, **attend.keywords).shape[-1] == DV


@pytest.mark.parametrize("name", ["block_size", "max_selected"])
def test_equal_numbers_of_another_type_are_refused_too(attend, device, name):
    """`1 == 1.0 == True`: a call remembered by its metadata must not let them pass."""
    base = BLOCKS if name == "block_size" else BATCH
    call(base, {name: 1}, device, **attend.keywords)
    for wrong, kind in ((True, "bool"), (1.0, "float")):
        with pytest.raises(TypeError) as raised:
            call(base, {name: wrong}, device, **attend.keywords)
        assert str(raised.value) == f"{name}: expected an int, got {kind}"
