"""Select and attend as three models do: MiniMax-M3, QSA and NSA, each a prompt and then a token at a time.

    python examples/selecting.py

A layer with random weights stands in for a model, and its numbers are small. `nsa.select_blocks` chooses the blocks
that `nsa.selection_attention` reads. Outputs are those of plain PyTorch, which computes all scores at once and masks
what was not chosen. Runs on a GPU, and on a CPU without Triton.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nsa

B, PROMPT, STEPS, WIDTH = 2, 90, 24, 64
HQ, HKV, D, PAGE = 8, 2, 16, 8


def heads(x: Tensor, f: nn.Linear, d: int = D) -> Tensor:
    return f(x).unflatten(-1, (-1, d))


class Layer(nn.Module):
    """Queries, keys and values; and what the blocks are scored by."""

    def __init__(self, index_heads: int, index_keys: int) -> None:
        super().__init__()
        sizes = (HQ * D, HKV * D, HKV * D, max(index_heads, 1) * D, max(index_keys, 1) * D)
        self.q, self.k, self.v, self.index_q, self.index_k = (nn.Linear(WIDTH, size, bias=False) for size in sizes)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return heads(x, self.q), heads(x, self.k), heads(x, self.v)


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Plain attention; ``seen [B, T, HKV or 1, S_kv]`` says which keys a query reads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = seen.expand(-1, -1, HKV, -1).repeat_interleave(HQ // HKV, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def chosen(scores: Tensor, forced: Tensor, n: int) -> Tensor:
    """The ``n`` best blocks as a mask. Blocks that may not be chosen have -inf."""
    scores = scores.masked_fill(forced, torch.inf)
    best = scores.topk(min(n, scores.shape[-1]), -1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)


def tokens_of(blocks: Tensor, size: int, T: int) -> Tensor:
    """A mask of blocks as a causal mask of keys, ``[B, T, lists, T]``."""
    keys = blocks.repeat_interleave(size, -1)[..., :T]
    return keys & torch.ones(T, T, dtype=torch.bool, device=blocks.device).tril()[:, None]


def blocks_of(x: Tensor, size: int) -> Tensor:
    """The last axis cut into blocks, the last one filled up by -inf."""
    return F.pad(x, (0, -x.shape[-1] % size), value=-torch.inf).unflatten(-1, (-1, size))


def own_block(T: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks ``[n]``, and the block of each query ``[T, 1, 1]``."""
    return torch.arange(-(-T // size), device=device), torch.arange(T, device=device)[:, None, None] // size


class M3(Layer):
    """MiniMax-M3: the largest product in a block, an index head for each KV head, one index key. Caches in pages."""

    SIZE, N = 8, 4

    def __init__(self) -> None:
        super().__init__(HKV, 1)
        self.how = {"score": "max", "n": self.N, "block_size": self.SIZE, "first": 1, "newest": 1}

    def served(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x[:, :PROMPT])
        index_q, index_k = heads(x, self.index_q), heads(x, self.index_k)
        blocks = nsa.select_blocks(index_q[:, :PROMPT], index_k[:, :PROMPT], **self.how)
        outputs = [nsa.selection_attention(q, k, v, block_indices=blocks, block_size=self.SIZE)]
        pages = -(-x.shape[1] // PAGE)
        table = torch.randperm(B * pages, device=x.device).view(B, pages).int()
        k, v, index_k = (in_pages(m, table) for m in (*self.qkv(x)[1:], index_k))  # as if appended step by step
        for t in range(PROMPT, x.shape[1]):
            where = {"cache_seqlens": t + 1, "block_table": table}
            blocks = nsa.select_blocks(index_q[:, t : t + 1], index_k, **self.how, **where)
            q = heads(x[:, t : t + 1], self.q)
            outputs.append(
                nsa.selection_attention_with_kvcache(q, k, v, **where, block_indices=blocks, block_size=self.SIZE)
            )
        return torch.cat(outputs, 1)

    def plain(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        s = torch.einsum("bthd,bsd->bths", heads(x, self.index_q), heads(x, self.index_k)[:, :, 0])
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()[:, None]
        scores = blocks_of(s.masked_fill(~causal, -torch.inf), self.SIZE).amax(-1)
        block, own = own_block(T, self.SIZE, x.device)
        blocks = chosen(scores, ((block == 0) | (block == own)).expand_as(scores), self.N)
        return masked(*self.qkv(x), tokens_of(blocks, self.SIZE, T))


def in_pages(x: Tensor, table: Tensor) -> Tensor:
    """``[B, T, H, D]`` as pages that lie where ``table`` says."""
    filled = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % PAGE)).unflatten(1, (-1, PAGE)).flatten(0, 1)
    pages = torch.empty_like(filled)
    pages[table.flatten().long()] = filled
    return pages


class QSA(Layer):
    """QSA: index keys are means of 4 tokens, ReLU, the sum over heads; one list for all KV heads, and the tail."""

    SIZE, N = 4, 6

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.how = {"score": "relu", "n": self.N, "block_size": 4, "window": 4, "stride": 4, "lists": 1, "tail": True}

    def served(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        index_q = heads(x, self.index_q)
        index_k = nsa.compress(heads(x, self.index_k), window=4, stride=4)  # a key is cached when its block has ended
        blocks = nsa.select_blocks(index_q[:, :PROMPT], index_k[:, : PROMPT // 4], **self.how)
        prompt = (m[:, :PROMPT] for m in (q, k, v))
        outputs = [nsa.selection_attention(*prompt, block_indices=blocks, block_size=self.SIZE)]
        for t in range(PROMPT, x.shape[1]):
            blocks = nsa.select_blocks(index_q[:, t : t + 1], index_k, **self.how, cache_seqlens=t + 1)
            outputs.append(
                nsa.selection_attention_with_kvcache(
                    q[:, t : t + 1], k, v, cache_seqlens=t + 1, block_indices=blocks, block_size=self.SIZE
                )
            )
        return torch.cat(outputs, 1)

    def plain(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        means = heads(x, self.index_k)[:, : T // 4 * 4, 0].unflatten(1, (-1, 4)).mean(2)
        scores = torch.einsum("bthd,bsd->bths", heads(x, self.index_q), means).relu().sum(2, keepdim=True)
        scores = F.pad(scores, (0, -(-T // 4) - T // 4), value=-torch.inf)
        block, own = own_block(T, 4, x.device)
        ended = (torch.arange(T, device=x.device)[:, None, None] + 1) // 4
        scores = scores.masked_fill(block >= ended, -torch.inf)
        blocks = chosen(scores, torch.zeros_like(scores, dtype=torch.bool), self.N)
        return masked(*self.qkv(x), tokens_of(blocks | ((block == own) & (block >= ended)), 4, T))


class NSA(Layer):
    """NSA: attention over compressed keys chooses blocks; its output, the selection's and a window's are gated."""

    SIZE, N, WINDOW, STRIDE, NEAR = 16, 4, 8, 4, 12

    def __init__(self) -> None:
        super().__init__(0, 0)
        self.of_k, self.of_v = (nn.Parameter(torch.randn(self.WINDOW, D, D) / (self.WINDOW * D) ** 0.5) for _ in "kv")
        self.gates = nn.Linear(WIDTH, 3)
        self.how = {
            "score": "softmax", "n": self.N, "block_size": self.SIZE, "window": self.WINDOW, "stride": self.STRIDE,
            "first": 1, "newest": 2,
        }  # fmt: skip

    def compressed(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compressed keys, attention over them of queries at positions ``at [S]``, and its LSE ``[B, S, HQ]``."""
        how = {"window": self.WINDOW, "stride": self.STRIDE}
        k, v = nsa.compress(k, **how, weight=self.of_k), nsa.compress(v, **how, weight=self.of_v)
        ends = torch.arange(k.shape[1], device=q.device) * self.STRIDE + self.WINDOW
        s = torch.einsum("bshgd,bnhd->bshgn", q.unflatten(2, (HKV, -1)), k) * D**-0.5
        s = s.masked_fill(ends > at[:, None, None, None] + 1, -torch.inf)
        lse = s.logsumexp(-1)
        p = torch.exp(s - lse[..., None]).nan_to_num(0.0)  # the first queries see no compressed key
        return k, torch.einsum("bshgn,bnhd->bshgd", p, v).flatten(2, 3), lse.flatten(2)

    def near(self, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """Attention over the newest ``NEAR`` keys."""
        far = at[:, None] - torch.arange(k.shape[1], device=q.device)
        return masked(q, k, v, ((far >= 0) & (far < self.NEAR))[None, :, None].expand(len(q), -1, -1, -1))

    def gated(self, x: Tensor, *branches: Tensor) -> Tensor:
        gates = self.gates(x).sigmoid().unbind(-1)
        return sum(g[..., None, None] * branch for g, branch in zip(gates, branches, strict=True))

    def served(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        outputs = []
        for begin, end in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, x.shape[1]))]:
            at = torch.arange(begin, end, device=x.device)
            mine, keys, values = q[:, begin:end], k[:, :end], v[:, :end]
            index_k, coarse, lse = self.compressed(mine, keys, values, at)
            blocks = nsa.select_blocks(mine, index_k, **self.how, lse=lse, q_positions=at.expand(B, -1))
            fine = nsa.selection_attention(mine, keys, values, block_indices=blocks, block_size=self.SIZE)
            outputs.append(self.gated(x[:, begin:end], coarse, fine, self.near(mine, keys, values, at)))
        return torch.cat(outputs, 1)

    def plain(self, x: Tensor) -> Tensor:
        T, (q, k, v) = x.shape[1], self.qkv(x)
        at = torch.arange(T, device=x.device)
        index_k, coarse, lse = self.compressed(q, k, v, at)
        s = torch.einsum("bshgd,bnhd->bshgn", q.unflatten(2, (HKV, -1)), index_k) * D**-0.5
        p = torch.exp(s - lse.unflatten(2, (HKV, -1))[..., None])
        begins = torch.arange(index_k.shape[1], device=x.device) * self.STRIDE
        p = p.masked_fill(begins + self.WINDOW > at[:, None, None, None] + 1, 0.0).sum(3)  # [B, T, HKV, keys]
        block, own = own_block(T, self.SIZE, x.device)
        first = block[:, None] * self.SIZE
        shared = torch.minimum(begins + self.WINDOW, first + self.SIZE) - torch.maximum(begins, first)
        scores = torch.einsum("bthn,mn->bthm", p, shared.clamp(min=0).to(p.dtype))
        scores = scores.masked_fill(block > own, -torch.inf)
        forced = (block == 0) | ((block <= own) & (block > own - 2))
        blocks = chosen(scores, forced.expand_as(scores), self.N)
        fine = masked(q, k, v, tokens_of(blocks, self.SIZE, T))
        return self.gated(x, coarse, fine, self.near(q, k, v, at))


@torch.no_grad()
def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    x = torch.randn(B, PROMPT + STEPS, WIDTH, device=device)
    for model in (M3, QSA, NSA):
        layer = model().to(device)
        off = (layer.served(x) - layer.plain(x)).abs().max()
        print(f"{model.__name__}: outputs of {PROMPT} and {STEPS} tokens are those of plain PyTorch within {off:.0e}")
        assert off < 1e-4


if __name__ == "__main__":
    main()
