"""A wrong kernel is named by what it does wrong, from its result alone; a right result and garbage are not.

The wrong kernels are written in plain Python, a row and a list of keys at a time: nothing of `diagnosis` is in them.
"""

import dataclasses
import functools
import math

import pytest
import torch

from nsa.testing.judge.diagnosis import diagnose
from nsa.testing.judge.forward import Oracle
from nsa.testing.matrix.case import Case
from nsa.testing.matrix.cases import small

DTYPES = ("fp32", "fp16")
SMALL = list(dict.fromkeys(dataclasses.replace(c, dtype=d) for c in small() for d in DTYPES))
LONG = [  # rows and spans of so different lengths that sizes of blocks can be told apart
    Case(1, 16, 16, L, N, dist, dtype, source=source, causal=False)
    for dtype in DTYPES for L, N, dist, source in [(400, 12, "few", "varlen"), (700, 6, "mixed", "ranges")]
]  # fmt: skip
LONG += [Case(2, 16, 16, 24, 12, "mixed", dtype, HKV=2, S=2, S_kv=40) for dtype in DTYPES]  # three batch entries
PROMPT = Case(2, 16, 16, 64, 400, "prefill", "fp32", HKV=2, S=100, S_kv=130, block_size=16)


pytestmark = pytest.mark.usefixtures("one_thread")


def same(x):
    return x


def kernel(
    p, *, limit=lambda own, total: own + 1, padding=None, lists=same, span=same, row=same, factor=1.0,
    heads=lambda h, HKV, G: (h // G, h // G), exp=None, pad=lambda n: 0, entry=None, sink=None, online=None,
):  # fmt: skip
    """`(O, LSE)` in the dtypes of a kernel. By default the right answer; each argument puts one thing wrong.

    `limit(own, total)`: first key that a query does not see. `padding`: the block that -1 stands for. `lists` changes a
    row's list of spans; `span` and `row` change a list of keys. `heads(h, HKV, G)`: the KV heads of the keys and of the
    values of a query head. `exp` computes weights of scores. `pad(n)`: how many keys of score and value 0 a row of `n`
    keys has beside them. `entry(i, n)`: the sequence or packed row, of `n`, whose keys and values entry `i` reads.
    `sink(h)`: one more score. `online`: `(keys of a tile, whether tiles begin with each span, what is not rescaled)`.
    """  # fmt: skip
    HKV, n = p.ranges.shape[-3:-1]
    HQ, D = p.q.shape[-2:]
    q, k, v = (x.double().reshape(-1, *x.shape[-2:]) for x in (p.q, p.k, p.v))
    G, scale = HQ // HKV, factor * D**-0.5
    sequences = [(p.q.shape[1], p.k.shape[1])] * p.q.shape[0]
    if p.cu_seqlens is not None:
        sequences = list(zip(*(x.diff().tolist() for x in p.cu_seqlens_pair), strict=True))
    own, first, total, begin = [], [], [], 0  # a query's position, and its sequence's first key and number of keys
    for queries, keys in sequences:
        own += range(keys - queries, keys)
        first += [begin] * queries
        total += [keys] * queries
        begin += keys
    if p.q_positions is not None:
        own = p.q_positions.flatten().tolist()
    tokens = len(own)
    shift = [0] * tokens if entry is None else shifts(p, sequences, entry)
    ranges = p.ranges.reshape(tokens, HKV, n, 2).tolist()
    blocks = None if p.block_indices is None else p.block_indices.reshape(tokens, HKV, n).tolist()
    out, lse = torch.zeros(tokens, HQ, p.case.Dv, dtype=torch.float64), torch.full((tokens, HQ), -math.inf).double()
    for t in range(tokens):
        end = min(max(limit(own[t], total[t]), 0), total[t]) if p.causal else total[t]
        for g in range(HKV):
            listed = ranges[t][g]
            if padding is not None:
                begins = [(padding if b < 0 else b) * p.block_size for b in blocks[t][g]]
                listed = [(begin, begin + p.block_size) for begin in begins]
            spans = [span(list(range(max(a, 0), min(b, end)))) for a, b in lists(listed)]
            keys = row(sum(spans, []))
            if not keys:
                continue
            index = (torch.tensor(keys) + first[t] + shift[t]).clamp(max=len(k) - 1)
            for h in range(g * G, g * G + G):
                of_k, of_v = heads(h, HKV, G)
                scores = k[index, of_k] @ q[t, h] * scale
                if exp is not None:
                    weights = exp(scores)
                    out[t, h] = weights @ v[index, of_v].to(weights.dtype) / weights.sum()
                    lse[t, h] = weights.sum().log()
                    continue
                if online is not None:
                    parts = [len(x) for x in spans] if online[1] else len(keys)
                    tiles = [x.split(online[0]) for x in torch.arange(len(keys)).split(parts)]
                    out[t, h], lse[t, h] = in_tiles(scores, v[index, of_v], sum(tiles, ()), online[2])
                    continue
                more = [] if sink is None else [sink(h)]
                scores = torch.cat((scores, scores.new_tensor(more + [0.0] * pad(len(keys)))))
                lse[t, h] = scores.logsumexp(0)
                out[t, h] = scores.softmax(0)[: len(keys)] @ v[index, of_v]
    return out.view(*p.q.shape[:-1], -1).to(p.q.dtype), lse.view(p.q.shape[:-1]).float()


def shifts(p, sequences, entry):
    """How many keys further on each token reads."""
    if p.case.source == "varlen":
        begins, member = p.ranges[0, :, 0, 0, 0].tolist(), range(p.q.shape[1])
    else:
        begins = p.cu_seqlens_pair[1].tolist()[:-1]
        member = [i for i, (queries, _) in enumerate(sequences) for _ in range(queries)]
    return [begins[entry(i, len(begins))] - begins[i] for i in member]


def in_tiles(scores, values, tiles, forgotten):
    """`(O, LSE)` of online softmax over these slots, one tile after the other."""
    m, total, acc = -math.inf, 0.0, 0.0
    for tile in (x for x in tiles if len(x)):
        largest = max(m, float(scores[tile].max()))
        weights, shrink = (scores[tile] - largest).exp(), math.exp(m - largest)
        total = total * (1 if "sum" in forgotten else shrink) + float(weights.sum())
        acc = acc * (1 if "accumulator" in forgotten else shrink) + weights @ values[tile]
        m = largest
    return acc / total, m + math.log(total)


def of_another(**fields):
    """The right answer of a problem with other fields."""
    return lambda p: kernel(dataclasses.replace(p, **fields))


def in_order(order):
    """The right answer with query heads `order(case)`."""

    def give(p):
        out, lse = kernel(p)
        return out[..., order(p.case), :], lse[..., order(p.case)]

    return give


def filled(value, *where):
    """The right answer, but for one value `where` in the output."""

    def give(p):
        out, lse = kernel(p)
        out[where] = value
        return out, lse

    return give


def reordered(order, *names):
    """The right answer of a problem some of whose tensors have batch entries in the order `order(B)`."""
    return lambda p: kernel(dataclasses.replace(p, **{name: getattr(p, name)[order(p.case.B)] for name in names}))


def one_sequence(p):
    tensors = {name: getattr(p, name) for name in ("q", "k", "v", "ranges", "block_indices")}
    return dataclasses.replace(
        p, **{name: None if x is None else x[None] for name, x in tensors.items()}, cu_seqlens=None, cu_seqlens_k=None,
    )  # fmt: skip


def first(B):
    return [0] * B


def turned(B):
    return [*range(1, B), 0]


def before_padding(spans):
    return spans[: next((i for i, (a, b) in enumerate(spans) if b <= a), len(spans))]


def batches(c):
    return c.B > 1 and not c.seqlens


def keys_differ(c):
    return c.seqlens and c.kv_seqlens


def many_heads(c):
    return c.HKV > 1


def blocks(c):
    return c.source == "blocks"


def padded_blocks(c):
    return blocks(c) and (c.dist == "overlap" or c.n * c.block_size > c.L)


def any_case(c):
    return True


def spans(c):
    return c.dist != "few"


def causal(c):
    return c.causal and (c.S > 1 or c.seqlens)


HEADS = "of another KV head: query head"
ORDER = "gives the answers of query heads in another order:"
BATCH = "of another batch entry: each reads those of"
# What a kernel gives, or the arguments of `kernel`; where that may show; what it is called.
FAULTS = {
    "last-key": ({"row": lambda x: x[:-1]}, any_case, "misses the last key of a row"),
    "first-key": ({"row": lambda x: x[1:]}, any_case, "misses the first key of a row"),
    "last-key-of-spans": ({"span": lambda x: x[:-1]}, spans, "misses the last key of each span"),
    "twice": ({"row": lambda x: list(dict.fromkeys(x))}, lambda c: c.dist == "overlap",
              "counts a key that is listed twice only once"),
    "one-key-early": ({"limit": lambda own, _: own}, causal, "ends the causal window one key early"),
    "one-key-late": ({"limit": lambda own, _: own + 2}, causal, "ends the causal window one key late"),
    "non-causal": ({"limit": lambda _, total: total}, causal, "reads keys beyond the causal limit"),
    "always-causal": (of_another(causal=True), lambda c: not c.causal and c.S > 1,
                      "hides keys ahead of the query although causal=False"),
    "q-positions": (of_another(q_positions=None), lambda c: c.positions and c.causal, "ignores q_positions"),
    "from-position-0": (
        lambda p: kernel(p, limit=lambda own, total: own + 1 - (total - p.case.S)),
        lambda c: causal(c) and not c.seqlens and not c.positions, "takes the first query for position 0",
    ),
    "padding": ({"padding": 0}, padded_blocks, "takes padding (-1) for block 0"),
    "padding-last": (lambda p: kernel(p, padding=(p.k.shape[1] - 1) // p.block_size),
                     lambda c: padded_blocks(c) and not c.seqlens, "takes padding (-1) for the last block"),
    "stops-at-padding": ({"lists": before_padding}, lambda c: blocks(c) and c.dist == "overlap",
                         "stops at the first padding (-1) of a row"),
    "stops-at-an-empty-span": (
        {"lists": before_padding}, lambda c: c.source == "ranges" and c.dist == "mixed" and c.N > 4,
        "stops at the first empty span of a row",
    ),
    "last-slot": ({"lists": lambda x: x[:-1]}, blocks, "leaves out the last slot of a row's list of blocks"),
    "inclusive": ({"lists": lambda spans: [(a, b + 1) if a < b else (a, b) for a, b in spans]},
                  lambda c: c.source in ("ranges", "blocks"), "reads one key more at the end of each span"),
    "blocks-of-64": (lambda p: kernel(dataclasses.replace(p, block_size=64).choosing(p.block_indices)),
                     lambda c: blocks(c) and c.block_size == 48, "takes blocks of 48 keys for blocks of 64"),
    "one-tile-of-a-block": ({"span": lambda keys: keys[:64]}, lambda c: blocks(c) and c.block_size == 128,
                            "reads only the first 64 keys of each span"),
    "two-slots": ({"lists": lambda x: x[:2]}, lambda c: blocks(c) and c.n > 3,
                  "reads only the first 2 slots of a row's list of blocks"),
    "four-spans": ({"lists": lambda x: x[:4]}, lambda c: c.source == "ranges" and c.dist in ("mixed", "many"),
                   "reads only the first 4 slots of a row's list of spans"),
    "scale-2%": ({"factor": 1.02}, any_case, "scales scores by 1.02 times what was asked"),
    "scale-3.7": ({"factor": 3.7}, any_case, "scales scores by 3.7 times what was asked"),
    "no-scale": (lambda p: kernel(p, factor=p.case.D**0.5), any_case, "does not divide scores by sqrt(D)"),
    "scale-1/D": (lambda p: kernel(p, factor=p.case.D**-0.5), any_case, "divides scores by D, not by sqrt(D)"),
    "scale-of-Dv": (lambda p: kernel(p, factor=(p.case.D / p.case.Dv) ** 0.5), lambda c: c.D != c.Dv,
                    "divides scores by sqrt(Dv), not by sqrt(D)"),
    "scale-of-padded-D": (lambda p: kernel(p, factor=(p.case.D / 128) ** 0.5), lambda c: 64 < c.D < 128,
                          "rounds D up to a power of two in the scale"),
    "scale-of-64": (lambda p: kernel(p, factor=(p.case.D / 64) ** 0.5), lambda c: c.D not in (16, 64),
                    "divides scores by sqrt(64) for any D"),
    "log2e": ({"factor": math.log2(math.e)}, any_case, "multiplies scores by log2(e) once too often"),
    "no-log2e": ({"factor": math.log(2)}, any_case, "forgets the factor log2(e) of scores that go to exp2"),
    "exp": ({"exp": lambda s: s.float().exp()}, lambda c: c.scores > 1,
            "does not subtract the maximum: the output is not finite, or 0, where exp overflows"),
    "h-modulo-HKV": ({"heads": lambda h, HKV, G: (h % HKV, h % HKV)}, many_heads,
                     f"reads the keys and values {HEADS} h reads KV head h % HKV, not h // G"),
    "KV-head-0": ({"heads": lambda h, HKV, G: (0, 0)}, many_heads,
                  "reads the keys and values of another KV head: every query head reads KV head 0"),
    "values": ({"heads": lambda h, HKV, G: (h // G, (h // G + 1) % HKV)}, many_heads,
               f"reads the values {HEADS} 0 reads KV head 1, not 0"),
    "keys": ({"heads": lambda h, HKV, G: ((h // G + 1) % HKV, h // G)}, many_heads,
             f"reads the keys {HEADS} 0 reads KV head 1, not 0"),
    "heads-reversed": (in_order(lambda c: list(range(c.HQ))[::-1]), lambda c: c.HQ == 4,
                       f"{ORDER} head 0 holds 3, 1 holds 2, 2 holds 1, ..."),
    "heads-transposed": (in_order(lambda c: [h % c.HKV * c.H + h // c.HKV for h in range(c.HQ)]),
                         lambda c: c.HKV > 1 and c.H > 1, f"{ORDER} [G, HKV] instead of [HKV, G]"),
    "head-0": (in_order(lambda c: [0] * c.HQ), lambda c: c.HQ > 1 and c.HKV == 1, f"{ORDER} every head holds 0"),
    "columns-zero": (filled(0.0, ..., slice(12, None)), any_case, "leaves output columns from 12 on zero"),
    "columns-NaN": (filled(math.nan, ..., slice(12, None)), any_case, "leaves output columns from 12 on NaN"),
    "columns-wrong": (filled(3.0, ..., slice(12, None)), any_case, "is right except for output columns from 12 on"),
    "last-head": (filled(0.0, ..., slice(2, None), slice(None)), lambda c: c.HQ > 2,
                  "leaves query heads from 2 on zero"),
    "last-queries": (filled(math.nan, slice(1, None)), lambda c: c.source == "rows" and batches(c),
                     "leaves queries from 1 on NaN"),
    "last-sequences": (filled(math.nan, slice(1, None)), lambda c: c.source in ("ranges", "blocks") and batches(c),
                       "leaves sequences from 1 on NaN"),
    "last-queries-of-one": (filled(math.nan, slice(None), slice(2, None)),
                            lambda c: c.B == 1 and c.S > 2 and c.source in ("ranges", "blocks") and not c.seqlens,
                            "leaves queries from 2 on NaN"),
    "nothing": (filled(0.0, ...), any_case, "leaves the whole output zero"),
    "batch-0": (reordered(first, "k", "v"), batches, f"reads the keys and values {BATCH} the first"),
    "next-batch": (reordered(turned, "k", "v"), lambda c: batches(c) and c.B > 2,
                   f"reads the keys and values {BATCH} the next"),
    "batch-mirrored": (
        reordered(lambda B: list(range(B))[::-1], "q", "k", "v", "ranges"),
        lambda c: batches(c) and c.B > 2 and c.source == "ranges", f"reads everything {BATCH} its mirror image",
    ),
    "keys-of-batch-0": (reordered(first, "k"), batches, f"reads the keys {BATCH} the first"),
    "values-of-batch-0": (reordered(first, "v"), batches, f"reads the values {BATCH} the first"),
    "queries-of-batch-0": (reordered(first, "q"), batches, f"reads the queries {BATCH} the first"),
    "selection-of-batch-0": (reordered(first, "ranges"), lambda c: batches(c) and c.source == "ranges",
                             f"reads the selection {BATCH} the first"),
    "sequence-0": ({"entry": lambda i, n: 0}, lambda c: c.seqlens,
                   "reads the keys and values of another sequence: each reads those of the first"),
    "next-sequence": ({"entry": lambda i, n: (i + 1) % n}, keys_differ,
                      "reads the keys and values of another sequence: each reads those of the next"),
    "packed-row-0": ({"entry": lambda i, n: 0}, lambda c: c.source == "varlen",
                     "reads the keys and values of another packed row: each reads those of the first"),
    "cu_seqlens-of-queries": (of_another(cu_seqlens_k=None), keys_differ,
                              "takes cu_seqlens of the queries for those of the keys"),
    "place-among-all": (
        lambda p: kernel(dataclasses.replace(p, q_positions=torch.arange(len(p.q)))),
        lambda c: c.seqlens and c.causal, "takes a query's place among all packed queries for its position",
    ),
    "one-sequence": (lambda p: tuple(x[0] for x in kernel(one_sequence(p))), lambda c: c.seqlens,
                     "takes packed sequences for one sequence"),
    "sink": ({"sink": lambda h: 0.0}, any_case, "adds a sink to the softmax: one more score, 0"),
    "learned-sink": ({"sink": lambda h: math.cos(h) + 1}, lambda c: c.B * c.S > 1 and c.scores == 1,
                     "adds a sink to the softmax: one more score, learned by each query head"),
}  # fmt: skip
for size, forgotten, each, of in (
    (16, "accumulator", False, "a row"), (32, "accumulator", True, "each span"), (64, "accumulator", False, "a row"),
    (16, "sum of weights", False, "a row"), (16, "accumulator and its sum of weights", True, "each span"),
):  # fmt: skip
    FAULTS[f"not-rescaled-{size}-{forgotten}"] = (
        {"online": (size, each, forgotten)},
        lambda c, size=size, each=each: c.L > size and (spans(c) or not each),
        f"does not rescale its {forgotten} when the running maximum grows (tiles of {size} keys of {of})",
    )
APART = ("does not rescale", "adds a sink", "another batch entry", "another sequence", "another packed row")
"""Words of mistakes that are named only where they were made."""
for size in (16, 32, 64, 128):

    def whole(keys, size=size):
        return keys[: len(keys) // size * size]

    drops = f"drops the last partial block of {size} keys of"
    FAULTS[f"partial-block-{size}"] = ({"row": whole}, lambda c: c.L != 1, f"{drops} a row")
    FAULTS[f"partial-block-of-spans-{size}"] = ({"span": whole}, spans, f"{drops} each span")
    text = f"counts empty slots of the last block of {size} keys as keys of score 0"
    FAULTS[f"empty-slots-{size}"] = ({"pad": lambda n, size=size: -n % size}, any_case, text)


@functools.cache
def oracle_of(c):
    return Oracle.of(c.make("cpu"))


def red(result, oracle):
    """Wrong by far more than the bound: what is at the bound may be told apart or not."""
    out = result[0].double() - oracle.out
    lse = (result[1].double() - oracle.lse).masked_fill(oracle.lse == result[1], 0.0)
    return not float(out.abs().amax()) <= 3 * oracle.bound or not float(lse.abs().amax()) <= 3 * oracle.lse_atol


def cases(dtype, where, count):
    """Of the small cases and the long ones, some in which a fault may show. Rows of one key show no scale.

    The dtypes take turns: each gets other small cases.
    """
    found = [c for c in SMALL if c.dtype == dtype and where(c) and c.L > 1 and c.N * c.H < 100]
    found = [c for c in found if c.N * c.H * c.L < 10_000]
    step = max(1, len(found) // count)
    return found[DTYPES.index(dtype) * step // 2 :: step] + [c for c in LONG if c.dtype == dtype and where(c)]


def test_a_sink_is_not_taken_for_a_scale():
    """Where weights change little, scores times 0.997 fit the outputs, too. Nor the other way round."""
    oracle = oracle_of(Case(1, 64, 64, 128, 12, "mixed", "fp16", S_kv=128, causal=False))
    for how, text in (({"sink": lambda h: 0.0}, FAULTS["sink"][2]), ({"factor": 0.98}, "scales scores by 0.98 times")):
        out, lse = kernel(oracle.problem, **how)
        assert red((out, lse), oracle)
        for result in (out, (out, lse)):
            [found] = diagnose(result, oracle)
            assert found.startswith(text)


def test_a_rounded_query_is_named():
    """A scale that is no power of two costs a bit of every score, which large scores show."""
    case = Case(2, 32, 32, 48, 6, "overlap", "fp16", HKV=2, S=3, S_kv=80, scores=64)
    oracle = oracle_of(case)
    p, scale = oracle.problem, case.D**-0.5
    out, lse = kernel(p.with_tensors((p.q.float() * scale).half().double() / scale, p.k, p.v))
    result = out.half(), lse
    assert red(result, oracle)
    assert "rounds the scaled query to the dtype of its input" in diagnose(result, oracle)
    assert diagnose(tuple(kernel(p)), oracle) == []


@pytest.mark.parametrize(("first", "text"), [(3, "sequences from 2"), (4, "queries from 4")])
def test_where_sequences_begin_is_known(first, text):
    """The second sequence is empty."""
    case = Case(2, 32, 32, 64, 5, "prefill", "fp16", block_size=16, seqlens=(3, 0, 2), kv_seqlens=(70, 70, 70))
    oracle = oracle_of(case)
    result = filled(math.nan, slice(first, None))(oracle.problem)
    assert diagnose(result, oracle) == [f"leaves {text} on NaN"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_named(fault, dtype):
    give, where, text = FAULTS[fault]
    shown, first, alone = 0, 0, False
    for c in cases(dtype, where, 3 if "padding" in fault else 2):  # few cases have padding that shows
        oracle = oracle_of(c)
        result = kernel(oracle.problem, **give) if isinstance(give, dict) else give(oracle.problem)
        if red(result, oracle):
            shown += 1
            found = diagnose(result, oracle)
            assert text in found, f"{c.id}: {found}"
            assert not [x for x in found for word in APART if word in x and word not in text], f"{c.id}: {found}"
            assert not [x for x in found if x.startswith("is right except")] or text.startswith("is right except")
            first += found[0] == text
            if shown == 1:  # in one case: a diagnosis tries every mistake that is known
                assert diagnose(result, oracle, ["nothing of the kind", text]) == [text]
            if not alone and not red((oracle.out, result[1]), oracle):
                alone = True
                assert text in diagnose(result[0], oracle)
    assert shown, "the fault shows in none of these cases"
    assert first, "it is never what is named first"
