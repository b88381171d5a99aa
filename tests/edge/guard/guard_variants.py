"""For each point of the compile matrix, on each of its NVIDIA GPUs: does a trial launch what the parent will?

Run as a script it prints, as JSON, for every launch of the parent, where the child's differs. Nothing is compiled: what
decides that is compared. It must not run in Triton's interpreter, hence a process of its own.
"""

from __future__ import annotations

import json

import torch

from nsa import settings
from nsa.guard.trials import TRIALS, Trial
from nsa.kernels.shared import device as device_facts
from nsa.kernels.shared.launch import Variant, forget
from nsa.testing.compile import child, points


class Launched(BaseException):
    """The child need go no further: tensors without data cannot be compared with anything."""


def stop(kind: str, text: str) -> None:
    if text == "running":
        raise Launched


def main() -> None:
    seen: list[dict[str, object]] = []

    def launch(self: Variant, grid: object, device: object, tensors: tuple[object, ...], *_: object) -> None:
        seen.append(json.loads(json.dumps(self.describe(tensors))))

    Variant.launch = launch
    report = {}
    gpus = [chip for chip in points.ARCHITECTURES.values() if chip.backend == "cuda"]
    for chip, point in [(gpu, point) for gpu in gpus for point in points.points(gpu, "full")]:
        device_facts.limits = lambda device, chip=chip: (chip.capability, chip.processors)
        device_facts.gpu_name = lambda device, chip=chip: chip.gpu
        seen.clear()
        settings.reload()
        child._call(point)
        for what in list(seen):
            seen.clear()
            settings.reload()
            forget()
            try:
                TRIALS[what["kernel"]](Trial(what, torch.device("meta"), stop))
            except Launched:
                pass
            found = [x for x in seen if x["kernel"] == what["kernel"]]
            got = found[0]
            assert all(x == got for x in found)  # the order kernel is launched for rows with and without unions
            differs = {key: (what[key], got[key]) for key in what if what[key] != got[key]}
            report[f"{chip.name} {point.id} {what['kernel']}"] = {"differs": differs, "cluster": what["cluster"]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
