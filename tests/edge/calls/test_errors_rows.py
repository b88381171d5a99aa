"""What wrong calls of the packed-row entry points, the original layout and the span utilities are told, word for word.

Rows are checked as the call they are a view of, hence names and layouts of the front door: `N` rows are a batch of one
query each, or tokens with `cu_seqlens`.
"""

import pytest
import torch

import nsa
from nsa import settings

META = torch.device("meta")


def rand(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def move(x, device):
    """To the device with its strides, which `to` would straighten where they leave gaps."""
    if not isinstance(x, torch.Tensor) or x.device == META:
        return x
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def refuses(error, text, device, call, *args, **keywords):
    args = [move(x, device) for x in args]
    keywords = {name: move(x, device) for name, x in keywords.items()}
    with pytest.raises(error) as raised:
        call(*args, **keywords)
    assert str(raised.value) == text.format(device=device)


# name: (changes, error, text); the good call is Q [3, 4, 16], K [3, 9, 16], V [3, 9, 24].
DENSE = {
    "Q-4d": ({"Q": rand(3, 1, 4, 16)}, ValueError, "Q: expected [N, H, D], got shape [3, 1, 4, 16]"),
    "K-2d": ({"K": rand(27, 16)}, ValueError, "K: expected [N, L, D], got shape [27, 16]"),
    "V-4d": ({"V": rand(3, 9, 1, 24)}, ValueError, "V: expected [N, L, Dv], got shape [3, 9, 1, 24]"),
    "Q-list": ({"Q": [1.0]}, TypeError, "Q: expected a torch.Tensor, got list"),
    "K-none": ({"K": None}, TypeError, "K: expected a torch.Tensor, got NoneType"),
    "out-list": ({"out": []}, TypeError, "out: expected a torch.Tensor, got list"),
    "Q-fp64": (
        {"Q": rand(3, 4, 16).double()},
        TypeError,
        "Q: expected dtype float16, bfloat16, float32, got float64",
    ),
    "Q-int": ({"Q": ints(3, 4, 16)}, TypeError, "Q: expected dtype float16, bfloat16, float32, float64, got int32"),
    "K-dtype": ({"K": rand(3, 9, 16).half()}, TypeError, "K: expected dtype float32 (that of Q), got float16"),
    "V-device": ({"V": rand(3, 9, 24).to(META)}, ValueError, "V: expected device {device} (that of Q), got meta"),
    "K-rows": ({"K": rand(4, 9, 16)}, ValueError, "K: expected [N, L, D] = [3, 9, 16], got [4, 9, 16]"),
    "K-dim": ({"K": rand(3, 9, 32)}, ValueError, "K: expected [N, L, D] = [3, 9, 16], got [3, 9, 32]"),
    "V-keys": ({"V": rand(3, 8, 24)}, ValueError, "V: expected [N, L, Dv] = [3, 9, 24], got [3, 8, 24]"),
    "out-dim": ({"out": rand(3, 4, 16)}, ValueError, "out: expected [N, H, Dv] = [3, 4, 24], got [3, 4, 16]"),
    "Q-strided": (
        {"Q": rand(3, 4, 32)[..., ::2]},
        ValueError,
        "Q: expected a contiguous last dimension (stride 1), got a strided one",
    ),
    "dim-small": (
        {"Q": rand(3, 4, 8), "K": rand(3, 9, 8)},
        ValueError,
        "head dim D: expected 16 to 256, got 8",
    ),
    "value-dim-large": ({"V": rand(3, 9, 257)}, ValueError, "head dim Dv: expected 16 to 256, got 257"),
    "heads-none": (
        {"Q": rand(3, 0, 16)},
        ValueError,
        "heads: expected HQ = G * HKV with G from 1 to 128, got HQ=0, HKV=1",
    ),
    "heads-many": (
        {"Q": rand(3, 129, 16)},
        ValueError,
        "heads: expected HQ = G * HKV with G from 1 to 128, got HQ=129, HKV=1",
    ),
}
# The good call is Q [3, 4, 16], K_all [9, 16], V_all [9, 24], cu_seqlens [4].
VARLEN = {
    "K-3d": ({"K_all": rand(3, 3, 16)}, ValueError, "K_all: expected [sum L, D], got shape [3, 3, 16]"),
    "V-1d": ({"V_all": rand(24)}, ValueError, "V_all: expected [sum L, Dv], got shape [24]"),
    "V-keys": ({"V_all": rand(8, 24)}, ValueError, "V_all: expected [sum L, Dv] = [9, 24], got [8, 24]"),
    "cu-none": ({"cu_seqlens": None}, TypeError, "cu_seqlens: expected a torch.Tensor, got NoneType"),
    "scale": ({"scale": "x"}, TypeError, "scale: expected a number or None, got str"),
    "K-dim": ({"K_all": rand(9, 32)}, ValueError, "K_all: expected [sum L, D] = [9, 16], got [9, 32]"),
    "cu-short": ({"cu_seqlens": ints(3)}, ValueError, "cu_seqlens: expected [N + 1] = [4], got [3]"),
    "cu-2d": ({"cu_seqlens": ints(1, 4)}, ValueError, "cu_seqlens: expected [N + 1] = [4], got [1, 4]"),
    "cu-dtype": ({"cu_seqlens": rand(4)}, TypeError, "cu_seqlens: expected dtype int32, int64, got float32"),
    "cu-list": ({"cu_seqlens": [0, 1, 2, 9]}, TypeError, "cu_seqlens: expected a torch.Tensor, got list"),
    "cu-device": (
        {"cu_seqlens": ints(4).to(META)},
        ValueError,
        "cu_seqlens: expected device {device} (that of Q), got meta",
    ),
    "bound-negative": ({"max_selected": -1}, ValueError, "max_selected: expected an int >= 0, got -1"),
    "bound-float": ({"max_selected": 9.5}, TypeError, "max_selected: expected an int, got float"),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense_rows(device, case):
    changes, error, text = DENSE[case]
    good = {"Q": rand(3, 4, 16), "K": rand(3, 9, 16), "V": rand(3, 9, 24)}
    for call in (nsa.sel_attn_fwd_dense, nsa.sel_attn_fwd_dense_group):
        refuses(error, text, device, call, **(good | changes))


@pytest.mark.parametrize("case", VARLEN)
def test_varlen_rows(device, case):
    changes, error, text = VARLEN[case]
    good = {"Q": rand(3, 4, 16), "K_all": rand(9, 16), "V_all": rand(9, 24), "cu_seqlens": ints(4)}
    for call in (nsa.sel_attn_fwd_varlen, nsa.sel_attn_fwd_varlen_group):
        refuses(error, text, device, call, **(good | changes))


@pytest.mark.parametrize("leaf", [0, 1, 2], ids=["Q", "K", "V"])
def test_rows_have_no_gradient(device, leaf):
    rows = [x.to(device) for x in (rand(3, 4, 16), rand(3, 9, 16), rand(3, 9, 24))]
    rows[leaf].requires_grad_()
    text = "packed rows have no backward, and an input requires grad: use selection_attention"
    for call in (nsa.sel_attn_fwd_dense, nsa.sel_attn_fwd_dense_group):
        refuses(RuntimeError, text, device, call, *rows)
    with torch.no_grad():
        nsa.sel_attn_fwd_dense_group(*rows)


def test_rows_never_fall_back(device, monkeypatch, fresh_plans):
    monkeypatch.setattr("nsa.routing.why_not_triton", lambda device: f"Triton route needs a CUDA device, got {device}")
    Q, K, V = (x.to(device) for x in (rand(3, 4, 16), rand(3, 9, 16), rand(3, 9, 24)))
    for use in (True, False):
        with nsa.configure(use_triton_sel=use):
            text = "Triton route needs a CUDA device, got {device}"
            refuses(RuntimeError, text, device, nsa.sel_attn_fwd_dense, Q, K, V)


@pytest.mark.parametrize("entry", ["front-door", "dense", "dense_group"])
def test_interpreted_bf16_is_refused(entry):
    """It would compute nonsense, silently."""
    if not settings.interpreter():
        pytest.skip("on the GPU bf16 is computed right")
    Q, K, V = (x.bfloat16() for x in (rand(3, 4, 16), rand(3, 9, 16), rand(3, 9, 24)))
    text = "Triton's interpreter computes bfloat16 wrong"
    if entry == "front-door":
        call, Q, K, V = nsa.selection_attention, Q[:, None], K[:, :, None], V[:, :, None]
        keywords = {"ranges": ints(3, 1, 1, 1, 2), "backend": "triton"}
        refuses(RuntimeError, f"backend='triton': {text}", Q.device, call, Q, K, V, **keywords)
    else:
        refuses(RuntimeError, text, Q.device, getattr(nsa, f"sel_attn_fwd_{entry}"), Q, K, V)


ORIGINAL = {
    "Q-4d": ({"Q": rand(2, 3, 4, 16)}, ValueError, "Q: expected [B, S, HKV, G, D], got shape [2, 3, 4, 16]"),
    "K-3d": ({"K": rand(2, 20, 16)}, ValueError, "K: expected [B, HKV, S_kv, D], got shape [2, 20, 16]"),
    "V-5d": ({"V": rand(2, 2, 1, 20, 24)}, ValueError, "V: expected [B, HKV, S_kv, Dv], got shape [2, 2, 1, 20, 24]"),
    "Q-list": ({"Q": []}, TypeError, "Q: expected a torch.Tensor, got list"),
    "K-none": ({"K": None}, TypeError, "K: expected a torch.Tensor, got NoneType"),
    "K-heads": (
        {"K": rand(2, 4, 20, 16), "V": rand(2, 4, 20, 24)},
        ValueError,
        "K: expected [B, HKV, S_kv, D] = [2, 2, 20, 16], got [2, 4, 20, 16]",
    ),
    "V-keys": (
        {"V": rand(2, 2, 21, 24)},
        ValueError,
        "V: expected [B, HKV, S_kv, Dv] = [2, 2, 20, 24], got [2, 2, 21, 24]",
    ),
    "V-dtype": ({"V": rand(2, 2, 20, 24).half()}, TypeError, "V: expected dtype float32 (that of Q), got float16"),
    "ranges": (
        {"ranges": ints(2, 3, 4, 2)},
        ValueError,
        "ranges: expected [B, S, HKV, n, 2], got shape [2, 3, 4, 2]",
    ),
    "ranges-none": (
        {"ranges": None},
        ValueError,
        "selection: expected exactly one of ranges and block_indices, got neither",
    ),
    "bound": ({"max_selected": -2}, ValueError, "max_selected: expected an int >= 0, got -2"),
}


@pytest.mark.parametrize("case", ORIGINAL)
def test_original_layout(device, case):
    changes, error, text = ORIGINAL[case]
    good = {"Q": rand(2, 3, 2, 2, 16), "K": rand(2, 2, 20, 16), "V": rand(2, 2, 20, 24), "ranges": ints(2, 3, 2, 4, 2)}
    for call in (nsa.selection_attention_triton, nsa.grouped_selection_attention_packed):
        refuses(error, text, device, call, **(good | changes))


UTILITIES = {
    "merge-float": (
        lambda: nsa.merge_ranges(rand(3, 2)),
        ValueError,
        "ranges: expected int32 or int64 [..., n, 2], got torch.float32 [3, 2]",
    ),
    "merge-triples": (
        lambda: nsa.merge_ranges(ints(3, 3)),
        ValueError,
        "ranges: expected int32 or int64 [..., n, 2], got torch.int32 [3, 3]",
    ),
    "blocks-float": (
        lambda: nsa.ranges_from_blocks(rand(3), 4),
        TypeError,
        "block_indices: expected dtype int32, int64, got float32",
    ),
    "blocks-size": (
        lambda: nsa.ranges_from_blocks(ints(3), 0),
        ValueError,
        "block_size: expected an int >= 1, got 0",
    ),
    "blocks-list": (
        lambda: nsa.ranges_from_blocks([3], 4),
        TypeError,
        "block_indices: expected a torch.Tensor, got list",
    ),
    "blocks-size-float": (
        lambda: nsa.ranges_from_blocks(ints(3), 16.0),
        TypeError,
        "block_size: expected an int, got float",
    ),
    "blocks-size-bool": (
        lambda: nsa.ranges_from_blocks(ints(3), True),
        TypeError,
        "block_size: expected an int, got bool",
    ),
    "blocks-keys-negative": (
        lambda: nsa.ranges_from_blocks(ints(3), 4, -5),
        ValueError,
        "seqlen_k: expected an int >= 0, got -5",
    ),
    "blocks-keys-float": (
        lambda: nsa.ranges_from_blocks(ints(3), 4, 9.0),
        TypeError,
        "seqlen_k: expected an int, got float",
    ),
    "pack-4d": (
        lambda: nsa.pack_rows(rand(1, 9, 2, 16), rand(1, 9, 2, 16), ints(1, 2, 4, 2)),
        ValueError,
        "ranges: expected [B, S, HKV, n, 2], got shape [1, 2, 4, 2]",
    ),
    "pack-heads": (
        lambda: nsa.pack_rows(rand(1, 9, 2, 16), rand(1, 9, 2, 16), ints(1, 3, 4, 5, 2)),
        ValueError,
        "ranges: expected [B, S, HKV, n, 2] = [1, 3, 2, 5, 2], got [1, 3, 4, 5, 2]",
    ),
}
# The good call is k [2, 9, 2, 16], v [2, 9, 2, 24], ranges [2, 3, 2, 5, 2].
PACKING = {
    "k-list": ({"k": [1.0]}, TypeError, "k: expected a torch.Tensor, got list"),
    "v-none": ({"v": None}, TypeError, "v: expected a torch.Tensor, got NoneType"),
    "ranges-list": ({"ranges": [[0, 4]]}, TypeError, "ranges: expected a torch.Tensor, got list"),
    "k-3d": ({"k": rand(9, 2, 16)}, ValueError, "k: expected [B, S_kv, HKV, D], got shape [9, 2, 16]"),
    "v-3d": ({"v": rand(9, 2, 24)}, ValueError, "v: expected [B, S_kv, HKV, Dv], got shape [9, 2, 24]"),
    "v-heads": (
        {"v": rand(2, 9, 1, 24)},
        ValueError,
        "v: expected [B, S_kv, HKV, Dv] = [2, 9, 2, 24], got [2, 9, 1, 24]",
    ),
    "v-keys": (
        {"v": rand(2, 8, 2, 24)},
        ValueError,
        "v: expected [B, S_kv, HKV, Dv] = [2, 9, 2, 24], got [2, 8, 2, 24]",
    ),
    "v-batch": (
        {"v": rand(1, 9, 2, 24)},
        ValueError,
        "v: expected [B, S_kv, HKV, Dv] = [2, 9, 2, 24], got [1, 9, 2, 24]",
    ),
    "k-int": ({"k": ints(2, 9, 2, 16)}, TypeError, "k: expected dtype float16, bfloat16, float32, float64, got int32"),
    "v-dtype": ({"v": rand(2, 9, 2, 24).half()}, TypeError, "v: expected dtype float32 (that of k), got float16"),
    "v-device": ({"v": rand(2, 9, 2, 24).to(META)}, ValueError, "v: expected device {device} (that of k), got meta"),
    "ranges-batch": (
        {"ranges": ints(1, 3, 2, 5, 2)},
        ValueError,
        "ranges: expected [B, S, HKV, n, 2] = [2, 3, 2, 5, 2], got [1, 3, 2, 5, 2]",
    ),
    "ranges-triples": (
        {"ranges": ints(2, 3, 2, 5, 3)},
        ValueError,
        "ranges: expected [B, S, HKV, n, 2] = [2, 3, 2, 5, 2], got [2, 3, 2, 5, 3]",
    ),
    "ranges-float": ({"ranges": rand(2, 3, 2, 5, 2)}, TypeError, "ranges: expected dtype int32, int64, got float32"),
    "ranges-int16": (
        {"ranges": ints(2, 3, 2, 5, 2, dtype=torch.int16)},
        TypeError,
        "ranges: expected dtype int32, int64, got int16",
    ),
    "ranges-device": (
        {"ranges": ints(2, 3, 2, 5, 2).to(META)},
        ValueError,
        "ranges: expected device {device} (that of k), got meta",
    ),
    "bound-negative": ({"max_selected": -1}, ValueError, "max_selected: expected an int >= 0, got -1"),
    "bound-float": ({"max_selected": 4.0}, TypeError, "max_selected: expected an int, got float"),
}


@pytest.mark.parametrize("case", UTILITIES)
def test_span_utilities(device, case):
    call, error, text = UTILITIES[case]
    refuses(error, text, device, call)


@pytest.mark.parametrize("case", PACKING)
def test_packing(device, case):
    """Also what would be read from another head, or past the last key."""
    changes, error, text = PACKING[case]
    good = {"k": rand(2, 9, 2, 16), "v": rand(2, 9, 2, 24), "ranges": ints(2, 3, 2, 5, 2)}
    refuses(error, text, device, nsa.pack_rows, **(good | changes))
