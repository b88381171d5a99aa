"""Rows of a table in which any two values of different axes meet, for axes that do not all act on each other."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from nsa.testing.plugin import current_lane


def all_pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of the axes' values, in which every two values of different axes occur together."""
    rows = list(itertools.product(*(range(len(list(axis))) for axis in axes)))
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))  # the first of several
        missing -= pairs[best]
        chosen.append(rows[best])
    return [tuple(axis[i] for axis, i in zip(map(list, axes), row, strict=True)) for row in sorted(chosen)]


def in_pairs(*axes: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    """Parameters for pytest: `all_pairs` where Triton is interpreted, all combinations on a GPU.

    An axis maps the words of an id to values; values of another axis are their own words.
    """
    named = [list((axis if isinstance(axis, Mapping) else {str(x): x for x in axis}).items()) for axis in axes]
    rows = itertools.product(*named) if current_lane() == "gpu" else all_pairs(*named)
    return [pytest.param(*(x for _, x in row), id="-".join(word for word, _ in row)) for row in rows]
