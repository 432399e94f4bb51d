"""What was measured at one concurrency of one engine, the figures of it, and how two arms compare."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import nnls

from av_triton import CostTable
from benchmarks.resume import append_line, whole_lines

PLAIN, FIXED, ADAPTIVE, PROFILED = "plain", "fixed", "adaptive", "profiled"
HEADED, HEADLESS = "headed", "headless"


class Step(NamedTuple):
    """One decode step of the scheduler.

    verified: tokens that went through the target, one bonus row per request included. emitted: tokens that the requests
    got, at most what they had asked for. ms: from the end of the batch before to the end of this one. cpu_ms: of the
    scheduler process, all its threads. target_ms, target_cpu_ms: of these, the target's forward.
    """

    requests: int
    verified: int
    emitted: int
    ms: float
    cpu_ms: float
    target_ms: float
    target_cpu_ms: float


class Arm(NamedTuple):
    """drafter: SGLang's algorithm. length: draft positions K.

    kind: PLAIN (without the drafter, measured beside its arms), FIXED, ADAPTIVE (by the step costs that the server
    measures when it starts), PROFILED (adaptive too, by step costs from the fixed arms' steps, see `StepCosts`), HEADED
    or HEADLESS (adaptive, with and without a head on the drafter's hidden states, by the same measured step costs).
    """

    drafter: str
    kind: str
    length: int

    def __str__(self) -> str:
        return f"{self.drafter} {self.kind}" + (f" {self.length}" if self.length else "")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` prompts, `length` new tokens each, `concurrency` at a time; seconds: wall time of all of it."""

    arm: Arm
    repetition: int
    concurrency: int
    requests: int
    length: int
    seconds: float
    steps: list[Step]
    outputs: list[list[int]]

    @property
    def key(self) -> tuple[object, ...]:
        return self.arm, self.repetition, self.concurrency, self.requests, self.length


def load(path: Path) -> dict[tuple[object, ...], Point]:
    """Finished points by key, the first of each; a last line that was cut off is left out."""
    points: dict[tuple[object, ...], Point] = {}
    for line in whole_lines(path):
        point = msgspec.json.decode(line, type=Point)
        points.setdefault(point.key, point)
    return points


def append(path: Path, point: Point) -> None:
    """Add a point to the file, after its last whole line."""
    append_line(path, msgspec.json.encode(point))


@dataclass(frozen=True)
class Figures:
    """Of the decode steps at the full concurrency; prefill, and the end when requests run out, are left out.

    throughput: emitted tokens per second. per_user: the same per request. cpu_throughput: emitted tokens per second of
    the scheduler's CPU time. accept_length: tokens per request and step. verified_per_token: tokens through the target
    per emitted token. step_ms, target_ms: medians. target_share: of the steps' time, spent in the target's forward.
    """

    throughput: float
    per_user: float
    cpu_throughput: float
    accept_length: float
    verified_per_token: float
    step_ms: float
    target_ms: float
    target_share: float
    steps: int

    @classmethod
    def of(cls, points: Sequence[Point]) -> "Figures":
        """Over all the steps of points of one concurrency."""
        concurrency = points[0].concurrency
        steps = [step for point in points for step in point.steps if step.requests == concurrency]
        if not steps:
            raise ValueError(
                f"{points[0].arm}: no decode step with {concurrency} requests; serve at least {concurrency} of them"
            )
        rows, verified, emitted, ms, cpu_ms, target_ms, _ = (sum(column) for column in zip(*steps, strict=True))
        return cls(
            throughput=emitted / ms * 1e3,
            per_user=emitted / ms * 1e3 / concurrency,
            cpu_throughput=emitted / cpu_ms * 1e3,
            accept_length=emitted / rows,
            verified_per_token=verified / emitted,
            step_ms=statistics.median(step.ms for step in steps),
            target_ms=statistics.median(step.target_ms for step in steps),
            target_share=target_ms / ms,
            steps=len(steps),
        )


class StepCosts(NamedTuple):
    """The target's forward in CPU milliseconds: base + per_request * requests + per_token * verified tokens."""

    base: float
    per_request: float
    per_token: float

    @classmethod
    def of(cls, points: Iterable[Point]) -> "StepCosts":
        """Least squares, none below 0, over the fixed arms' points, the medians of their steps; NaN without any."""
        sizes, times = [], []
        for point in points:
            if point.arm.kind == FIXED:
                steps = [step for step in point.steps if step.requests == point.concurrency]
                sizes.append((1, point.concurrency, steps[0].verified))
                times.append(statistics.median(step.target_cpu_ms for step in steps))
        return cls(*(nnls(np.array(sizes, float), np.array(times))[0].tolist() if sizes else [math.nan] * 3))

    def growth(self, arm: Arm, requests: int) -> float:
        """What all drafts cost the target over what none cost."""
        rest = self.base + self.per_request * requests
        return (rest + self.per_token * requests * (arm.length + 1)) / (rest + self.per_token * requests)

    def table(self, points: Iterable[Point], arm: Arm) -> CostTable:
        """For this arm, whose drafting is timed in the points of the fixed arm of its length.

        The target's cost per request goes with the drafting: both are spent whatever the budget.
        """
        same = arm._replace(kind=FIXED)
        draft: dict[int, list[float]] = {}
        for point in points:
            if point.arm == same:
                draft.setdefault(point.concurrency, []).extend(
                    step.cpu_ms - step.target_cpu_ms for step in point.steps if step.requests == point.concurrency
                )
        most = max(draft) * (arm.length + 1)
        return CostTable(
            draft=[(n, max(statistics.median(draft[n]) + self.per_request * n, 1e-3)) for n in sorted(draft)],
            verify=[(n, max(self.base + self.per_token * n, 1e-3)) for n in (1, most)],
        )


class Ratio(NamedTuple):
    """Of two arms' figures: the geometric mean over the passes, the lowest and the highest pass."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(points: Iterable[Point], others: Iterable[Point], figure: str = "throughput") -> Ratio | None:
    """Pass by pass, so that a slow spell of the machine falls on both; None where no pass has both."""
    mine, theirs = ({point.repetition: point for point in each} for each in (points, others))
    pairs = [
        getattr(Figures.of([mine[n]]), figure) / getattr(Figures.of([theirs[n]]), figure)
        for n in sorted(mine.keys() & theirs.keys())
    ]
    return Ratio(statistics.geometric_mean(pairs), min(pairs), max(pairs)) if pairs else None


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each point, whether no other one is at least as high in both coordinates and higher in one."""
    return [
        not any(x >= a and y >= b and (x, y) != (a, b) for x, y in points)
        for a, b in points
    ]  # fmt: skip


class Difference(NamedTuple):
    """The first token of an output that differs from the reference's."""

    request: int
    position: int
    token: int
    reference: int


def differences(point: Point, reference: list[list[int]]) -> list[Difference]:
    """The first difference of every request whose output is not the reference's; they are equally long."""
    found = []
    for request, (mine, theirs) in enumerate(zip(point.outputs, reference, strict=False)):
        pairs = enumerate(zip(mine, theirs, strict=True))
        first = next(((at, a, b) for at, (a, b) in pairs if a != b), None)
        if first is not None:
            found.append(Difference(request, *first))
    return found
