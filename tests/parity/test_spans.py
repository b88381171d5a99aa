"""Spans as Hypothesis draws them: whatever they say, the kernel reads what the oracle reads. Shapes are fixed."""

import dataclasses

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nsa.kernels import tiles
from nsa.testing import strategies, sweep
from nsa.testing.cases import Case
from nsa.testing.compare import Oracle, assert_parity
from nsa.testing.impls import OURS
from nsa.testing.plugin import current_lane

KEYS, SPANS = 72, 4
# L is the host's bound: every span may be as long as the cache.
RANGES = Case(3, 32, 32, KEYS * SPANS, 4, "mixed", "fp32", HKV=2, S=2, S_kv=KEYS)
BLOCKS = Case(4, 32, 16, 16 * 5, 4, "prefill", "fp16", HKV=2, S=2, S_kv=KEYS, block_size=16)
PACKED = dataclasses.replace(RANGES, N=8, S=1, seqlens=(1, 3))
VARLEN = Case(2, 32, 32, 100, 3, "few", "fp32", source="varlen")

# An interpreted example takes a tenth of a second, and shrinking tries thousands: there the failure as found must do.
phases = settings.default.phases if current_lane() == "gpu" else (Phase.explicit, Phase.reuse, Phase.generate)
lane_settings = settings(phases=phases)
lead = (RANGES.B, RANGES.S, RANGES.HKV)


@lane_settings
@given(strategies.ranges(lead, SPANS, KEYS), strategies.seeds(), st.booleans())
def test_triton_sel_parity_ranges_any_spans(device: torch.device, spans: torch.Tensor, seed: int, causal: bool) -> None:
    problem = dataclasses.replace(RANGES.make(device, seed), ranges=spans.to(device), causal=causal)
    check("ranges", problem)
    check("sdpa", problem)


@lane_settings
@given(strategies.ranges((4, RANGES.HKV), SPANS, 5), strategies.seeds())
def test_triton_sel_parity_ranges_any_spans_packed_batch(device: torch.device, spans: torch.Tensor, seed: int) -> None:
    problem = dataclasses.replace(PACKED.make(device, seed), ranges=spans.to(device))
    check("ranges", problem)
    check("sdpa", problem)


# By the rules; and with tiles that a block holds one of, split or not.
CHOICES = (None, tiles.Choice(1, 1, 16, 1, 2), tiles.Choice(2, 1, 16, 1, 1))


@lane_settings
@given(
    strategies.block_indices(lead, BLOCKS.n, -(-KEYS // 16)),
    strategies.seeds(),
    st.booleans(),
    st.sampled_from(CHOICES),
)
def test_triton_sel_parity_blocks_any_indices(
    device: torch.device, blocks: torch.Tensor, seed: int, causal: bool, choice: tiles.Choice | None
) -> None:
    start = blocks.to(torch.int64) * 16
    spans = torch.stack((start, start + 16), -1).masked_fill(blocks[..., None] < 0, 0)
    problem = BLOCKS.make(device, seed)
    drawn = dataclasses.replace(problem, ranges=spans.to(device), block_indices=blocks.to(device), causal=causal)
    with sweep.forced(choice):
        check("blocks", drawn)
    check("sdpa", drawn)


@lane_settings
@given(st.lists(st.integers(0, VARLEN.L), min_size=VARLEN.N, max_size=VARLEN.N), strategies.seeds())
def test_triton_sel_parity_varlen_any_lengths(device: torch.device, lengths: list[int], seed: int) -> None:
    problem = VARLEN.make(device, seed)
    ends = torch.tensor(lengths).cumsum(0)
    spans = torch.stack((ends - torch.tensor(lengths), ends), -1).view(1, VARLEN.N, 1, 1, 2).to(device)
    g = torch.Generator(device).manual_seed(seed)
    k, v = (torch.randn(1, sum(lengths), 1, 32, generator=g, device=device) for _ in range(2))
    check("varlen_group", dataclasses.replace(problem, ranges=spans, k=k, v=v))


def check(name: str, problem) -> None:
    result, launched = OURS[name].run_counted(problem, return_lse=True)
    assert_parity(result, Oracle.of(problem), name)
    route = OURS[name].route
    assert route is None or launched[route] > 0, f"{name} launched {launched}"
