"""The Triton kernel that finds the ``n`` best blocks of a row, exactly, and writes them in rising order.

It searches the score of the ``n``-th best block by bisection over integers that are in the order of the scores, so that
ties are exact and go to the smaller block.
"""

import triton
import triton.language as tl

from nsa.selecting.reading import RUNTIME, SOFTMAX, find, keys_seen, position_of, sequence, tokens_of

NEVER = tl.constexpr(-2147483648)  # a block that may not be chosen
ALWAYS = tl.constexpr(2147483647)  # a forced block


@triton.jit
def _ordered(score):
    """int32 in the order of fp32 ``score``. NaN counts as -inf, and -0 as 0. Never `NEVER` or `ALWAYS`."""
    score = tl.where(score == score, score, float("-inf")) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _nth_best(key, older, count, missing, TWO: tl.constexpr):
    """``(worst, tied)``: all keys of the ``missing`` best are ``worst`` or better; tied: so are some more.

    Searches ``key`` and, if TWO, ``older``, where `NEVER` stands for none. count: how many of them are not `NEVER`.
    """
    low = tl.min(tl.where(key == NEVER, ALWAYS, key), 0)
    high = tl.max(key, 0)
    if TWO:
        low = tl.minimum(low, tl.min(tl.where(older == NEVER, ALWAYS, older), 0))
        high = tl.maximum(high, tl.max(older, 0))
    some = (missing > 0) & (count > missing)  # neither none nor all
    low = tl.where(some, low, tl.where(missing > 0, NEVER + 1, ALWAYS))
    high = tl.where(some, high, low)
    # At least `missing` keys are `low` or better; fewer are better than `high`.
    found = missing + some.to(tl.int32)
    while (low < high) & (found != missing):
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        better = tl.sum((key >= middle).to(tl.int32), 0)
        if TWO:
            better += tl.sum((older >= middle).to(tl.int32), 0)
        enough = better >= missing
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        found = tl.where(enough, better, found)
    return low, found != missing


@triton.jit
def _both(begin, end, low, high):
    """How many numbers are in both ranges."""
    return tl.maximum(tl.minimum(end, high) - tl.maximum(begin, low), 0)


@triton.jit(do_not_specialize=RUNTIME)
def _choose_kernel(
    score_ptr, out_ptr, kept_ptr, pos_ptr, cu_q_ptr, cu_k_ptr,
    B, S, rows, end, lists, tile0, run, width, n, first, newest,
    SCORE: tl.constexpr, LAYOUT: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, SIZE: tl.constexpr,
    TAIL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Write the chosen blocks of one row, ``out [tokens, lists, n + TAIL]``, in rising order, then -1.

    CHUNKED: the row is read in chunks of ``BLOCK`` blocks. The best ``n`` so far are in ``out``, and their keys in
    ``kept [rows of the pass, lists, n]``. KEPT is ``n``, padded.
    """
    BLOCK_TOKENS: tl.constexpr = SIZE * STRIDE
    place = tl.program_id(0) // lists
    number = tl.program_id(0) % lists
    token0, token1 = tokens_of(tile0 + place // TOKENS, run, TOKENS)
    token = token0 + place % TOKENS
    if token >= tl.minimum(token1, end):
        return
    seq = find(token, B, S, cu_q_ptr, LAYOUT)
    _, keys, tokens, shift = sequence(seq, B, S, rows, cu_q_ptr, cu_k_ptr, STRIDE, WINDOW, LAYOUT)
    position = position_of(token, token < end, shift, tokens, pos_ptr)
    seen = tl.minimum(keys_seen(position, STRIDE, WINDOW), keys)
    blocks = (position + BLOCK_TOKENS) // BLOCK_TOKENS  # up to the query's own one
    if SCORE == SOFTMAX:
        scored = tl.where(seen > 0, ((seen - 1) * STRIDE + WINDOW - 1) // BLOCK_TOKENS + 1, 0)
    else:
        scored = tl.cdiv(seen, SIZE)
    chosen_from = (position + 1) // BLOCK_TOKENS if TAIL else blocks
    scored = tl.minimum(scored, chosen_from)
    width = width // 16 * 16  # as it is already, but so the compiler knows it, and threads load four scores at a time
    scores = score_ptr + (place.to(tl.int64) * lists + number) * width
    slots = n + TAIL
    out = out_ptr + (token.to(tl.int64) * lists + number) * slots
    kept = kept_ptr
    if CHUNKED:
        kept += (place.to(tl.int64) * lists + number) * n
    i = tl.arange(0, BLOCK)
    j = tl.arange(0, KEPT)
    count = 0
    stop = chosen_from if CHUNKED else 1
    # Blocks before `free` and from `forced` on are chosen, and of those from `free` to `scored` the best.
    free = tl.minimum(first, chosen_from)
    forced = tl.maximum(chosen_from - newest, free)
    scored = tl.minimum(scored, forced)
    for begin in range(0, stop, BLOCK):
        block = begin + i
        score = tl.load(scores + block, mask=block < width, other=float("-inf"))
        key = tl.where((block >= free) & (block < scored), _ordered(score), NEVER)
        sure = (block < free) | ((block >= forced) & (block < chosen_from))
        candidates = _both(begin, begin + BLOCK, free, scored)
        missing = n - _both(begin, begin + BLOCK, 0, free) - _both(begin, begin + BLOCK, forced, chosen_from)
        older = tl.full([KEPT], NEVER, tl.int32)
        if CHUNKED:
            older = tl.load(kept + j, mask=j < count, other=NEVER)
            older_block = tl.load(out + j, mask=j < count, other=-1)
            tl.debug_barrier()  # all is read before any is written
            older_sure = older == ALWAYS
            forced_before = tl.sum(older_sure.to(tl.int32), 0)
            candidates += count - forced_before
            missing -= forced_before
            older = tl.where(older_sure, NEVER, older)
        worst, tied = _nth_best(key, older, candidates, missing, CHUNKED)
        take = key >= worst
        older_take = older >= worst
        if tied:  # of the blocks as good as the worst, the smallest
            need = missing - tl.sum((key > worst).to(tl.int32), 0)
            if CHUNKED:
                need -= tl.sum((older > worst).to(tl.int32), 0)
                equal = (older == worst).to(tl.int32)
                older_take = (older > worst) | ((equal > 0) & (tl.cumsum(equal, 0) <= need))
                need -= tl.sum(equal, 0)
            equal = (key == worst).to(tl.int32)
            take = (key > worst) | ((equal > 0) & (tl.cumsum(equal, 0) <= need))
        take = take | sure
        written = 0
        if CHUNKED:
            older_take = older_take | older_sure
            chosen = older_take.to(tl.int32)
            rank = tl.cumsum(chosen, 0) - chosen
            tl.store(kept + rank, tl.where(older_sure, ALWAYS, older), mask=older_take)
            tl.store(out + rank, older_block, mask=older_take)
            written = tl.sum(chosen, 0)
        chosen = take.to(tl.int32)
        rank = written + tl.cumsum(chosen, 0) - chosen
        tl.store(out + rank, block, mask=take)
        if CHUNKED:
            tl.store(kept + rank, tl.where(sure, ALWAYS, key), mask=take)
            tl.debug_barrier()
        count = written + tl.sum(chosen, 0)
    padding = tl.full([KEPT], -1, tl.int32)
    if TAIL:
        open_block = blocks > chosen_from
        tl.store(out + count, chosen_from, mask=open_block)
        count += open_block.to(tl.int32)
        tl.store(out + n, -1, mask=count <= n)
    tl.store(out + j, padding, mask=(j >= count) & (j < n))
