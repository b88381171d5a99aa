"""What callers who know another library are told: our word for their argument, our layout for their tensor."""

import inspect

import pytest
import torch

import nsa
from nsa.hints import WORDS

B, S, KEYS, HKV, HQ, D, N = 2, 6, 32, 2, 4, 16, 3
DOOR, CACHE = nsa.selection_attention, nsa.selection_attention_with_kvcache
FUNCTIONS = {"selection_attention": DOOR, "selection_attention_with_kvcache": CACHE}


def rand(*shape):
    return torch.zeros(shape)


def blocks(*lead):
    return {"block_indices": torch.zeros(*lead, N, dtype=torch.int32), "block_size": 16}


def spans(*lead):
    return {"ranges": torch.zeros(*lead, N, 2, dtype=torch.int32)}


def good(name):
    lengths = {"cache_seqlens": torch.full((B,), KEYS)} if name.endswith("kvcache") else {}
    return (rand(B, S, HQ, D), rand(B, KEYS, HKV, D), rand(B, KEYS, HKV, D)), lengths | blocks(B, S, HKV)


# --- keywords ---------------------------------------------------------------------------------------------------------

SAYS = {
    "softmax_scale": "calls it scale",
    "is_causal": "calls it causal",
    "attn_mask": "ranges or block_indices",
    "block_counts": "pad block_indices with -1",
    "cu_seqlens_q": "takes cu_seqlens=(cu_seqlens_q, cu_seqlens_k)",
    "cu_seqlens_k": "takes cu_seqlens=(cu_seqlens_q, cu_seqlens_k)",
    "max_seqlen_q": "max_selected",
    "window_size": "selection branch only",
    "g_cmp": "selection branch only",
    "g_slc": "multiply the output",
    "dropout_p": "leave the argument out",
    "enable_gqa": "leave the argument out",
}


FOREIGN = [(n, word) for n, f in FUNCTIONS.items() for word in WORDS if word not in inspect.signature(f).parameters]


@pytest.mark.parametrize(("name", "word"), FOREIGN)
def test_words_of_other_libraries(name, word):
    args, keywords = good(name)
    with pytest.raises(TypeError) as raised:
        FUNCTIONS[name](*args, **keywords, typo=1, **{word: None})
    assert str(raised.value) == f"{name}() got an unexpected keyword argument '{word}': {WORDS[word]}"
    assert SAYS.get(word, "") in str(raised.value)


def test_words_are_not_our_own():
    """A word that we take would never be refused: `k` and `v` are arguments of one of the functions only."""
    ours = {word for word in WORDS if word in inspect.signature(DOOR).parameters}
    assert ours == {"k", "v"}
    assert set(WORDS) & set(inspect.signature(CACHE).parameters) == {"cu_seqlens_q", "max_seqlen_q"}  # not the other's


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_unknown_words_are_refused_as_python_does(name):
    def twin(q):
        return q

    args, keywords = good(name)
    with pytest.raises(TypeError) as of_python:
        twin(1, nothing_like_it=1)
    with pytest.raises(TypeError) as raised:
        FUNCTIONS[name](*args, **keywords, nothing_like_it=1)
    assert str(raised.value) == str(of_python.value).replace(twin.__qualname__, name)
    with pytest.raises(TypeError, match="'block_indexes'. Did you mean 'block_indices'"):
        FUNCTIONS[name](*args, **keywords, block_indexes=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        FUNCTIONS[name](*args[:2], **keywords)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_show_no_more_than_our_words(name):
    function = FUNCTIONS[name]
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert inspect.getfullargspec(function).varkw is None
    assert set(function.__annotations__) - {"return"} == set(inspect.signature(function).parameters)
    assert inspect.isfunction(function)  # not an object of ours, and no wrapper
    assert not hasattr(function, "__wrapped__")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks", "fullgraph"])
def test_compiled_calls_say_the_same(name, fullgraph):
    args, keywords = good(name)
    torch._dynamo.reset()
    function = torch.compile(
        lambda *a: FUNCTIONS[name](*a, **keywords, softmax_scale=1.0), backend="eager", fullgraph=fullgraph
    )
    with pytest.raises((TypeError, RuntimeError), match="softmax_scale") as raised:
        function(*args)
    assert fullgraph or (type(raised.value) is TypeError and "nsa calls it scale" in str(raised.value))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_calls_compile_without_a_break(name):
    args, keywords = good(name)
    torch._dynamo.reset()
    function = torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True)
    assert function(*args, **keywords).shape == (B, S, HQ, D)


# --- layouts ----------------------------------------------------------------------------------------------------------

OF_SDPA = "look like [B, H, S, D]: nsa takes [B, S, H, D], call transpose(1, 2)"
BLOCKS = "block_indices looks like [B, HKV, S, n]: nsa takes [B, S, HKV, n], call transpose(1, 2)"
RANGES = "ranges looks like [B, HKV, S, n, 2]: nsa takes [B, S, HKV, n, 2], call transpose(1, 2)"
# q [B, …, D], k and v [B, …, D], the selection, and how the error ends.
SWAPPED = {
    "all-but-blocks": ((HQ, S), (HKV, KEYS), blocks(B, S, HKV), f"; q, k and v {OF_SDPA}"),
    "all-but-ranges": ((HQ, S), (HKV, KEYS), spans(B, S, HKV), f"; q, k and v {OF_SDPA}"),
    "all": ((HQ, S), (HKV, KEYS), blocks(B, HKV, S), f"; q, k, v and block_indices {OF_SDPA}"),
    "decode": ((HQ, 1), (HKV, KEYS), blocks(B, 1, HKV), f"; q, k and v {OF_SDPA}"),
    "heads-divide": ((HQ, KEYS), (HKV, KEYS), blocks(B, KEYS, HKV), f"; q, k and v {OF_SDPA}"),
    "selection": ((S, HQ), (KEYS, HKV), blocks(B, HKV, S), f"; {BLOCKS}"),
    "selection-of-ranges": ((S, HQ), (KEYS, HKV), spans(B, HKV, S), f"; {RANGES}"),
    "either": ((HQ, S), (HQ, S), blocks(B, S, HQ), f"; q, k and v {OF_SDPA}, or {BLOCKS}"),
}
# Wrong calls that no transposition makes right.
OTHERWISE = {
    "heads": ((S, 5), (KEYS, HKV), blocks(B, S, HKV)),
    "heads-of-the-selection": ((S, HQ), (KEYS, HKV), blocks(B, S, HQ)),
    "queries-of-the-selection": ((S, HQ), (KEYS, HKV), blocks(B, 1, HKV)),
    "batch-of-the-selection": ((HQ, S), (HKV, KEYS), blocks(B + 1, S, HKV)),
    "triples": ((4, 4), (4, 4), {"ranges": torch.zeros(B, 4, 4, N, 3, dtype=torch.int32)}),
    "no-selection": ((HQ, S), (HKV, KEYS), {}),
    "swapped-and-other-queries": ((HQ, S), (HKV, KEYS), blocks(B, S + 1, HKV)),
    "swapped-and-other-heads": ((5, S), (HKV, KEYS), blocks(B, S, HKV)),
    "swapped-and-a-large-group": ((258, S), (HKV, KEYS), blocks(B, S, HKV)),
}


def refusal(q, keys, selection, name="selection_attention", device="cpu", **keywords):
    args = rand(B, *q, D).to(device), rand(B, *keys, D).to(device), rand(B, *keys, D).to(device)
    selection = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in selection.items()}
    if name.endswith("kvcache"):
        keywords["cache_seqlens"] = torch.ones(B, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="expected") as raised:
        FUNCTIONS[name](*args, **selection, **keywords)
    return str(raised.value)


@pytest.mark.parametrize("case", SWAPPED)
def test_heads_before_positions(attend, device, case):
    """In a cache, too, whose tensors have names of their own."""
    q, keys, selection, ends = SWAPPED[case]
    text = refusal(q, keys, selection, device=device, **attend.keywords)
    assert text.startswith(("heads: expected", "block_indices: expected", "ranges: expected"))
    assert text.partition("; ")[2] == ends[2:]
    ends = ends.replace("k and v", "k_cache and v_cache").replace("k, v", "k_cache, v_cache")
    text = refusal(q, keys, selection, "selection_attention_with_kvcache", device, **attend.keywords)
    assert text.partition("; ")[2] == ends[2:]


@pytest.mark.parametrize("case", OTHERWISE)
def test_other_shapes_have_no_hint(attend, device, case):
    assert "transpose" not in refusal(*OTHERWISE[case], device=device, **attend.keywords)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_shapes_that_fit_either_way_are_served(attend, device, heads):
    """With as many positions as heads, both layouts have these shapes, and no hint is made."""
    picked = torch.zeros(B, heads, heads, N, dtype=torch.int32, device=device)
    q, k = rand(B, heads, heads, D).to(device), rand(B, heads, heads, D).to(device)
    assert nsa.selection_attention(q, k, k, block_indices=picked, block_size=16, **attend.keywords).shape == q.shape


PACKED = {
    "q": ({"q": rand(1, S, HQ, D)}, "[T, HQ, D]"),
    "k": ({"k": rand(1, KEYS, HKV, D)}, "[T_kv, HKV, D]"),
    "v": ({"v": rand(1, KEYS, HKV, D)}, "[T_kv, HKV, Dv]"),
    "blocks": (blocks(1, S, HKV), "[T, HKV, n]"),
    "ranges": (spans(1, S, HKV) | {"block_indices": None, "block_size": None}, "[T, HKV, n, 2]"),
    "as-fla": (
        {"q": rand(1, S, HQ, D), "k": rand(1, KEYS, HKV, D), "v": rand(1, KEYS, HKV, D)} | blocks(1, S, HKV),
        "[T, HQ, D]",
    ),
}


def varlen(device, **changes):
    right = {"q": rand(S, HQ, D), "k": rand(KEYS, HKV, D), "v": rand(KEYS, HKV, D), "cu_seqlens": torch.zeros(2).int()}
    call = right | blocks(S, HKV) | changes
    return nsa.selection_attention(**{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in call.items()})


@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences_with_a_batch_of_one(device, case):
    changes, layout = PACKED[case]
    with pytest.raises(ValueError, match="expected") as raised:
        varlen(device, **changes)
    assert str(raised.value).endswith(f"; nsa takes packed sequences as {layout}: call squeeze(0)")
    squeezed = {n: x.squeeze(0) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
    assert varlen(device, **squeezed).shape == (S, HQ, D)


def test_packed_sequences_with_a_batch_have_no_hint(device):
    for q in (rand(2, S, HQ, D), rand(1, 1, S, HQ, D), rand(HQ, D)):
        with pytest.raises(ValueError, match="expected") as raised:
            varlen(device, q=q)
        assert "squeeze" not in str(raised.value)
