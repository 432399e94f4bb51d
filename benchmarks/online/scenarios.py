"""Streams of steps on which estimators that learn online are compared, and what of them is scored.

A scenario's stream depends on its seed alone; every arm sees the same one.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import expit

from av_triton import CostTable
from benchmarks.online.arms import Step
from benchmarks.traces.quality import Trace, workload_name

ROWS, POSITIONS = 64, 5  # of the synthetic streams
LIFETIME = 60  # steps of a synthetic request, on average
PEER_CYCLE = 100
GOLDEN = 0.618034  # its multiples modulo 1 keep apart


@dataclass(frozen=True)
class Stream:
    """scored: the range of steps whose predictions count. ticks: steps at which something changed."""

    steps: list[Step]
    scored: range
    ticks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """make: seed -> stream. budget: share of the drafts that is verified; cost: by what the planners decide it instead.

    strict: ours has to be better, not only as good. same_interval: ours runs with the peer's refit interval, too.
    """

    name: str
    make: Callable[[int], Stream]
    budget: float = 1.0
    cost: CostTable | None = None
    strict: bool = False
    same_interval: bool = False


def replayed(trace: Trace, seed: int, rows: int | None = None, first_cluster: int = 0) -> Iterator[Step]:
    """The trace over and over, with verdicts drawn anew. Every pass has the next `rows` rows (None: all), as new
    requests. Every seed begins at another step: all that differs where the trace is greedy."""
    rng = np.random.default_rng(seed)
    steps, recorded, _ = trace.features.shape
    rows = rows or recorded
    greedy = np.full(rows, trace.greedy)
    start = int(steps * (GOLDEN * seed % 1))
    for number, at in enumerate(itertools.count(start)):
        passes, place = divmod(at, steps)
        row = (passes * rows + np.arange(rows)) % recorded
        features, alpha = trace.features[place, row], trace.alpha[place, row]
        fresh = np.full(rows, place == 0 or number == 0)
        yield Step(features, alpha, rng.random(alpha.shape, np.float32), greedy, fresh, first_cluster + row)


def together(*streams: Iterator[Step]) -> Iterator[Step]:
    """The rows of several streams in one batch."""
    for steps in zip(*streams, strict=True):
        columns = zip(*(vars(step).values() for step in steps), strict=True)
        yield Step(*(None if column[0] is None else np.concatenate(column) for column in columns))


@dataclass(frozen=True)
class Law:
    """alpha = sigmoid(slope f + intercepts[k]); a share of the rows has f = 40, and alpha = `one_hot_alpha` instead."""

    slope: float
    intercepts: Sequence[float]
    one_hot: float = 0.0
    one_hot_alpha: float = 0.1


def drawn(law: Law, seed: int, running: bool = False) -> Iterator[Step]:
    """Independent drafts with features from N(1, 2), as on the recorded traces, and requests that come and go. At the
    first step all are new, unless they are `running` already."""
    rng = np.random.default_rng(seed)
    shape, cluster = (ROWS, len(law.intercepts)), seed * ROWS + np.arange(ROWS)
    for number in itertools.count():
        features = rng.normal(1, 2, shape).astype(np.float32)
        alpha = expit(law.slope * features + np.array(law.intercepts)).astype(np.float32)
        saturated = rng.random(ROWS) < law.one_hot
        features[saturated], alpha[saturated] = 40.0, law.one_hot_alpha
        fresh = (rng.random(ROWS) < 1 / LIFETIME) | (number == 0 and not running)
        yield Step(features, alpha, rng.random(shape, np.float32), np.zeros(ROWS, bool), fresh, cluster)


def take(stream: Iterator[Step], steps: int, skip: int = 0) -> Stream:
    return Stream(list(itertools.islice(stream, steps)), range(skip, steps))


def switched(before: Iterator[Step], after: Iterator[Step], seed: int, recovery: int = 300) -> Stream:
    """From one stream to another at a random step of the peer's fifth cycle; what follows is scored."""
    change = 4 * PEER_CYCLE + int(np.random.default_rng(seed).integers(PEER_CYCLE))
    steps = [*itertools.islice(before, change), *itertools.islice(after, recovery)]
    return Stream(steps, range(change, change + recovery), (change,))


EASY, HARD = Law(0.55, (0.6, 0.4, 0.2, 0.0, -0.2)), Law(0.45, (-0.1, -0.6, -1.0, -1.3, -1.5))
SHALLOW, DEEP = Law(0.5, (0.6, -6.0, -6.0, -6.0, -6.0)), Law(0.5, (0.6, 3.0, 3.0, 3.0, 3.0))
ONE_HOT = Law(0.5, (0.0,) * POSITIONS, one_hot=1.0)
THIRD_ONE_HOT = replace(EASY, one_hot=1 / 3)
# A step of 64 requests takes 6.2 ms without drafts and .05 ms more with each, so a draft pays where more than about
# half of its like are accepted.
RISING = CostTable(draft=[(1, 1.0)], verify=[(1, 2.05), (1024, 53.2)])


def all_of(traces: list[Trace], steps: int) -> list[Scenario]:
    """All scenarios that the traces allow; `steps`: of a cold start."""
    found = []

    def add(name: str, make: Callable[[int], Stream], **options: object) -> None:
        found.append(Scenario(name, make, **options))  # type: ignore[arg-type]

    for trace in traces:
        add(f"cold start: {trace.name}", lambda seed, t=trace: take(replayed(t, seed), steps))
        add(
            f"at rest: {trace.name}",
            lambda seed, t=trace: take(replayed(t, seed), 3 * steps, skip=3 * steps // 2),
            same_interval=True,
        )
        add(f"4 rows: {trace.name}", lambda seed, t=trace: take(replayed(t, seed, 4), 2 * steps), same_interval=True)
    for share in (0.5, 0.25):
        for trace in traces:
            add(f"budget {share:.0%}: {trace.name}", lambda seed, t=trace: take(replayed(t, seed), steps), budget=share)
    for a, b in itertools.permutations(traces, 2):
        same = a.name.replace("gsm8k", "humaneval") == b.name
        if same and workload_name(int(a.workload[0, 0])) == "gsm8k":
            add(
                f"switch: {a.name} to humaneval",
                lambda seed, a=a, b=b: switched(replayed(a, seed), replayed(b, seed + 1, first_cluster=1000), seed),
            )
    add("switch: to a harder law", lambda seed: switched(drawn(EASY, seed), drawn(HARD, seed + 1, running=True), seed))
    for name, running in (("starved position", True), ("starved position, then all requests new", False)):
        add(
            name,
            lambda seed, r=running: switched(drawn(SHALLOW, seed), drawn(DEEP, seed + 1, running=r), seed),
            cost=RISING,
            strict=True,
        )
    add("one-hot rows, 10 % accepted", lambda seed: take(drawn(ONE_HOT, seed), steps), strict=True)
    add("a third of the rows one-hot", lambda seed: take(drawn(THIRD_ONE_HOT, seed), steps), strict=True)
    for a, b in itertools.permutations(traces, 2):
        if a.greedy and not b.greedy and b.name.startswith(a.name.removesuffix("0")):
            add(
                f"greedy and sampled: {a.name}, {b.name}",
                lambda seed, a=a, b=b: take(
                    together(replayed(a, seed), replayed(b, seed + 1, first_cluster=1000)), steps
                ),
                strict=True,
            )
    return found
