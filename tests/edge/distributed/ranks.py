"""Four processes that are joined by gloo and run jobs, started once for all tests: a start takes seconds."""

import os
import socket
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
PATIENCE_S = 120  # for a job; on a busy machine the interpreter takes its time


def _serve(rank, port, pipe):
    torch.set_num_threads(1)
    from nsa.testing import interpreter
    from nsa.testing.judge import addresses
    from tests.edge.distributed import jobs

    interpreter.quicken()
    addresses.watch()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    groups = {2: dist.new_group([0, 1]), WORLD: dist.group.WORLD}
    pipe.send("ready")
    while True:
        name, world, keywords = pipe.recv()
        try:
            result = getattr(jobs, name)(rank, groups.get(world), **keywords)
            assert not addresses.outside, addresses.outside
            pipe.send((None, result))
        except BaseException:  # noqa: BLE001  (the test shows it)
            pipe.send((traceback.format_exc(), None))


class Ranks:
    """The processes. After a failure they are started again, because a rank may hang."""

    def __init__(self):
        self.processes = self.pipes = None

    def start(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(WORLD)]
        self.pipes = [pair[0] for pair in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, port, pairs[rank][1]), daemon=True) for rank in range(WORLD)
        ]
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"  # ranks compute on the CPU, also in the GPU lane
        try:
            for process in self.processes:
                process.start()
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
        for pipe in self.pipes:
            assert pipe.poll(PATIENCE_S), "a rank did not start"
            pipe.recv()

    def run(self, job, world, **keywords):
        """The results of ``world`` ranks, by rank."""
        if self.processes is None:
            self.start()
        for pipe in self.pipes[:world]:
            pipe.send((job, world, keywords))
        results, waiting = {}, dict(zip(self.pipes[:world], range(world), strict=True))
        while waiting:
            ready = wait(waiting, PATIENCE_S)
            if not ready:
                self.stop()
                raise AssertionError(f"ranks {list(waiting.values())} hang")
            for pipe in ready:
                rank = waiting.pop(pipe)
                error, results[rank] = pipe.recv()
                if error is not None:
                    self.stop()
                    raise AssertionError(f"rank {rank} raised:\n{error}")
        return [results[rank] for rank in range(world)]

    def stop(self):
        for process in self.processes or ():
            process.kill()
            process.join()
        self.processes = self.pipes = None
