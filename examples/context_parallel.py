"""Training on a sequence that is sharded among GPUs, with heads sharded as well, and weights by FSDP2.

    torchrun --nproc-per-node 4 examples/context_parallel.py

The mesh has two dimensions: `cp` divides the tokens (zigzag, so that all ranks have equal work), `tp` the heads. A
layer with random weights learns the tokens of one sequence. Its first loss must be that of one process. Runs on GPUs
with NCCL, and on CPUs with gloo.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nsa
import nsa.distributed

BLOCK, TOP = 16, 4  # keys of a block, blocks a query reads
HQ, HKV, D, VOCABULARY = 8, 4, 32, 97
TOKENS, STEPS = 256, 8
ORDER = "zigzag"


class Layer(torch.nn.Module):
    """Embedding, one attention over selected keys, and logits."""

    def __init__(self) -> None:
        super().__init__()
        width = HQ * D
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.q, self.k, self.v = (torch.nn.Linear(width, heads * D, bias=False) for heads in (HQ, HKV, HKV))
        self.out = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, blocks: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
        """Logits ``[1, S, VOCABULARY]`` of this rank's ``tokens [1, S]``, whose queries select ``blocks [1, S, TOP]``.

        mesh: over which the sequence is sharded; None: one process.
        """
        x = self.embed(tokens)
        q, k, v = (f(x).unflatten(-1, (-1, D)) for f in (self.q, self.k, self.v))  # with `tp`: this rank's heads
        selection = {"block_indices": blocks[:, :, None].expand(-1, -1, k.shape[2], -1), "block_size": BLOCK}
        if mesh is None:
            o = nsa.selection_attention(q, k, v, **selection)
        else:
            o = nsa.distributed.selection_attention(q, k, v, **selection, mesh=mesh, order=ORDER)
        return self.out(o.flatten(-2)).clone()  # FSDP2 warns if a module returns a view


def select(positions: Tensor) -> Tensor:
    """Blocks ``[1, S, TOP]`` of queries at ``positions [S]`` of the whole sequence: three earlier ones and the own."""
    own = positions // BLOCK
    some = torch.stack((own // 4, own // 2, own - 1), -1)
    some = some.where((some >= 0) & (some < own[:, None]), -1)
    some[:, 1] = some[:, 1].where(some[:, 1] != some[:, 0], -1)  # a key in two blocks of a row counts twice
    some[:, 2] = some[:, 2].where((some[:, 2:] != some[:, :2]).all(-1), -1)
    return torch.cat((some, own[:, None]), -1)[None].int()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed over tokens, divided by the tokens of the whole sequence."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / TOKENS


def main() -> None:
    """Train. Every rank runs this."""
    gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpu else "gloo")
    world = dist.get_world_size()
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    device = torch.device(kind, dist.get_node_local_rank(0)) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    tp = 2 if world % 2 == 0 and world > 2 else 1
    mesh = init_device_mesh(kind, (world // tp, tp), mesh_dim_names=("cp", "tp"))
    cp = mesh["cp"].size()

    torch.manual_seed(0)  # the same weights and tokens on every rank
    layer = Layer().to(device)
    sequence = torch.randint(VOCABULARY, (1, TOKENS + 1)).to(device)
    tokens, targets = sequence[:, :-1], sequence[:, 1:]
    with torch.no_grad():
        expected = loss_of(layer(tokens, select(torch.arange(TOKENS, device=device))), targets)

    parallelize_module(
        layer, mesh["tp"], {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
    )  # fmt: skip
    fully_shard(layer, mesh=mesh["cp"])
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    layout = nsa.distributed.Layout(ORDER, (TOKENS // cp,) * cp)
    here = layout.positions(mesh.get_local_rank("cp"), device)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(layer(tokens[:, here], select(here), mesh["cp"]), targets[:, here])
        (loss * cp).backward()  # FSDP takes the mean over the ranks
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("cp"))
        losses.append(float(total))
    assert abs(losses[0] - float(expected)) < 1e-3, (
        f"expected the loss {float(expected)} of one process, got {losses[0]}"
    )
    assert losses[-1] < losses[0] / 2, f"expected the loss to fall, got {losses}"
    if dist.get_rank() == 0:
        print(f"{cp} x {tp} ranks: loss {losses[0]:.3f}, as one process; after {STEPS} steps {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
