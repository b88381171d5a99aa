"""Which sequence a token belongs to, how many keys that sequence has, and which of them the token may see."""

import triton
import triton.language as tl

# LAYOUT: how a row finds its sequence. BATCH: [B, S_kv, ...]. VARLEN: cu_seqlens over tokens. PACKED: row i is sequence
# i. CACHE: as BATCH, but only the first keys of each sequence are filled, and keys may lie in pages. RAGGED: queries as
# in VARLEN, keys as in CACHE.
BATCH = tl.constexpr(0)

VARLEN = tl.constexpr(1)

PACKED = tl.constexpr(2)

CACHE = tl.constexpr(3)

RAGGED = tl.constexpr(4)


@triton.jit
def find_sequence(cu_seqlens_ptr, B, token, CHUNK: tl.constexpr):
    """Index of the sequence that holds ``token``, ``B`` if none: the number of sequences that end at or before it."""
    seq = tl.full([], 0, tl.int32)
    for first in range(0, B, CHUNK):
        j = first + tl.arange(0, CHUNK)  # [CHUNK]
        ends = tl.load(cu_seqlens_ptr + 1 + j, mask=j < B, other=2147483647)
        seq += tl.sum((ends <= token).to(tl.int32), 0)
    return seq


@triton.jit
def find_without_loop(cu_seqlens_ptr, B, token, CHUNK: tl.constexpr):
    """As :func:`find_sequence`, for at most ``CHUNK * CHUNK`` sequences. If there are more than ``CHUNK``, the ends
    must be in rising order; otherwise the result may be any sequence, or ``B``.

    From version 3.7 on, Triton does not pipeline the keys of some tiles if a loop or a branch comes before them.
    """
    i = tl.arange(0, CHUNK)  # [CHUNK]
    step = tl.cdiv(B, CHUNK)  # look at every step-th end, then at those in between; with step = 1 there are none
    last = (i + 1) * step
    ends = tl.load(cu_seqlens_ptr + last, mask=last <= B, other=2147483647)
    seq = (tl.sum((ends <= token).to(tl.int32), 0) * step).to(tl.int32)
    ends = tl.load(cu_seqlens_ptr + 1 + seq + i, mask=(i + 1 < step) & (seq + i < B), other=2147483647)
    return seq + tl.sum((ends <= token).to(tl.int32), 0)


@triton.jit
def last_query(cu_q_ptr, seq, known):
    """One past the last query of a sequence, clamped to ``[0, 2^31 - 1]``."""
    end = tl.load(cu_q_ptr + seq + 1, mask=known, other=0)
    return tl.minimum(tl.maximum(end, 0), 2147483647).to(tl.int32)


@triton.jit
def sequence_keys(seq, B, S_kv, cu_k_ptr):
    """``(first key, number of keys)`` of a sequence of a packed batch. A sequence from ``B`` on has no keys."""
    known = seq < B
    k_first = tl.load(cu_k_ptr + seq, mask=known, other=0).to(tl.int64)
    k_last = tl.load(cu_k_ptr + seq + 1, mask=known, other=0).to(tl.int64)
    k_first = tl.minimum(tl.maximum(k_first, 0), S_kv)
    k_last = tl.minimum(tl.maximum(k_last, k_first), S_kv)
    return k_first, (k_last - k_first).to(tl.int32)


@triton.jit
def filled_keys(seq, S_kv, cache_seqlens_ptr):
    """Filled keys of a sequence in a cache that has room for ``S_kv``."""
    return tl.minimum(tl.maximum(tl.load(cache_seqlens_ptr + seq), 0), S_kv).to(tl.int32)


@triton.jit
def sequence_of_cache(cu_q_ptr, cache_seqlens_ptr, B, token):
    """``(seq, filled, behind)`` of one token of a ragged batch: its sequence, the sequence's length as it is in memory,
    and how many queries the sequence has from the token on: 1 for the last query, less for a token after it.

    A token after the last sequence gets a length of 0, and the last sequence, so that its row of a page table exists.
    Without sequences ``seq`` is 0.
    """
    seq = find_without_loop(cu_q_ptr, B, token, 128)
    known = seq < B
    filled = tl.load(cache_seqlens_ptr + seq, mask=known, other=0)
    end = last_query(cu_q_ptr, seq, known)
    return tl.maximum(tl.minimum(seq, B - 1), 0), filled, end - token


@triton.jit
def find_step(cu_q_ptr, B, tokens, place, STEPS: tl.constexpr):
    """Token of query ``place // B`` of sequence ``place % B`` of a ragged batch. -1: the sequence has no such query, or
    more than ``STEPS`` queries.
    """
    seq = place % B
    begin = tl.load(cu_q_ptr + seq, mask=seq > 0, other=0)
    end = tl.load(cu_q_ptr + seq + 1)
    begin = tl.minimum(tl.maximum(begin, 0), tokens).to(tl.int32)
    end = tl.minimum(tl.maximum(end, 0), tokens).to(tl.int32)
    token = begin + place // B
    found = (token < end) & (end - begin <= STEPS)
    # If ends are not in rising order, several sequences claim a token. It belongs to the one that all kernels find.
    found &= find_without_loop(cu_q_ptr, B, token, 128) == seq
    return tl.where(found, token, -1)


@triton.jit
def sequence_of(token, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT: tl.constexpr):
    """``(seq, k_first, seqlen_k, shift)`` of one token: its sequence, the sequence's first key and number of keys.

    ``token + shift`` is the token's position in its sequence.
    """
    if LAYOUT == BATCH or LAYOUT == CACHE:
        seq = token // S
        k_first = tl.zeros([], tl.int64)
        seqlen_k = S_kv
        if LAYOUT == CACHE:
            seqlen_k = filled_keys(seq, S_kv, cu_k_ptr)
        shift = seqlen_k - (seq + 1) * S
    elif LAYOUT == RAGGED:
        seq, filled, behind = sequence_of_cache(cu_q_ptr, cu_k_ptr, B, token)
        k_first = tl.zeros([], tl.int64)
        seqlen_k = tl.minimum(tl.maximum(filled, 0), S_kv).to(tl.int32)
        shift = seqlen_k - behind - token
    else:
        seq = find_sequence(cu_q_ptr, B, token, 128)
        k_first, seqlen_k = sequence_keys(seq, B, S_kv, cu_k_ptr)
        shift = (seqlen_k - tl.load(cu_q_ptr + seq + 1, mask=seq < B, other=0)).to(tl.int32)
    return seq, k_first, seqlen_k, shift


@triton.jit
def causal_end(position, end, token, pos_ptr, origin=0):
    """The causal rule: a query may read the keys before ``end``, up to its own position. Returns where they end.

    ``pos_ptr`` holds positions of tokens, of any value, which replace ``position``; or it is None. Keys and
    ``position`` count from ``origin``. The result may be negative for a query without keys. Query-major cuts the spans
    of a row there (``spans.clamp_span``), so it masks no scores by position. The other families compare keys with it.
    """
    if pos_ptr is not None:
        position = tl.maximum(tl.minimum(tl.load(pos_ptr + token), origin + end - 1), -1).to(tl.int32) - origin
    return tl.minimum(position + 1, end)


@triton.jit
def causal_limit(token, shift, seqlen_k, pos_ptr, CAUSAL: tl.constexpr):
    """How many of its sequence's ``seqlen_k`` keys a token, or each of several, may read."""
    limit = seqlen_k
    if CAUSAL:
        limit = tl.maximum(causal_end(token + shift, seqlen_k, token, pos_ptr), 0)
    return limit


@triton.jit
def visible_keys(token, B, S, S_kv, pos_ptr, cu_q_ptr, cu_k_ptr, LAYOUT: tl.constexpr, CAUSAL: tl.constexpr):
    """``(seq, k_first, limit)`` of one token: its sequence, the sequence's first key, how many keys it may read."""
    seq, k_first, seqlen_k, shift = sequence_of(token, B, S, S_kv, cu_q_ptr, cu_k_ptr, LAYOUT)
    return seq, k_first, causal_limit(token, shift, seqlen_k, pos_ptr, CAUSAL)
