"""Four processes that are joined by gloo and run jobs, started once for all tests: a start takes seconds."""

import faulthandler
import tempfile
import traceback
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
PATIENCE_S = 120  # for a job; on a busy machine the interpreter takes its time


def _serve(rank, folder, pipe):
    faulthandler.enable()  # a rank that crashes says where, in the test's captured stderr
    torch.set_num_threads(1)
    from nsa.testing import interpreter
    from nsa.testing.judge import addresses
    from tests.edge.distributed import jobs

    interpreter.quicken()
    addresses.watch()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
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
        self.processes = self.pipes = self.folder = None

    def start(self):
        # Ranks meet at a file: a port that was free a moment ago may be another test's by the time rank 0 binds it.
        self.folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(WORLD)]
        self.pipes = [pair[0] for pair in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, self.folder.name, pair[1]), daemon=True)
            for rank, pair in enumerate(pairs)
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")  # ranks compute on the CPU, also in the GPU lane
            for process in self.processes:
                process.start()
        for _, end in pairs:
            end.close()  # else the end of a process would not end its pipe
        for pipe in self.pipes:
            if not pipe.poll(PATIENCE_S):
                self.stop()
                raise AssertionError("a rank did not start")
            self.receive(pipe)

    def receive(self, pipe):
        """What a rank sent. If its process has ended, all are stopped, and the test tells its exit code."""
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self.processes[self.pipes.index(pipe)]
            process.join()
            self.stop()
            raise AssertionError(f"{process.name} ended with exit code {process.exitcode}") from None

    def run(self, job, world, **keywords):
        """The results of ``world`` ranks, by rank."""
        if self.processes is None:
            self.start()
        for pipe in self.pipes[:world]:
            try:
                pipe.send((job, world, keywords))
            except (BrokenPipeError, ConnectionResetError):
                self.receive(pipe)
        results, waiting = {}, dict(zip(self.pipes[:world], range(world), strict=True))
        while waiting:
            ready = wait(waiting, PATIENCE_S)
            if not ready:
                self.stop()
                raise AssertionError(f"ranks {list(waiting.values())} hang")
            for pipe in ready:
                rank = waiting.pop(pipe)
                error, results[rank] = self.receive(pipe)
                if error is not None:
                    self.stop()
                    raise AssertionError(f"rank {rank} raised:\n{error}")
        return [results[rank] for rank in range(world)]

    def stop(self):
        for process in self.processes or ():
            process.kill()
            process.join()
        if self.folder is not None:
            self.folder.cleanup()
        self.processes = self.pipes = self.folder = None
