"""What was measured at one concurrency of one engine, the figures of it, and how two arms compare."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from scipy import stats

from av_triton import CostTable
from benchmarks.resume import append_line, whole_lines

PLAIN, FIXED, ADAPTIVE, PROFILED = "plain", "fixed", "adaptive", "profiled"
HEADED, HEADLESS = "headed", "headless"
INTERVAL_FROM = 4


class Step(NamedTuple):
    """One decode step of the scheduler.

    verified: tokens that went through the target, one bonus row per request included. emitted: tokens that the requests
    got, at most what they had asked for. ms: from the end of the batch before to the end of this one. cpu_ms: of the
    scheduler process, all its threads. target_ms, target_cpu_ms: of these, the target's forward. own_cpu_ms: scoring,
    planning and learning.
    """

    requests: int
    verified: int
    emitted: int
    ms: float
    cpu_ms: float
    target_ms: float
    target_cpu_ms: float
    own_cpu_ms: float = 0.0


class Arm(NamedTuple):
    """drafter: SGLang's algorithm. length: draft positions K.

    kind: PLAIN (without the drafter, measured beside its arms), FIXED, ADAPTIVE (by the step costs that the server
    measures when it starts), PROFILED (adaptive too, by `profiled_costs`), HEADED or HEADLESS (adaptive, with and
    without a head on the drafter's hidden states, by the same measured step costs).
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
    per emitted token. step_ms, target_ms, target_cpu_ms, own_cpu_ms: medians. target_share: of the steps' time, spent
    in the target's forward.
    """

    throughput: float
    per_user: float
    cpu_throughput: float
    accept_length: float
    verified_per_token: float
    step_ms: float
    target_ms: float
    target_cpu_ms: float
    own_cpu_ms: float
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
        rows, verified, emitted, ms, cpu_ms, target_ms, *_ = (sum(column) for column in zip(*steps, strict=True))
        return cls(
            throughput=emitted / ms * 1e3,
            per_user=emitted / ms * 1e3 / concurrency,
            cpu_throughput=emitted / cpu_ms * 1e3,
            accept_length=emitted / rows,
            verified_per_token=verified / emitted,
            step_ms=statistics.median(step.ms for step in steps),
            target_ms=statistics.median(step.target_ms for step in steps),
            target_cpu_ms=statistics.median(step.target_cpu_ms for step in steps),
            own_cpu_ms=statistics.median(step.own_cpu_ms for step in steps),
            target_share=target_ms / ms,
            steps=len(steps),
        )


def profiled_costs(points: Iterable[Point], arm: Arm) -> CostTable:
    """Step costs for this arm in CPU time, medians over the steps of the first pass at the full concurrency.

    The target's forward by its tokens, of plain decoding and all fixed arms; the rest of a step by its requests, of the
    fixed arm of this length.
    """
    draft: dict[int, list[float]] = {}
    verify: dict[int, list[float]] = {}
    same = arm._replace(kind=FIXED)
    for point in points:
        counts = point.arm.drafter == arm.drafter and point.arm.kind in (PLAIN, FIXED) and point.repetition == 0
        for step in point.steps if counts else ():
            if step.requests == point.concurrency:
                verify.setdefault(step.verified, []).append(step.target_cpu_ms)
                if point.arm == same:
                    draft.setdefault(step.requests, []).append(step.cpu_ms - step.target_cpu_ms)
    if not draft:
        raise ValueError(f"{arm}: no step of {same} to take costs from; measure that arm first")
    return CostTable(
        *([(size, max(statistics.median(each[size]), 1e-3)) for size in sorted(each)] for each in (draft, verify))
    )


class Ratio(NamedTuple):
    """Of two arms' figures, over the passes; see `of`."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, factors: Sequence[float]) -> "Ratio":
        """The geometric mean and its 95 % interval by Student's t; of fewer than INTERVAL_FROM factors, which say
        little about their spread, the lowest and the highest."""
        mean = statistics.geometric_mean(factors)
        if len(factors) < INTERVAL_FROM:
            return cls(mean, min(factors), max(factors))
        logs = [math.log(each) for each in factors]
        half = stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(mean, mean * math.exp(-half), mean * math.exp(half))

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(points: Iterable[Point], others: Iterable[Point], figure: str = "throughput") -> Ratio | None:
    """Pass by pass, so that a slow spell of the machine falls on both; None where no pass has both."""
    mine, theirs = ({point.repetition: point for point in each} for each in (points, others))
    pairs = [
        getattr(Figures.of([mine[n]]), figure) / getattr(Figures.of([theirs[n]]), figure)
        for n in sorted(mine.keys() & theirs.keys())
    ]
    return Ratio.of(pairs) if pairs else None


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
