"""Rows of a table in which any two values of different axes meet, for axes that do not all act on each other."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from nsa.testing.plugin import current_lane

Row = TypeVar("Row")


def covering(rows: Sequence[Row], pairs: Callable[[Row], Iterable[Hashable]]) -> list[Row]:
    """Few of the rows, in their order, that have all pairs of all rows."""
    having = [set(pairs(row)) for row in rows]
    missing, chosen = set().union(*having), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(having[i] & missing))  # the first of several
        missing -= having[best]
        chosen.append(best)
    return [rows[i] for i in sorted(chosen)]


def all_pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of the axes' values, in which every two values of different axes occur together."""
    axes = tuple(map(list, axes))
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = covering(rows, lambda row: itertools.combinations(enumerate(row), 2))
    return [tuple(axis[i] for axis, i in zip(axes, row, strict=True)) for row in chosen]


def in_pairs(*axes: Mapping[str, Any] | Iterable[Any], full: bool = current_lane() == "gpu") -> list[Any]:
    """Parameters for pytest: `all_pairs` where Triton is interpreted, by default all combinations on a GPU.

    An axis maps the words of an id to values; values of another axis are their own words.
    """
    named = [list((axis if isinstance(axis, Mapping) else {str(x): x for x in axis}).items()) for axis in axes]
    rows = itertools.product(*named) if full else all_pairs(*named)
    return [pytest.param(*(x for _, x in row), id="-".join(word for word, _ in row)) for row in rows]
