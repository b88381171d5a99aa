"""For each point of the compile matrix, on each of its NVIDIA GPUs: does a trial launch what the parent will?

Run as a script it prints, as JSON, for every launch of the parent, where the child's differs. Nothing is compiled: what
decides that is compared. It must not run in Triton's interpreter, hence a process of its own.
"""

from __future__ import annotations

import json

import torch

from nsa import settings
from nsa.guard.trials import TRIALS, Trial
from nsa.kernels.backward import plan as backward
from nsa.kernels.key_major import plan as key_major
from nsa.kernels.query_major import plan as query_major
from nsa.kernels.shared import combine
from nsa.kernels.shared.launch import Variant
from nsa.kernels.union import plan as union
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
        query_major.device_limits = lambda device, chip=chip: (chip.capability, chip.processors)
        query_major.gpu_name = lambda device, chip=chip: chip.gpu
        seen.clear()
        settings.reload()
        child._call(point)
        for what in list(seen):
            seen.clear()
            settings.reload()
            query_major._variant.cache_clear()
            combine._variant.cache_clear()
            key_major._variants.cache_clear()
            union._variants.cache_clear()
            for variants in backward.VARIANTS:
                variants.cache_clear()
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
