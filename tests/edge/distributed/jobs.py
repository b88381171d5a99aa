"""What the processes of `ranks.py` run. A job gets its rank, its group and keywords, and returns NumPy arrays."""

import importlib.util
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import nsa
from nsa import backward, dispatch
from nsa.distributed import agreement, passes, selection_attention
from nsa.distributed.shards import Layout
from nsa.testing.clock import sharded as measured


def draw(shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(S=24, S_kv=None, B=1, HKV=3, G=2, D=16, Dv=32, n=3, size=4, cu=None, ranges=False, lists=None, scores=1.0):
    """``(q, k, v, do, dlse), selection`` of the whole; packed if ``cu`` is a pair of cumulative lengths.

    lists: of a query, if not one for each KV head.
    """
    S_kv = S if S_kv is None else S_kv
    batch = () if cu else (B,)
    shapes = [(*batch, length, heads, dim) for length, heads, dim in
              ((S, HKV * G, D), (S_kv, HKV, D), (S_kv, HKV, Dv), (S, HKV * G, Dv))]  # fmt: skip
    tensors = [draw(shape, seed) for seed, shape in enumerate(shapes)]
    blocks = torch.randint(
        -1, -(-S_kv // size), (*batch, S, lists or HKV, n), generator=torch.Generator().manual_seed(9)
    )
    selection = {"block_indices": blocks, "block_size": size}
    if ranges:
        selection = {"ranges": nsa.ranges_from_blocks(blocks, size), "max_selected": n * size}
    if cu:
        selection["cu_seqlens"] = tuple(torch.tensor(x, dtype=torch.int32) for x in cu)
    return [*tensors, draw(shapes[0][:-1], 5)], selection


def gradients(attend, q, k, v, do, dlse, **selection):
    """``(O, LSE, dQ, dK, dV)``; the gradient also flows from LSE, where it is finite."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = attend(*leaves, **selection, return_lse=True)
    seen = lse.detach().isfinite()
    return o.detach(), lse.detach(), *torch.autograd.grad((o, lse), leaves, (do, torch.where(seen, dlse, 0)))


def arrays(tensors):
    return [x.numpy() for x in tensors]


def shards(rank, tensors, selection, queries, keys, order):
    """The rank's tensors and selection, and where they lie."""
    at, at_k = (Layout(order, lengths).positions(rank, torch.device("cpu")).long() for lengths in (queries, keys))
    axis = tensors[0].dim() - 3
    q, k, v, do, dlse = tensors
    q, do, dlse = (x.index_select(axis, at) for x in (q, do, dlse))
    k, v = (x.index_select(axis, at_k) for x in (k, v))
    local = {
        name: x.index_select(axis, at) if name in ("ranges", "block_indices") else x for name, x in selection.items()
    }
    return [q, k, v, do, dlse], local, at, at_k


def plain(rank, group, options, **shape):
    """One process."""
    tensors, selection = problem(**shape)
    return arrays(gradients(nsa.selection_attention, *tensors, **selection, **options))


def sharded(rank, group, options, queries, keys, order, more, **shape):
    """The rank's results of two equal runs, and which of the whole they are."""
    tensors, selection = problem(**shape)
    mine, local, at, at_k = shards(rank, tensors, selection, queries, keys, order)
    runs = [
        gradients(selection_attention, *mine, **local, **options, **more, mesh=group, order=order) for _ in range(2)
    ]
    equal = all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    return *arrays(runs[0]), at.numpy(), at_k.numpy(), equal


def call(rank, group, change):
    """A call of two ranks, which ``change`` makes wrong. Returns the error's text, and how long the call took."""
    tensors, selection = problem()
    mine, local, *_ = shards(rank, tensors, selection, (12, 12), (12, 12), "contiguous")
    keywords = {"backend": "reference", **local, "mesh": group}
    if change == "local positions":
        keywords["block_indices"] = torch.arange(12)[None, :, None, None].expand(1, 12, 3, 1) // 4
    elif change == "all keys before":
        keywords.pop("block_indices"), keywords.pop("block_size")
        ends = torch.arange(12 * rank, 12 * rank + 12) + 1
        keywords["ranges"] = torch.stack((torch.zeros_like(ends), ends), -1)[None, :, None, None].expand(1, 12, 3, 1, 2)
    elif rank == 1 and change == "double":
        mine = [x.double() for x in mine]
    elif rank == 1 and isinstance(change, dict):
        keywords |= change
    leaves = [x.requires_grad_() for x in mine[:3]]
    if change == "keys without gradient" and rank == 1:
        leaves[1] = leaves[1].detach()
    return text_of(lambda: selection_attention(*leaves, **keywords))


def text_of(function):
    """The error that it raises, and how long that took."""
    began = time.monotonic()
    try:
        function()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return None, time.monotonic() - began


def fails(rank, group, where):
    """Rank 1 fails within a pass. Rank 0 calls again if it did not hear of that. Returns the text of the last call."""
    tensors, selection = problem()
    mine, local, *_ = shards(rank, tensors, selection, (12, 12), (12, 12), "contiguous")

    def run():
        return gradients(selection_attention, *mine, **local, backend="reference", mesh=group, heads_at_once=1)

    module, name, turn = {
        "forward": (dispatch, "run", 1), "backward": (backward, "backward", 2), "gathered": (passes, "joined", 1),
        "gathered again": (passes, "joined", 4), "half sent": (passes, "divided", 2),
    }[where]  # fmt: skip
    real, calls = getattr(module, name), []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == turn:
            raise RuntimeError("planted")
        return real(*arguments)

    if rank == 1:
        setattr(module, name, failing)
    first = text_of(run)
    setattr(module, name, real)
    return first if rank == 1 or first[0] is not None else text_of(run)


def hooks(rank, group):
    """Gradients with and without hooks that save copies in another layout."""
    tensors, selection = problem(S=16)
    mine, local, *_ = shards(rank, tensors, selection, (8, 8), (8, 8), "contiguous")

    def run():
        return arrays(gradients(selection_attention, *mine, **local, backend="triton", mesh=group, heads_at_once=1))

    def turned(x):
        return x.transpose(1, 2) if x.dim() > 2 else x

    want = run()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: turned(x).contiguous(), turned):
        return want, run()


def silent(rank, group):
    """Rank 1 makes no call."""
    short = dist.new_group([0, 1], timeout=timedelta(seconds=2))  # all four ranks make it
    return text_of(lambda: agreement.exchange(short, {})) if rank == 0 else None


def of_mesh(rank, group):
    """A two-dimensional mesh of four ranks: heads over one dimension, the sequence over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    tensors, selection = problem(HKV=4)
    tp, cp = mesh.get_local_rank("tp"), mesh.get_local_rank("cp")
    q, k, v, do, dlse = tensors
    heads = [x.chunk(2, -2)[tp] for x in (q, k, v, do)]
    selection["block_indices"] = selection["block_indices"].chunk(2, -2)[tp]
    mine, local, at, at_k = shards(cp, [*heads, dlse.chunk(2, -1)[tp]], selection, (12, 12), (12, 12), "zigzag")
    found = gradients(selection_attention, *mine, **local, backend="reference", mesh=mesh["cp"], order="zigzag")
    return *arrays(found), at.numpy(), at_k.numpy(), tp


def example(rank, group):
    """A few steps of the example, which checks its losses."""
    spec = importlib.util.spec_from_file_location(
        "context_parallel", Path(nsa.__file__).parents[1] / "examples" / "context_parallel.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


def meshes(rank, group):
    """The text of a call with each wrong mesh."""
    tensors, selection = problem()
    wrong = {"two": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), "rank": rank}
    return {
        name: text_of(lambda mesh=mesh: selection_attention(*tensors[:3], **selection, mesh=mesh))[0]
        for name, mesh in wrong.items()
    }


def clock(rank, group):
    """A small measurement, as text."""
    ask = measured.Ask(4, 256, 0, 4, 2, 16, heads_at_once=(1,), samples=1, device="cpu", backend="reference")
    alone = [dist.new_group([other]) for other in range(4)][rank]
    found = measured._prompt(ask, measured.Clock(torch.device("cpu"), 1), alone, None, lambda text: None)
    return found, measured.table(ask, found)


def compiled(rank, group):
    """Results of a call, and of the same call in one graph of ``torch.compile``."""
    tensors, selection = problem()
    mine, local, *_ = shards(rank, tensors, selection, (12, 12), (12, 12), "zigzag")

    def attend(q, k, v, **options):
        return selection_attention(q, k, v, **local, **options, mesh=group, order="zigzag")

    found = [gradients(call, *mine) for call in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True))]
    return [arrays(one) for one in found]
