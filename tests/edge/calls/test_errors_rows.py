"""What wrong calls of the packed-row entry points, the original layout and the span utilities are told, word for word.

Rows are checked as the call they are a view of, hence names and layouts of the front door: `N` rows are a batch of one
query each, or tokens with `cu_seqlens`.
"""

import pytest
import torch

import nsa
from nsa import settings

from .refusals import META, floats, ints, move, refuses, wrong

GROUP, FLOATS = "heads: expected HQ = G * HKV with G from 1 to 128, got", "expected dtype float16, bfloat16, float32"
TENSOR, ELSEWHERE = "expected a torch.Tensor, got", "expected device {device} (that of Q), got meta"
DENSE = {"Q": floats(3, 4, 16), "K": floats(3, 9, 16), "V": floats(3, 9, 24)}
VARLEN = {"Q": floats(3, 4, 16), "K_all": floats(9, 16), "V_all": floats(9, 24), "cu_seqlens": ints(4)}
LAST = "Q: expected a contiguous last dimension (stride 1), got a strided one"
OF_DENSE = wrong(
    DENSE,
    ({"Q": floats(3, 1, 4, 16)}, ValueError, "Q: expected [N, H, D], got shape [3, 1, 4, 16]"),
    ({"K": floats(27, 16)}, ValueError, "K: expected [N, L, D], got shape [27, 16]"),
    ({"V": floats(3, 9, 1, 24)}, ValueError, "V: expected [N, L, Dv], got shape [3, 9, 1, 24]"),
    ({"Q": [1.0]}, TypeError, f"Q: {TENSOR} list"),
    ({"K": None}, TypeError, f"K: {TENSOR} NoneType"),
    ({"out": []}, TypeError, f"out: {TENSOR} list"),
    ({"Q": floats(3, 4, 16).double()}, TypeError, f"Q: {FLOATS}, got float64"),
    ({"Q": ints(3, 4, 16)}, TypeError, f"Q: {FLOATS}, float64, got int32"),
    ({"K": floats(3, 9, 16).half()}, TypeError, "K: expected dtype float32 (that of Q), got float16"),
    ({"V": floats(3, 9, 24).to(META)}, ValueError, f"V: {ELSEWHERE}"),
    ({"K": floats(4, 9, 16)}, ValueError, "K: expected [N, L, D] = [3, 9, 16], got [4, 9, 16]"),
    ({"K": floats(3, 9, 32)}, ValueError, "K: expected [N, L, D] = [3, 9, 16], got [3, 9, 32]"),
    ({"V": floats(3, 8, 24)}, ValueError, "V: expected [N, L, Dv] = [3, 9, 24], got [3, 8, 24]"),
    ({"out": floats(3, 4, 16)}, ValueError, "out: expected [N, H, Dv] = [3, 4, 24], got [3, 4, 16]"),
    ({"Q": floats(3, 4, 32)[..., ::2]}, ValueError, LAST),
    ({"Q": floats(3, 4, 8), "K": floats(3, 9, 8)}, ValueError, "head dim D: expected 16 to 256, got 8"),
    ({"V": floats(3, 9, 257)}, ValueError, "head dim Dv: expected 16 to 256, got 257"),
    ({"Q": floats(3, 0, 16)}, ValueError, f"{GROUP} HQ=0, HKV=1"),
    ({"Q": floats(3, 129, 16)}, ValueError, f"{GROUP} HQ=129, HKV=1"),
)
OF_VARLEN = wrong(
    VARLEN,
    ({"K_all": floats(3, 3, 16)}, ValueError, "K_all: expected [sum L, D], got shape [3, 3, 16]"),
    ({"V_all": floats(24)}, ValueError, "V_all: expected [sum L, Dv], got shape [24]"),
    ({"V_all": floats(8, 24)}, ValueError, "V_all: expected [sum L, Dv] = [9, 24], got [8, 24]"),
    ({"cu_seqlens": None}, TypeError, f"cu_seqlens: {TENSOR} NoneType"),
    ({"scale": "x"}, TypeError, "scale: expected a number or None, got str"),
    ({"K_all": floats(9, 32)}, ValueError, "K_all: expected [sum L, D] = [9, 16], got [9, 32]"),
    ({"cu_seqlens": ints(3)}, ValueError, "cu_seqlens: expected [N + 1] = [4], got [3]"),
    ({"cu_seqlens": ints(1, 4)}, ValueError, "cu_seqlens: expected [N + 1] = [4], got [1, 4]"),
    ({"cu_seqlens": floats(4)}, TypeError, "cu_seqlens: expected dtype int32, int64, got float32"),
    ({"cu_seqlens": [0, 1, 2, 9]}, TypeError, f"cu_seqlens: {TENSOR} list"),
    ({"cu_seqlens": ints(4).to(META)}, ValueError, f"cu_seqlens: {ELSEWHERE}"),
    ({"max_selected": -1}, ValueError, "max_selected: expected an int >= 0, got -1"),
    ({"max_selected": 9.5}, TypeError, "max_selected: expected an int, got float"),
    ({"max_selected": [9]}, TypeError, "max_selected: expected an int, got list"),
)
OF_ORIGINAL = wrong(
    {"Q": floats(2, 3, 2, 2, 16), "K": floats(2, 2, 20, 16), "V": floats(2, 2, 20, 24), "ranges": ints(2, 3, 2, 4, 2)},
    ({"Q": floats(2, 3, 4, 16)}, ValueError, "Q: expected [B, S, HKV, G, D], got shape [2, 3, 4, 16]"),
    ({"K": floats(2, 20, 16)}, ValueError, "K: expected [B, HKV, S_kv, D], got shape [2, 20, 16]"),
    ({"V": floats(2, 2, 1, 20, 24)}, ValueError, "V: expected [B, HKV, S_kv, Dv], got shape [2, 2, 1, 20, 24]"),
    ({"Q": []}, TypeError, f"Q: {TENSOR} list"),
    ({"K": None}, TypeError, f"K: {TENSOR} NoneType"),
    (
        {"K": floats(2, 4, 20, 16), "V": floats(2, 4, 20, 24)}, ValueError,
        "K: expected [B, HKV, S_kv, D] = [2, 2, 20, 16], got [2, 4, 20, 16]",
    ),
    (
        {"V": floats(2, 2, 21, 24)}, ValueError,
        "V: expected [B, HKV, S_kv, Dv] = [2, 2, 20, 24], got [2, 2, 21, 24]",
    ),
    ({"V": floats(2, 2, 20, 24).half()}, TypeError, "V: expected dtype float32 (that of Q), got float16"),
    ({"ranges": ints(2, 3, 4, 2)}, ValueError, "ranges: expected [B, S, HKV, n, 2], got shape [2, 3, 4, 2]"),
    ({"ranges": None}, ValueError, "selection: expected exactly one of ranges and block_indices, got neither"),
    ({"max_selected": -2}, ValueError, "max_selected: expected an int >= 0, got -2"),
)  # fmt: skip
PACK_RANGES, PACK_V = "ranges: expected [B, S, HKV, n, 2]", "v: expected [B, S_kv, HKV, Dv]"
# Also what would be read from another head, or past the last key.
OF_PACKING = wrong(
    {"k": floats(2, 9, 2, 16), "v": floats(2, 9, 2, 24), "ranges": ints(2, 3, 2, 5, 2)},
    ({"k": [1.0]}, TypeError, f"k: {TENSOR} list"),
    ({"v": None}, TypeError, f"v: {TENSOR} NoneType"),
    ({"ranges": [[0, 4]]}, TypeError, f"ranges: {TENSOR} list"),
    ({"k": floats(9, 2, 16)}, ValueError, "k: expected [B, S_kv, HKV, D], got shape [9, 2, 16]"),
    ({"v": floats(9, 2, 24)}, ValueError, f"{PACK_V}, got shape [9, 2, 24]"),
    ({"v": floats(2, 9, 1, 24)}, ValueError, f"{PACK_V} = [2, 9, 2, 24], got [2, 9, 1, 24]"),
    ({"v": floats(2, 8, 2, 24)}, ValueError, f"{PACK_V} = [2, 9, 2, 24], got [2, 8, 2, 24]"),
    ({"v": floats(1, 9, 2, 24)}, ValueError, f"{PACK_V} = [2, 9, 2, 24], got [1, 9, 2, 24]"),
    ({"k": ints(2, 9, 2, 16)}, TypeError, f"k: {FLOATS}, float64, got int32"),
    ({"v": floats(2, 9, 2, 24).half()}, TypeError, "v: expected dtype float32 (that of k), got float16"),
    ({"v": floats(2, 9, 2, 24).to(META)}, ValueError, "v: expected device {device} (that of k), got meta"),
    ({"ranges": ints(2, 3, 5, 2)}, ValueError, f"{PACK_RANGES}, got shape [2, 3, 5, 2]"),
    ({"ranges": ints(2, 3, 4, 5, 2)}, ValueError, f"{PACK_RANGES} = [2, 3, 2, 5, 2], got [2, 3, 4, 5, 2]"),
    ({"ranges": ints(1, 3, 2, 5, 2)}, ValueError, f"{PACK_RANGES} = [2, 3, 2, 5, 2], got [1, 3, 2, 5, 2]"),
    ({"ranges": ints(2, 3, 2, 5, 3)}, ValueError, f"{PACK_RANGES} = [2, 3, 2, 5, 2], got [2, 3, 2, 5, 3]"),
    ({"ranges": floats(2, 3, 2, 5, 2)}, TypeError, "ranges: expected dtype int32, int64, got float32"),
    ({"ranges": ints(2, 3, 2, 5, 2).short()}, TypeError, "ranges: expected dtype int32, int64, got int16"),
    ({"ranges": ints(2, 3, 2, 5, 2).to(META)}, ValueError, "ranges: expected device {device} (that of k), got meta"),
    ({"k": floats(2, 9, 2, 0)}, ValueError, "k: expected a head dim of 1 or more, got shape [2, 9, 2, 0]"),
    ({"v": floats(2, 9, 2, 0)}, ValueError, "v: expected a head dim of 1 or more, got shape [2, 9, 2, 0]"),
    ({"max_selected": -1}, ValueError, "max_selected: expected an int >= 0, got -1"),
    ({"max_selected": 4.0}, TypeError, "max_selected: expected an int, got float"),
)
SPANS = "ranges: expected int32 or int64 [..., n, 2], got"
OF_MERGING = wrong(
    {},
    ({"ranges": [[0, 1]]}, TypeError, f"ranges: {TENSOR} list"),
    ({"ranges": floats(3, 2)}, ValueError, f"{SPANS} torch.float32 [3, 2]"),
    ({"ranges": ints(3, 3)}, ValueError, f"{SPANS} torch.int32 [3, 3]"),
    ({"ranges": ints(2)}, ValueError, f"{SPANS} torch.int32 [2]"),
)
OF_BLOCKS = wrong(
    {"block_indices": ints(3), "block_size": 4},
    ({"block_indices": floats(3)}, TypeError, "block_indices: expected dtype int32, int64, got float32"),
    ({"block_indices": [3]}, TypeError, f"block_indices: {TENSOR} list"),
    ({"block_size": 0}, ValueError, "block_size: expected an int >= 1, got 0"),
    ({"block_size": 16.0}, TypeError, "block_size: expected an int, got float"),
    ({"block_size": True}, TypeError, "block_size: expected an int, got bool"),
    ({"seqlen_k": -5}, ValueError, "seqlen_k: expected an int >= 0, got -5"),
    ({"seqlen_k": 9.0}, TypeError, "seqlen_k: expected an int, got float"),
)
TABLES = {
    "sel_attn_fwd_dense": OF_DENSE, "sel_attn_fwd_dense_group": OF_DENSE,
    "sel_attn_fwd_varlen": OF_VARLEN, "sel_attn_fwd_varlen_group": OF_VARLEN,
    "selection_attention_triton": OF_ORIGINAL, "grouped_selection_attention_packed": OF_ORIGINAL,
    "pack_rows": OF_PACKING, "merge_ranges": OF_MERGING, "ranges_from_blocks": OF_BLOCKS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "call", "error", "text"),
    [pytest.param(name, *row.values, id=f"{name}-{row.id}") for name, rows in TABLES.items() for row in rows],
)
def test_refusals_of_other_functions(device, function, call, error, text):
    refuses(error, text, device, getattr(nsa, function), **call)


@pytest.mark.parametrize("leaf", DENSE)
def test_rows_have_no_gradient(device, leaf):
    rows = {name: move(x, device).clone().requires_grad_(name == leaf) for name, x in DENSE.items()}
    text = "packed rows have no backward, and an input requires grad: use selection_attention"
    for call in (nsa.sel_attn_fwd_dense, nsa.sel_attn_fwd_dense_group):
        with pytest.raises(RuntimeError, match=f"^{text}$"):
            call(**rows)
    with torch.no_grad():
        nsa.sel_attn_fwd_dense_group(**rows)


def test_rows_never_fall_back(device, monkeypatch, fresh_plans):
    monkeypatch.setattr("nsa.routing.why_not_triton", lambda device: f"Triton route needs a CUDA device, got {device}")
    for use in (True, False):
        with nsa.configure(use_triton_sel=use):
            text = "Triton route needs a CUDA device, got {device}"
            refuses(RuntimeError, text, device, nsa.sel_attn_fwd_dense, **DENSE)


@pytest.mark.parametrize("entry", ["front-door", "dense", "dense_group"])
def test_interpreted_bf16_is_refused(device, entry):
    """It would compute nonsense, silently."""
    if not settings.interpreter():
        pytest.skip("on the GPU bf16 is computed right")
    Q, K, V = (x.bfloat16() for x in DENSE.values())
    text, call, rows = "Triton's interpreter computes bfloat16 wrong", nsa.selection_attention, {"Q": Q, "K": K, "V": V}
    if entry == "front-door":
        rows = {"q": Q[:, None], "k": K[:, :, None], "v": V[:, :, None], "ranges": ints(3, 1, 1, 1, 2)}
        refuses(RuntimeError, f"backend='triton': {text}", device, call, **rows, backend="triton")
    else:
        refuses(RuntimeError, text, device, getattr(nsa, f"sel_attn_fwd_{entry}"), **rows)
