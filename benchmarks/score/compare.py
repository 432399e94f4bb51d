"""Runs several estimators over the same stream of batches, and sums up what they lost.

Every draft is scored before its label is seen, by its expected log-loss under the exact acceptance probability alpha,
-alpha log p - (1 - alpha) log(1 - p) in nats, weighted by the probability that it gets a label.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks import intervals
from benchmarks.online.compare import expected_log_losses
from benchmarks.score.arms import Arm
from benchmarks.score.streams import Batch, Integers

Floats = npt.NDArray[np.float64]

SPANS = (0, 500, 1000, 2000, 3000, 5000)  # labels that were learned from, where a span of the learning curve begins
SETTLED = SPANS[-1]
GRID = 300  # bins of p in which drafts are counted for AUC and ECE
BINS = 15  # of the ECE
WINDOW = 1000  # labels

Make = Callable[[int, int, int, bool], Arm]  # (slots, positions, width of the hidden state, greedy)


class Run(msgspec.Struct):
    """Weights and losses are sums, one loss per arm. spans: (prompt, span, weight, *losses). steps: (weight, *losses).
    grid: [arms, 2, GRID], weight of the rejected and of the accepted drafts by bin of p, in the last span."""

    spans: list[list[float]]
    steps: list[list[float]]
    grid: list[list[list[float]]]


def run(stream: Iterable[Batch], makes: Sequence[Make], slots: int, held_out: bool = False) -> Run:
    """held_out: scored are the drafts that nobody learns from; else all of them."""
    arms: list[Arm] = []
    seen = 0.0
    keys: list[Floats] = []
    rows: list[Floats] = []
    steps = []
    grid = np.zeros((len(makes), 2, GRID))
    for batch in stream:
        if not arms:
            _, positions, width = batch.rounds.hidden.shape
            arms = [make(slots, positions, width, bool(batch.rounds.greedy[0])) for make in makes]
        alpha = batch.rounds.alpha.astype(np.float64)
        weight = batch.rounds.weights
        taught = batch.taught[:, None]
        scored = weight * ~taught if held_out else weight
        span = int(np.searchsorted(SPANS, seen, "right")) - 1
        losses = []
        for arm, counts in zip(arms, grid, strict=True):
            p = arm.score(batch).astype(np.float64)
            losses.append((scored * expected_log_losses(p, alpha)).sum(1))
            if SPANS[span] == SETTLED:
                place = np.minimum((p * GRID).astype(np.int64), GRID - 1).ravel()
                for outcome, share in enumerate((1 - alpha, alpha)):
                    counts[outcome] += np.bincount(place, (scored * share).ravel(), GRID)
            arm.observe(batch)
        found = np.stack([scored.sum(1), *losses], 1)
        keys.append(np.stack([batch.rounds.prompt, np.full(len(found), span)], 1))
        rows.append(found)
        steps.append(found.sum(0).tolist())
        seen += float((weight * taught).sum())
    unique, place = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    sums = np.zeros((len(unique), rows[0].shape[1]))
    np.add.at(sums, place.ravel(), np.concatenate(rows))
    return Run(np.concatenate([unique, sums], 1).tolist(), steps, grid.tolist())


@dataclass(frozen=True)
class Result:
    """Several runs of the same arms, pooled. Differences are to the arm `against`, the first where none is given."""

    prompt: Integers
    span: Integers
    weight: Floats
    losses: Floats  # [n, arms]
    grid: Floats
    runs: list[Run]

    @classmethod
    def of(cls, runs: list[Run]) -> "Result":
        table = np.concatenate([np.array(each.spans) for each in runs])
        grid = np.sum([np.array(each.grid) for each in runs], 0)
        key = table[:, :2].astype(np.int64)
        return cls(key[:, 0], key[:, 1], table[:, 2], table[:, 3:], grid, runs)

    def difference(self, arm: int, first: int = 0, last: int = len(SPANS), against: int = 0) -> intervals.Interval:
        """Mean log-loss of the arm minus that of `against`, in the spans from `first` to `last`; the bootstrap draws
        whole prompts."""
        inside = (self.span >= first) & (self.span <= last)
        gap = (self.losses[:, arm] - self.losses[:, against])[inside]
        weight = self.weight[inside]
        if not weight.sum():
            return intervals.Interval(*(float("nan"),) * 3)

        def mean(at: Integers) -> float:
            return float(gap[at].sum() / weight[at].sum())

        return intervals.of(mean, self.prompt[inside], resamples=1000)

    def labels(self, first: int = 0) -> float:
        return float(self.weight[self.span >= first].sum())

    def log_loss(self, arm: int, first: int = 0) -> float:
        inside = self.span >= first
        return float(self.losses[inside, arm].sum() / self.weight[inside].sum())

    def auc(self, arm: int) -> float:
        """Share of pairs of a rejected and an accepted draft in the right order, in the last span."""
        rejected, accepted = self.grid[arm]
        below = np.cumsum(rejected) - rejected
        return float((accepted * (below + rejected / 2)).sum() / (rejected.sum() * accepted.sum()))

    def ece(self, arm: int) -> float:
        """Expected calibration error over 15 bins of equal width, in the last span."""
        rejected, accepted = self.grid[arm].reshape(2, BINS, -1).sum(2)
        middle = (np.arange(GRID) + 0.5) / GRID
        predicted = (self.grid[arm].sum(0) * middle).reshape(BINS, -1).sum(1)
        return float(np.abs(predicted - accepted).sum() / (rejected + accepted).sum())

    def worst_window(self, arm: int, against: int = 0) -> float:
        """The largest mean difference over consecutive steps of about `WINDOW` labels, of any run."""
        return max(worst(each, arm, against) for each in self.runs)

    def highest_mean(self, arm: int, against: int = 0) -> float:
        """The largest mean difference over all labels so far, at any point from `WINDOW` labels on, of any run."""
        found = []
        for each in self.runs:
            steps = np.array(each.steps)
            weight = steps[:, 0].cumsum()
            mean = np.cumsum(steps[:, 1 + arm] - steps[:, 1 + against]) / weight
            found.append(mean[min(int(np.searchsorted(weight, WINDOW)), len(mean) - 1) :].max())
        return float(max(found))

    def deepest(self, arm: int, against: int = 0) -> float:
        """The largest sum of differences over consecutive steps, nats, of any run."""
        found = 0.0
        for each in self.runs:
            steps = np.array(each.steps)
            total = np.concatenate([[0.0], np.cumsum(steps[:, 1 + arm] - steps[:, 1 + against])])
            found = max(found, float((total - np.minimum.accumulate(total)).max()))
        return found


def worst(run: Run, arm: int, against: int) -> float:
    steps = np.array(run.steps)
    gap = np.concatenate([[0.0], np.cumsum(steps[:, 1 + arm] - steps[:, 1 + against])])
    weight = np.concatenate([[0.0], np.cumsum(steps[:, 0])])
    end = np.searchsorted(weight, weight + WINDOW)
    start = np.flatnonzero(end < len(weight))
    if not len(start):
        return float(gap[-1] / weight[-1])
    means: Floats = (gap[end[start]] - gap[start]) / (weight[end[start]] - weight[start])
    return float(means.max())
