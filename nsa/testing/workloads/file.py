"""Reads a workload: a YAML file of shapes with weights, and the source that they come from.

    source: where the shapes come from
    common: {HQ: 64, HKV: 4, D: 128, block_size: 128, blocks: 16, pages: true}
    variants:                     # optional: all shapes with these words, one variant after the other
      random: {shared: 0}
      e4m3: {shared: 0.9, fp8: true}
    shapes:
    - {queries: 171, keys: 55339, weight: 1325}
    - {queries: [163, 162], keys: [86544, 83618], weight: 156}

A shape's words precede those of its variant, which precede those of `common`. `WORDS` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from nsa.call import Call
from nsa.testing.matrix.case import DTYPES, Case
from nsa.testing.matrix.m3 import Shape
from nsa.validate import check

FOLDER = Path(__file__).parent
LARGEST = 2**31
NAME = re.compile(r"[\w.-]+")
TOP = ("source", "common", "variants", "shapes")


class Word(NamedTuple):
    """A word of a shape: what is expected, whether a value is that, and the default. `...`: no default."""

    expected: str
    valid: Callable[[Any], bool]
    default: Any = ...


def _whole(x: Any) -> bool:
    return type(x) is int and 0 < x <= LARGEST


def _lengths(x: Any) -> bool:
    return _whole(x) or (isinstance(x, list) and bool(x) and all(map(_whole, x)))


def _flag(x: Any) -> bool:
    return type(x) is bool


def _number(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x <= LARGEST


COUNT = Word("a whole number from 1 to 2^31", _whole)
LENGTHS = Word("a whole number from 1 to 2^31, or a list of them", _lengths)
WORDS = {
    "queries": LENGTHS, "keys": LENGTHS._replace(default=None), "batch": COUNT._replace(default=1),
    "HQ": COUNT, "HKV": COUNT, "D": COUNT, "Dv": COUNT._replace(default=None), "block_size": COUNT,
    "blocks": Word("a whole number from 2 to 2^31", lambda x: _whole(x) and x > 1),
    "shared": Word("a number from 0 to 1", lambda x: _number(x) and x <= 1, 0),
    "dtype": Word("bf16 or fp16", lambda x: x in ("bf16", "fp16"), "bf16"),
    "pages": Word("true or false", _flag, False), "fp8": Word("true or false", _flag, False),
    "weight": Word("a number from 0 to 2^31", _number, 1),
    "name": Word("letters, digits, - and .", lambda x: isinstance(x, str) and bool(NAME.fullmatch(x)), ""),
}  # fmt: skip
"""queries, keys: of each of `batch` sequences; lists: of each sequence. Without `keys`, as many as queries. blocks: of
`block_size` keys, that each query selects. shared: the share of them that a query has in common with the query before
it. pages: keys lie in pages of a block. fp8: the cache is in e4m3."""


class Entry(NamedTuple):
    """A shape of a workload, with its name and weight. variant: empty if the file has no variants."""

    name: str
    variant: str
    weight: float
    shape: Shape

    @property
    def id(self) -> str:
        """Variant and name, as a test id."""
        return "-".join(filter(None, (self.variant, self.name)))


def find(text: str) -> Path:
    """The file of `--nsa-workload NAME|PATH`. Raises ValueError naming those that ship."""
    shipped = FOLDER / f"{text}.yaml"
    if shipped.is_file():
        return shipped
    if Path(text).is_file():
        return Path(text)
    names = ", ".join(sorted(path.stem for path in FOLDER.glob("*.yaml")))
    raise ValueError(f"--nsa-workload {text!r}: expected {names}, or the path of a file")


def read(path: Path) -> list[Entry]:
    """The shapes of a workload, variant by variant.

    Raises:
        ValueError: a word is unknown or missing, a value is wrong, or no kernel serves a shape. The error names the
            file, the line, what was expected and what was given.
    """
    try:
        top = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: expected YAML: nested too deep") from error
    given = _mapping(path, top, TOP, "a key of a workload")
    for name in ("source", "shapes"):
        if name not in given:
            raise ValueError(f"{path}, line 1: {name}: expected it, got none")
    shapes = given["shapes"]
    source = _value(path, given["source"])
    if not isinstance(source, str) or not source.strip():
        raise _wrong(path, given["source"], "source", "text that says where the shapes come from", source)
    if not isinstance(shapes, yaml.SequenceNode) or not shapes.value:
        raise _wrong(path, shapes, "shapes", "a list of shapes", _value(path, shapes))
    common = _words(path, given["common"]) if "common" in given else {}
    variants: dict[str, Any] = {"": {}}
    if "variants" in given:
        named = _mapping(path, given["variants"], None, "")
        wrong = next((name for name in named if not NAME.fullmatch(name)), None)
        if wrong is not None or not named:
            raise _wrong(path, given["variants"], "variants", "names of letters, digits, - and .", wrong)
        variants = {name: _words(path, node) for name, node in named.items()}
    own = [(node, _words(path, node)) for node in shapes.value]
    all_words = [(node, name, common | words | mine) for name, words in variants.items() for node, mine in own]
    entries = [_entry(path, *one) for one in all_words]
    seen: dict[str, Entry] = {}
    for (node, *_), entry in zip(all_words, entries, strict=True):
        if entry.id in seen:
            raise _wrong(path, node, "name", "shapes of different names", entry.name)
        seen[entry.id] = entry
    return entries


Words = dict[str, tuple[Any, yaml.Node]]  # values, and where they stand


def _mapping(path: Path, node: Any, known: Any, what: str) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(path, node, "content", "a mapping", _value(path, node))
    values: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else repr(_value(path, key))
        if known is not None and name not in known:
            raise _wrong(path, key, name, f"{what}: {', '.join(known)}", name)
        if name in values:
            raise _wrong(path, key, name, "each key once", "it again")
        values[name] = value
    return values


def _words(path: Path, node: Any) -> Words:
    words: Words = {}
    for name, at in _mapping(path, node, WORDS, "a word of a shape").items():
        value = _value(path, at)
        if not WORDS[name].valid(value):
            raise _wrong(path, at, name, WORDS[name].expected, value)
        words[name] = value, at
    return words


def _value(path: Path, node: Any) -> Any:
    if node is None:
        return None
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # A date such as 2026-02-31, a list that is part of itself, or a tag of another text, such as `!!bool x`.
        text = f"{path}, line {node.start_mark.line + 1}: expected a valid value: {' '.join(str(error).split())}"
        raise ValueError(text) from error


def _wrong(path: Path, node: Any, name: str, expected: str, got: object) -> ValueError:
    line = 1 if node is None else node.start_mark.line + 1
    return ValueError(f"{path}, line {line}: {name}: expected {expected}, got {got!r}")


def _entry(path: Path, node: Any, variant: str, words: Words) -> Entry:
    for name, word in WORDS.items():
        if word.default is ... and name not in words:
            raise _wrong(path, node, name, word.expected, None)
    w: dict[str, Any] = {name: words[name][0] if name in words else word.default for name, word in WORDS.items()}
    queries, keys = w["queries"], w["keys"] or w["queries"]
    several = isinstance(queries, list)
    if several != isinstance(keys, list) or several and (len(queries) != len(keys) or w["batch"] != 1):
        raise _wrong(path, node, "keys", "as many numbers as queries, without batch", keys)
    seqlens, kv_seqlens = (queries, keys) if several else ([queries], [keys])
    if w["HQ"] % w["HKV"]:
        raise _wrong(path, node, "HQ", f"a multiple of HKV = {w['HKV']}", w["HQ"])
    if any(S > S_kv for S, S_kv in zip(seqlens, kv_seqlens, strict=True)):
        raise _wrong(path, node, "keys", "at least as many as queries", keys)
    if w["fp8"] and not w["pages"]:
        raise _wrong(path, node, "fp8", "false without pages", True)
    tokens, D, size, n = sum(seqlens) * w["batch"], w["D"], w["block_size"], w["blocks"]
    sequences: dict[str, Any] = {"S": queries, "S_kv": keys}
    if several:
        sequences = {"seqlens": tuple(queries), "kv_seqlens": tuple(keys)}
    steps = max(seqlens) == 1
    case = Case(
        w["HQ"] // w["HKV"], D, w["Dv"] or D, n * size, tokens * w["HKV"], "decode" if steps else "prefill", w["dtype"],
        HKV=w["HKV"], block_size=size, n=n, shared=0.0 if steps else w["shared"], **sequences,
    )  # fmt: skip
    shape = Shape(case, w["fp8"], w["pages"])
    try:
        check(_call(shape))
    except (ValueError, TypeError, RuntimeError) as error:  # RuntimeError: no tensor is that large
        raise _wrong(path, node, "shape", "one that a kernel serves", str(error)) from error
    name = w["name"] or f"B{case.B}-T{tokens}-K{max(kv_seqlens)}"
    return Entry(name, variant, float(w["weight"]), shape)


def _call(shape: Shape) -> Call:
    """The call of a shape, on tensors without memory."""
    case, dtype = shape.case, DTYPES[shape.case.dtype]

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    q, blocks = empty(*case.lead, case.HQ, case.D, dtype=dtype), empty(*case.lead, case.HKV, case.n)
    keys = (sum(case.kv_seqlens),) if case.seqlens else (case.B, case.S_kv)
    k, v = (empty(*keys, case.HKV, d, dtype=dtype) for d in (case.D, case.Dv))
    cu = empty(case.B + 1) if case.seqlens else None
    return Call.of(q, k, v, block_indices=blocks, block_size=case.block_size, cu_seqlens=cu)
