"""A simulated server: requests that walk along a trace's rows, what every way to verify serves, and at which cost.

A server always has B requests. A request walks along a row of the trace (features and exact acceptance probabilities of
its drafts) from a random place, for 60 steps on average; then the next one takes its slot. Verdicts are drawn from the
exact probabilities, with the same random numbers for every arm, and teach the arms that learn. What counts as served is
the expectation, which has no luck of the verdicts in it:

    tokens = B + sum over admitted drafts of the product of alpha up to them
    ms     = draft_ms[B] * share + verify_ms[B + admitted drafts]        share: depth / K where the drafter pays per
                                                                         position; else 1, and 0 without drafting
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from av_triton import CostTable, Settings
from benchmarks.online.arms import Arm, Integers, Ours, Peer, Step
from benchmarks.traces.quality import Trace

Floats = npt.NDArray[np.float64]

LIFETIME = 60  # steps of a request, on average
AUTOREGRESSIVE, BLOCK = ("A", "layer-skip"), ("B", "block")  # pairs of traces (benchmarks/traces/README.md)
CAPTURED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(544, 1025, 32)]


@dataclass(frozen=True)
class Deployment:
    name: str
    table: CostTable


# Eager steps start where the captured graphs end, on the same line.
DEPLOYMENTS = (
    # The sizes that SGLang prints when it profiles its steps at start-up, a line between them and beyond.
    Deployment(
        "start-up log",
        CostTable(
            draft=[(1, 1.74), (128, 7.37)],
            verify=[(8, 8.71), (16, 8.77), (1024, 42.34), (1025, 42.37), (8192, 281.0)],
            captured=CAPTURED,
        ),
    ),
    # Reading the weights costs the same up to 256 tokens; from there on arithmetic.
    Deployment(
        "wide and flat",
        CostTable(
            draft=[(1, 2.0), (512, 12.0)],
            verify=[(1, 24.0), (256, 24.0), (1024, 60.0), (1025, 60.05), (8192, 396.0)],
            captured=CAPTURED,
        ),
    ),
)


def traffic(trace: Trace, requests: int, steps: int, seed: int) -> Iterator[Step]:
    rng = np.random.default_rng(seed)
    length, rows, positions = trace.features.shape
    row, at = rng.integers(rows, size=requests), rng.integers(length, size=requests)
    fresh, greedy = np.ones(requests, bool), np.full(requests, trace.greedy)
    for _ in range(steps):
        uniform = rng.random((requests, positions), np.float32)
        hidden = None if trace.hidden is None else trace.hidden[at, row]
        log_q = trace.extra["log_q_sampled"][at, row].astype(np.float32) if "log_q_sampled" in trace.extra else None
        yield Step(trace.features[at, row], trace.alpha[at, row], uniform, greedy, fresh, row.copy(), hidden, log_q)
        at = (at + 1) % length
        fresh = rng.random(requests) < 1 / LIFETIME
        count = int(fresh.sum())
        row[fresh], at[fresh] = rng.integers(rows, size=count), rng.integers(length, size=count)


class Fixed:
    """Verifies `length` drafts of every request; 0: does not draft."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.p = np.zeros(0, np.float32)

    def admit(self, step: Step) -> tuple[Integers, int]:
        return np.full(len(step.features), self.length), self.length

    def observe(self, accepted: Integers, admitted: Integers) -> None: ...


def survival(step: Step) -> Floats:
    """float64 [B, K], the exact probability that a draft and all before it are accepted."""
    return np.cumprod(step.alpha, 1, dtype=np.float64)


@dataclass(frozen=True)
class Server:
    """planned: the costs that the planners believe; None: the true ones."""

    trace: Trace
    deployment: Deployment
    requests: int
    settings: Settings
    planned: CostTable | None = None

    @property
    def positions(self) -> int:
        return self.trace.features.shape[-1]

    def costs(self, table: CostTable) -> tuple[float, Floats]:
        """(ms of drafting all K positions, ms of verification by admitted drafts [B * K + 1])."""
        dense = table.dense(self.requests, self.requests * (self.positions + 1))
        return float(dense.draft[self.requests]), dense.verify[self.requests :]

    @cached_property
    def true_costs(self) -> tuple[float, Floats]:
        return self.costs(self.deployment.table)

    def milliseconds(self, depth: int, drafts: int) -> float:
        draft_ms, verify_ms = self.true_costs
        share = depth / self.positions if self.settings.autoregressive else float(depth > 0)
        return draft_ms * share + float(verify_ms[drafts])

    def ours(self, theta: Floats | None = None, head: bool = False) -> Ours:
        """Learning, or with the coefficients of an offline fit. head: on the trace's hidden states."""
        table = self.planned or self.deployment.table
        size = self.trace.hidden.shape[-1] if head and self.trace.hidden is not None else None
        return Ours(self.requests, self.positions, self.settings, table, theta, size)

    def peer(self) -> Peer:
        draft_ms, verify_ms = self.costs(self.planned or self.deployment.table)
        return Peer(self.requests, self.positions, draft_ms + verify_ms)

    def serve(self, arm: Arm, steps: Sequence[Step], first: int = 0) -> float:
        """Tokens per second of the arm over the steps from `first` on; it sees and learns from all."""
        tokens = milliseconds = 0.0
        for number, step in enumerate(steps):
            admitted, depth = arm.admit(step)
            arm.observe(step.accepted(admitted), admitted)
            if number >= first:
                tokens += self.requests + float(survival(step)[np.arange(self.positions) < admitted[:, None]].sum())
                milliseconds += self.milliseconds(depth, int(admitted.sum()))
        return 1e3 * tokens / milliseconds

    def choices(self, step: Step) -> tuple[Floats, Floats]:
        """(tokens, ms) of the best `n` drafts by true survival, for every n and every depth the drafter may take, 0 for
        no drafting among them."""
        s = survival(step)
        order = np.argsort(-s, axis=None, kind="stable")
        ranked, position = s.ravel()[order], order % self.positions
        tokens, milliseconds = [], []
        for depth in range(self.positions + 1) if self.settings.autoregressive else (0, self.positions):
            gained = np.concatenate(([0.0], np.cumsum(ranked[position < depth])))
            tokens.append(self.requests + gained)
            milliseconds.append(self.milliseconds(depth, 0) - self.true_costs[1][0] + self.true_costs[1][: len(gained)])
        return np.concatenate(tokens), np.concatenate(milliseconds)

    def oracle(self, steps: Sequence[Step], tolerance: float = 1e-9) -> tuple[float, float]:
        """Tokens per second where the true survivals of the current step are known; neither is lossless.

        (at most: no choice of drafts, or of none, serves more over all these steps, for every step maximises
        tokens - rate * ms at the best rate there is (Dinkelbach's iteration); step by step: tokens / ms of each step
        alone, the planner's criterion).
        """
        picks = []
        for step in steps:
            tokens, milliseconds = self.choices(step)
            best = int(np.argmax(tokens / milliseconds))
            picks.append((tokens[best], milliseconds[best]))
        greedy = rate = math.fsum(t for t, _ in picks) / math.fsum(m for _, m in picks)
        while True:
            picks = []
            for step in steps:
                tokens, milliseconds = self.choices(step)
                best = int(np.argmax(tokens - rate * milliseconds))
                picks.append((tokens[best], milliseconds[best]))
            before, rate = rate, math.fsum(t for t, _ in picks) / math.fsum(m for _, m in picks)
            if rate <= before * (1 + tolerance):
                return 1e3 * rate, 1e3 * greedy


def settings_for(trace: Trace) -> Settings:
    """By the trace's pair: an autoregressive drafter pays per position. ValueError where the pair is not known."""
    pair = trace.name.partition("_")[0]
    if pair not in AUTOREGRESSIVE + BLOCK:
        raise ValueError(
            f"{trace.name}: whether drafter {pair!r} pays per position is not known; let the trace's name begin with "
            f"one of {', '.join(AUTOREGRESSIVE)} (it does) and {', '.join(BLOCK)} (it does not), and _"
        )
    return Settings(autoregressive=pair in AUTOREGRESSIVE)


def misjudged(table: CostTable, factor: float) -> CostTable:
    """The table with a rise over its smallest size that is `factor` times as steep."""
    first = table.verify[0][1]
    return msgspec.structs.replace(table, verify=[(n, first + factor * (ms - first)) for n, ms in table.verify])
