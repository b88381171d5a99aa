"""Tiles and windows of the backward kernels: pure functions of what the host knows of a call. Imports no Triton."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nsa.kernels.key_major.tiles import MOST_COUNT_BYTES, DoesNotFit, even, heads_at_once
from nsa.kernels.query_major.tiles import SHARED_BYTES, next_power_of_2

DQ_BYTES = 1280 << 20
"""What a window's tokens keep of dQ: a part for each of a row's blocks. The longer a window, the less often dK and dV
are read and written; half as much costs an H100 3 of 32 ms at 64/4 and 65,536 tokens."""

HEAD_BYTES = 48 << 20
"""Queries and gradients of one KV head in a window, as :data:`key_tiles.HEAD_BYTES`."""

SUM_BYTES = 256 << 20
"""Partial sums of dK and dV of blocks that several programs share."""

INDEX_BYTES = 56 << 20
"""Lists of a window's units."""

STRIP_BYTES = 64 << 20
"""Counters of blocks, one for each strip of tokens."""

STRIP = 16
"""Tokens of a strip at least: a program counts them one after the other."""

STRIPS = 2048
"""Of all heads, where strips may be longer: each has counters of all blocks, and more programs do not count faster."""

MOST_PARTS_G = 16
"""Heads of a group up to which dQ is taken from key blocks, as are dK and dV. Above, the parts are too many, and
reading keys again for every query costs less."""


class Choice(NamedTuple):
    """What a sweep varies."""

    rows: int  # query rows of a tile
    warps: int
    stages: int
    share: int  # tiles of rows that a program takes of its block
    keep_dq: bool  # dQ comes from key blocks, where a block is one tile
    BLOCK_L: int  # keys of a tile of the query-major dQ
    dq_warps: int
    dq_stages: int


forced: Choice | None = None
"""What a sweep wants launched next."""

# Swept on an H100 with G of 1 to 64; docs/notebook/backward.md has what lost.
HOPPER_FEW = Choice(32, 4, 2, 64, True, 32, 1, 2)  # G below 4
HOPPER_SMALL = Choice(32, 4, 2, 128, True, 32, 1, 2)
HOPPER_LARGE = Choice(32, 4, 2, 128, False, 64, 4, 2)
# Not measured: chosen by registers and shared memory, as the compile matrix has them.
SMALL = Choice(64, 8, 2, 32, True, 32, 1, 2)
LARGE = Choice(64, 8, 2, 32, False, 32, 4, 2)
WIDE_HEADS = Choice(32, 8, 1, 32, False, 16, 4, 1)  # D or Dv above 128
FP32 = Choice(16, 4, 1, 32, False, 16, 4, 1)  # fp32: dots run on the CUDA cores


class Tile(NamedTuple):
    """Compile-time choices of the kernels; ``share`` in units."""

    HEADS: int  # query heads of a unit in a tile
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int  # keys of a tile
    warps: int
    stages: int
    share: int
    keep_dq: bool
    dq_heads: int  # of a program that walks a row's keys
    BLOCK_G: int  # those, padded for dot products
    BLOCK_L: int
    dq_warps: int
    dq_stages: int


@lru_cache(maxsize=4096)
def select(
    capability: int,
    itemsize: int,
    G: int,
    D: int,
    Dv: int,
    size: int,
    spans: bool,
    choice: Choice | None = None,
    pipelines: bool = True,
) -> Tile:
    """Tile of a call whose blocks hold ``size`` keys; ``capability`` and ``itemsize`` as for :func:`tiles.select`.

    Args:
        pipelines: whether this Triton can load a tile ahead here.
    """
    block_d, block_dv = max(16, next_power_of_2(D)), max(16, next_power_of_2(Dv))
    narrow = max(block_d, block_dv) <= 128
    chosen = choice or _rule(capability, itemsize, G, narrow)
    budget = SHARED_BYTES.get(capability, min(SHARED_BYTES.values()))
    rows, block_n = chosen.rows, min(max(16, next_power_of_2(size)), 64 if narrow and itemsize == 2 else 32)
    if itemsize > 2 and not narrow:
        block_n = 16
    # Keys and values stay; queries, their gradients and the weights of both pass through.
    width = block_d + block_dv
    while rows + block_n > 32 and itemsize * (
        (block_n + rows * chosen.stages) * width + 2 * rows * block_n
    ) > budget:  # fmt: skip
        rows, block_n = (rows // 2, block_n) if rows >= block_n else (rows, block_n // 2)
    heads = next_power_of_2(G)
    in_tile = min(heads, rows)
    dq_heads = min(heads, 64 if narrow else 16)
    stages = chosen.stages if pipelines else 1
    # Without a pipeline dO and dS lie at one address, and ptxas for sm_90 may lose it (`aot_child.mixed`).
    lost = capability == 90 and itemsize == 2 and stages == 1
    return Tile(
        in_tile, block_d, block_dv, rows, block_n, chosen.warps, stages, chosen.share * (rows // in_tile),
        chosen.keep_dq and not spans and size <= block_n and not lost, dq_heads, max(16, dq_heads), chosen.BLOCK_L,
        chosen.dq_warps if dq_heads <= 16 else 4, chosen.dq_stages,
    )  # fmt: skip


def _rule(capability: int, itemsize: int, G: int, narrow: bool) -> Choice:
    if itemsize > 2 or not narrow:
        return FP32 if itemsize > 2 else WIDE_HEADS
    if capability == 90:
        return HOPPER_FEW if G < 4 else HOPPER_SMALL if G <= MOST_PARTS_G else HOPPER_LARGE
    return SMALL if G <= MOST_PARTS_G else LARGE


class Windows(NamedTuple):
    """How a call's tokens are dealt with: in windows of which lists and partial results are kept."""

    slots: int  # units a row may have
    slot_bits: int
    blocks: int  # of all sequences
    heads: int  # KV heads that go through at once
    window: int  # tokens
    work: int  # shares of one head at most
    several: int  # of those, shares of blocks that have more than one
    strip: int  # tokens that a program counts


def windows(
    tokens: int,
    HKV: int,
    G: int,
    D: int,
    Dv: int,
    itemsize: int,
    slots: int,
    blocks: int,
    size: int,
    share: int,
    keep_dq: bool,
    spans: bool,
) -> Windows:
    """Windows whose lists and partial results stay within what the constants above allow.

    Raises:
        ValueError: what one token needs is more than that.
    """
    slots = max(slots, 1)
    bits = max(slots - 1, 1).bit_length()
    index = slots * (16 if spans else 12)  # of one head of a token, as the next two
    dq = slots * G * D * itemsize if keep_dq else 0
    sums = 2 * slots * size * (D + Dv) * 4  # of a share of units

    def most(heads: int) -> int:
        longest = min(INDEX_BYTES // (heads * index), (1 << 31 - bits) - 1, max(tokens, 1))
        longest = min(longest, max(1, SUM_BYTES * share // (heads * sums)))
        return min(longest, DQ_BYTES // (heads * dq)) if dq else longest

    if most(1) == 0:
        raise DoesNotFit(
            f"backward: expected the lists of a row to fit {INDEX_BYTES} bytes, and its parts of dQ {DQ_BYTES}, got "
            f"{index} and {dq} bytes of {slots} blocks{'; max_selected bounds them' if spans else ''}"
        )
    heads = heads_at_once(HKV, tokens, most, HEAD_BYTES // (G * (D + Dv) * itemsize))
    window = even(tokens, most(heads)) if most(heads) < tokens else tokens
    strip = STRIP
    while strip < window and -(-window // strip) * heads > min(STRIPS, STRIP_BYTES // (4 * max(blocks, 1))):
        strip *= 2
    counted = -(-window // strip) * heads * blocks * 4
    if counted > MOST_COUNT_BYTES:
        raise DoesNotFit(
            f"backward: expected counters of blocks to fit {MOST_COUNT_BYTES} bytes, got {counted} bytes of "
            f"{blocks} blocks and {heads} KV heads"
        )
    units = window * slots
    work = -(-units // share) + min(blocks, units)
    return Windows(slots, bits, blocks, heads, window, work, max(1, 2 * units // share), strip)


def workspace_bytes(w: Windows, G: int, D: int, Dv: int, itemsize: int, size: int, keep_dq: bool) -> int:
    """What a call allocates beside its results and the fp32 sums of dK and dV."""
    row = w.heads * w.slots
    dq = w.window * row * G * D * itemsize if keep_dq else 0
    sums = w.heads * w.several * size * (D + Dv) * 4
    counters = (-(-w.window // w.strip) + 3) * w.heads * w.blocks * 4
    return dq + sums + w.window * row * 16 + counters + 12 * w.heads * w.work
