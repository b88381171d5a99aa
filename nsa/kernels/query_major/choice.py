"""What a sweep of query-major varies, and where it measured: the content of the section `tiles` of a GPU's file."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """What a sweep varies, a table holds and a pin says. `tiles.py` chooses one for each call."""

    splits: int  # parts into which the keys of a row are split
    head_tiles: int  # programs among which a group of query heads is divided
    BLOCK_L: int
    num_warps: int
    num_stages: int
    cluster: int = 1  # 1: programs that share a row merge as a cluster where the GPU can; 0: a second kernel merges


class Point(NamedTuple):
    """A measured shape in one bucket of a table."""

    G: int
    rows: int
    L: int
