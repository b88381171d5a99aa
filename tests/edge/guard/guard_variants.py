"""For points of the compile matrix, on each of its NVIDIA GPUs: does the small call launch what the caller's does?

All points of one GPU, and of the others those of the quick part, which has every kernel and every switch.

Run as a script it prints, as JSON, for every launch of the caller, whether the small call has it, too. Nothing is
compiled: what decides that is compared. It must not run in Triton's interpreter, hence a process of its own.
"""

from __future__ import annotations

import json

import torch

from nsa.guard import describe
from nsa.guard.small import Small
from nsa.kernels.families import BACKWARDS, FAMILIES, OF_SCHEDULE, backward_of
from nsa.kernels.shared import device as device_facts
from nsa.kernels.shared.launch import Variant, forget
from nsa.kernels.shared.shape import shape_of
from nsa.testing.compile import child, points

WHOLE = "sm_90"


def main() -> None:
    seen: list[dict[str, object]] = []
    planned: list[tuple[object, ...]] = []

    def launch(self: Variant, grid: object, device: object, tensors: tuple[object, ...], *_: object) -> None:
        seen.append(json.loads(json.dumps(self.describe(tensors))))

    Variant.launch = launch
    torch.randn = lambda shape, generator: torch.empty(shape, device="meta")  # what lies in tensors is not looked at

    def recorded(real):
        def plan(self, call, shape, schedule, *rest, **more):
            made = real(self, call, shape, schedule, *rest, **more)
            planned.append((call, shape, schedule, made))
            return made

        return plan

    for family in (*FAMILIES, *BACKWARDS):  # a family that leans on another is planned after it
        type(family).plan = recorded(type(family).plan)
    report = {}
    nvidia = [x for x in points.ARCHITECTURES.values() if x.backend == "cuda"]
    of_all = [(x, points.points(x, "full" if x.name == WHOLE else "quick")) for x in nvidia]
    for gpu, point in [(x, point) for x, of_one in of_all for point in of_one]:
        device_facts.chip = lambda device, chip=gpu.chip: chip
        seen.clear()
        child._call(point)
        wanted = list(seen)
        call, shape, schedule, made = planned[-1]
        backward = schedule == "backward"
        like_o, lse = call.q.new_empty(*call.q.shape[:-1], shape.Dv), torch.empty(call.q.shape[:-1], device="meta")
        given = {"do": like_o, "dlse": lse, "o": like_o, "lse": lse, "wanted": (True,) * 3} if backward else None
        what = json.loads(json.dumps(describe(call, shape, schedule, made, given)))
        seen.clear()
        forget()
        small = Small(what, torch.device("meta")).call()
        if backward:
            o, lse = small.q.new_empty(*small.q.shape[:-1], shape.Dv), torch.empty(small.q.shape[:-1], device="meta")
            of_gradients = backward_of(small, shape_of(small))
            again = of_gradients.plan(small, shape_of(small), schedule)
            of_gradients.kernels.backward(again, small, o, lse, o, lse, "backward")
        else:
            family = OF_SCHEDULE[schedule]
            family.kernels.forward(family.plan(small, shape_of(small, shape.bound), schedule), small, schedule)
        for x in wanted:
            alike = [y for y in seen if y["kernel"] == x["kernel"]]
            found = x in alike
            differs = {} if found else {key: (x[key], [y[key] for y in alike]) for key in x}
            report[f"{gpu.name} {point.id} {x['kernel']}"] = {"differs": differs, "cluster": x["cluster"]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
