"""What is enumerated: random requests, cost tables, settings. The policies and the counter-examples share it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction

import pytest

from av_triton import CostTable, Settings
from tests.lossless.exact import Request, random_request

PEAKS = (Fraction(11, 12), Fraction(1, 2), Fraction(3, 4))
"""The drafters' largest probabilities: few different scores, so that few plans are needed."""


@dataclass(frozen=True)
class Size:
    """Size of a grid of cases. By default the seeds are some where a budget from current survivals does deviate.

    ``ties``: equal drafters that are certain at times, and targets with impossible tokens. ``peaks``: how many of PEAKS
    the drafters take.
    """

    seeds: tuple[int, ...] | range
    vocabulary: int = 2
    depth: int = 2
    horizon: int = 3
    steps: int = 2
    order: int = 2
    ties: bool = False
    peaks: int = 3

    def __str__(self) -> str:
        names = f"V{self.vocabulary}K{self.depth}T{self.horizon}steps{self.steps}" + "ties" * self.ties
        return f"{names}x{len(self.seeds)}"


SMALL = Size((1, 4))
THREE_STEPS = Size((5, 19), steps=3, order=1, peaks=2)
TIES = Size((8, 9), ties=True)
DEEP = Size((0, 1, 3), depth=3, order=1, peaks=2)
WIDE = Size((9,), vocabulary=3, order=1, peaks=2)
LARGE = [
    pytest.param(size, marks=pytest.mark.full)
    for size in (
        Size(range(16)),
        Size(range(16), ties=True),
        Size(range(6), depth=3, horizon=4, order=1, peaks=2),
        Size(range(4), vocabulary=3, order=1, peaks=2),
        Size(range(6), steps=3, horizon=4, order=1, peaks=2),
    )
]


def settings(policy: str = "earlier", **changes) -> Settings:
    """p = q_max at the start; nothing explored, trimmed at the smallest gain that the settings allow."""
    base = {"initial_slopes": (1.0, 1.0), "initial_intercept": 0.0, "exploration": 0.0, "minimum_gain": 0.01}
    if policy == "fixed":
        base["fixed_budget"] = 2
    return Settings(policy=policy, **{**base, **changes})


def stepped_cost(depth: int, requests: int, *, pad: int = 2, base: float = 4.0, step: float = 1.5) -> CostTable:
    """A verify cost that rises by ``step`` whenever the drafts outgrow a multiple of ``pad``, as padded graphs do."""
    drafts = range(requests * depth + 1)
    return CostTable(
        draft=[(1, 1e-6)],
        verify=[(requests + n, base + step * -(-n // pad)) for n in drafts],
    )


def all_or_nothing_cost(depth: int, requests: int) -> CostTable:
    """One padded size for any number of drafts. Whether it pays hangs on the sum over all survivals, the last included:
    the cost that punishes a look at the current ones most."""
    return stepped_cost(depth, requests, pad=requests * depth, base=4.0, step=1.5 + 2 * depth)


def affine_cost(depth: int, requests: int, *, base: float = 4.0, slope: float = 1.0) -> CostTable:
    return CostTable(
        draft=[(1, 1e-6)],
        verify=[(requests, base), (requests * (depth + 1), base + slope * requests * depth)],
    )


def costs(size: Size, requests: int = 2) -> list[CostTable]:
    return [make(size.depth, requests) for make in (all_or_nothing_cost, affine_cost, stepped_cost)]


def random_requests(size: Size, seed: int, count: int = 2) -> list[Request]:
    rng = random.Random(seed)
    peaks = PEAKS[: size.peaks] + ((Fraction(1),) if size.ties else ())
    requests = [random_request(rng, size.vocabulary, size.order, peaks=peaks, zeros=size.ties) for _ in range(count)]
    if size.ties:
        requests[-1] = requests[0]
    return requests
