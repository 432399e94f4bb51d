"""Quality of the online estimator on acceptance traces, next to raw q_max and an offline fit of the same feature.

A trace is what a decode loop that verified every draft has recorded (format: README.md). The drafts' features go
through the project's own AcceptanceEstimator step by step, in the recorded order, every row in a slot of its own; every
prediction is made before the verdict is seen. The verdicts of the first pass are the recorded ones; those of later
passes are drawn anew from the exact acceptance probabilities, for the traces are short.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from av_triton import GREEDY, SAMPLED, AcceptanceEstimator, Coefficients, Settings

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

COLUMNS = ("workload", "row", "step", "pos", "f", "alpha", "accept")
WORKLOADS = ("gsm8k", "humaneval", "mt-bench", "specbench-sum", "vicuna", "summaries")
EXTRA = ("prompt", "is_top1", "log_q_sampled", "entropy", "gap")
BINS = 15
NEARLY = 2e-3  # this close to the most likely token, a draft is it: traces may have half precision
SMALLEST = 1e-7  # probabilities are kept this far from 0 and 1 in a log-loss


@dataclass(frozen=True)
class Trace:
    """T steps of B rows with K drafts each.

    features: float32 [T, B, K], logit(q_max). alpha: float32 [T, B, K], exact acceptance probabilities.
    accepted: int64 [T, B], recorded verdicts. workload: int64 [T, B]. greedy: the drafts were the most likely tokens.
    head: float32 [T, B, K], log-odds of a trained confidence head, where the trace has them. extra: [T, B, K] by name,
    those of EXTRA that the trace has. hidden: float32 [T, B, K, d], the drafter's last hidden states, if it has them.
    """

    name: str
    features: npt.NDArray[np.float32]
    alpha: npt.NDArray[np.float32]
    accepted: Integers
    workload: Integers
    greedy: bool
    head: npt.NDArray[np.float32] | None
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    hidden: npt.NDArray[np.float32] | None = None

    def of_rows(self, rows: slice) -> "Trace":
        """These rows alone."""
        return replace(
            self,
            features=self.features[:, rows],
            alpha=self.alpha[:, rows],
            accepted=self.accepted[:, rows],
            workload=self.workload[:, rows],
            head=None if self.head is None else self.head[:, rows],
            extra={name: values[:, rows] for name, values in self.extra.items()},
            hidden=None if self.hidden is None else self.hidden[:, rows],
        )

    def in_batches(self, rows: int) -> "Trace":
        """The same drafts with `rows` rows per step, one group of rows after the other; rows left over are dropped."""
        groups = self.features.shape[1] // rows
        if not groups:
            raise ValueError(
                f"{self.name} has {self.features.shape[1]} rows: no batch of {rows} can be taken from them"
            )

        def regroup(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate([values[:, i * rows : (i + 1) * rows] for i in range(groups)])

        return replace(
            self,
            features=regroup(self.features),
            alpha=regroup(self.alpha),
            accepted=regroup(self.accepted),
            workload=regroup(self.workload),
            head=None if self.head is None else regroup(self.head),
            extra={name: regroup(values) for name, values in self.extra.items()},
            hidden=None if self.hidden is None else regroup(self.hidden),
        )


def workload_name(code: int) -> str:
    return WORKLOADS[code] if code < len(WORKLOADS) else str(code)


def accepted_before_rejection(verdicts: Mask) -> Integers:
    """bool [..., K], the verdict of every draft -> int64 [...], drafts before the first rejection."""
    accepted: Integers = np.cumprod(verdicts, -1, dtype=np.int64).sum(-1)
    return accepted


def load(path: Path) -> Trace:
    """Reads a trace; ValueError where it is none: columns missing, or steps that do not hold all rows and positions."""
    try:
        file = np.load(path)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is not a readable .npz file: {error}") from None
    with file:
        missing = [name for name in COLUMNS if name not in file.files]
        if missing:
            raise ValueError(f"{path}: no column {', '.join(missing)}; benchmarks/traces/README.md has the format")
        columns = {name: file[name] for name in (*COLUMNS, "conf", *EXTRA) if name in file.files}
        hidden = hidden_states(file)
    axes = [np.unique(columns[name], return_inverse=True) for name in ("step", "row", "pos")]
    shape = tuple(len(values) for values, _ in axes)
    place = np.ravel_multi_index([index for _, index in axes], shape)
    different = len(np.unique(place))
    if not len(place) == different == math.prod(shape):
        raise ValueError(
            f"{path}: {len(place)} entries, {different} of them different, for {shape[0]} steps x {shape[1]} rows x "
            f"{shape[2]} positions; record every row and position in every step, once"
        )
    order = np.argsort(place)
    grid = {name: values[order].reshape(shape) for name, values in columns.items()}
    if not (np.isfinite(grid["f"]).all() and (grid["alpha"] >= 0).all() and (grid["alpha"] <= 1).all()):
        raise ValueError(f"{path}: f must be finite and alpha within 0 to 1")
    return Trace(
        name=path.stem,
        features=grid["f"],
        alpha=grid["alpha"],
        accepted=accepted_before_rejection(grid["accept"] != 0),
        workload=grid["workload"][..., 0].astype(np.int64),
        greedy=path.stem.endswith("_T0"),
        head=grid.get("conf"),
        extra={name: grid[name] for name in EXTRA if name in grid},
        hidden=None if hidden is None else hidden[order].reshape(*shape, -1),
    )


def hidden_states(file: Any) -> npt.NDArray[np.float32] | None:
    """float32 [n, d] of an .npz file: `hid`, or where that is of integers `hid` * `hid_step` + `hid_mean`."""
    if "hid" not in file.files:
        return None
    hidden: npt.NDArray[np.float32] = file["hid"].astype(np.float32)
    return hidden * file["hid_step"] + file["hid_mean"] if "hid_step" in file.files else hidden


def logits_for(features: npt.NDArray[np.float32]) -> torch.Tensor:
    """float32 [...] -> float32 [..., V]: logits whose logit(q_max) is the feature.

    One token at 0 and V - 1 tokens at -f - log(V - 1), V large enough for the smallest feature. The estimator is then
    fed by its public interface.
    """
    others = max(1, int(np.ceil(np.exp(-features.min(initial=0.0).astype(np.float64)))))
    logits = torch.zeros(*features.shape, others + 1)
    logits[..., 1:] = torch.from_numpy(-features - np.float32(np.log(others)))[..., None]
    return logits


def drafts_for(features: npt.NDArray[np.float32], log_q: npt.NDArray[np.float32]) -> tuple[torch.Tensor, torch.Tensor]:
    """As `logits_for`, with one token more, and the drawn tokens, int64 [...], whose log-probability is log_q."""
    f, q = features.astype(np.float64), log_q.astype(np.float64)
    complement, drawn = np.exp(-f), np.exp(q + np.logaddexp(0.0, -f))  # over the maximum's
    top = drawn >= 1 - NEARLY
    drawn = np.minimum(drawn, complement)
    rest = np.maximum(complement - np.where(top, 0.0, drawn), 0.0)
    others = max(1, int(np.ceil(rest.max(initial=0.0))))
    logits = torch.full((*features.shape, others + 2), -torch.inf)
    logits[..., 0] = 0.0
    with np.errstate(divide="ignore"):
        logits[..., 1] = torch.from_numpy(np.where(top, -np.inf, np.log(drawn)))
        logits[..., 2:] = torch.from_numpy(np.log(rest / others))[..., None]
    return logits, torch.from_numpy((~top).astype(np.int64))


@dataclass(frozen=True)
class Replay:
    """N passes over a trace of T steps, B rows, K drafts: what was predicted, and what came of it.

    predicted: float32 [N, T, B, K], before the verdict. accepted: int64 [N, T, B].
    """

    trace: Trace
    predicted: npt.NDArray[np.float32]
    accepted: Integers
    coefficients: Coefficients

    def labels(self, first: int = 0) -> "Labels":
        """The labelled drafts of the passes from `first` on, in the order in which they came."""
        trace, a = self.trace, self.accepted[first:, ..., None]
        k = np.arange(trace.features.shape[-1])
        labelled = k <= a

        def pick(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
            return np.broadcast_to(values, labelled.shape)[labelled]

        return Labels(
            feature=pick(trace.features).astype(np.float64),
            position=pick(k).astype(np.int64),
            workload=pick(trace.workload[..., None]).astype(np.int64),
            observed=pick(k < a).astype(np.float64),
            online=self.predicted[first:][labelled].astype(np.float64),
            head=None if trace.head is None else sigmoid(pick(trace.head).astype(np.float64)),
        )


@dataclass(frozen=True)
class Labels:
    """n labelled drafts: feature, observed (1 accepted, 0 rejected), online prediction, head: float64 [n]; position and
    workload: int64 [n]."""

    feature: Floats
    position: Integers
    workload: Integers
    observed: Floats
    online: Floats
    head: Floats | None


def replay(
    trace: Trace,
    passes: int,
    seed: int = 0,
    settings: Settings | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Replay:
    """Runs the estimator over the trace `passes` times; `progress` is called after each."""
    steps, rows, positions = trace.features.shape
    estimator = AcceptanceEstimator(rows, positions, settings=settings)
    slots = torch.arange(rows)
    estimator.reset(slots, torch.full((rows,), GREEDY if trace.greedy else SAMPLED, dtype=torch.int32))
    every = torch.full((rows,), positions, dtype=torch.int32)
    logits = logits_for(trace.features)
    rng = np.random.default_rng(seed)
    predicted = np.empty((passes, steps, rows, positions), np.float32)
    accepted = np.empty((passes, steps, rows), np.int64)
    for number in range(passes):
        redrawn = accepted_before_rejection(rng.random(trace.alpha.shape, np.float32) < trace.alpha)
        accepted[number] = redrawn if number else trace.accepted
        for step in range(steps):
            predicted[number, step] = estimator.score(logits[step], slots).numpy()
            estimator.observe(slots, torch.from_numpy(accepted[number, step]), every)
        progress()
    return Replay(trace, predicted, accepted, estimator.coefficients())


def sigmoid(z: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-z))


def logistic_fit(design: Floats, observed: Floats, ridge: float = 1e-3, tolerance: float = 1e-10) -> Floats:
    """Coefficients float64 [d] of least log-loss for design [n, d] and observed [n], by full-batch Newton steps.

    The ridge keeps a position without labels, or whose labels are all alike, from leaving for infinity.
    """
    theta = np.zeros(design.shape[1])

    def loss(at: Floats) -> float:
        z = design @ at
        return float((np.logaddexp(0.0, z) - observed * z).sum() + ridge / 2 * at @ at)

    for _ in range(100):
        p = sigmoid(design @ theta)
        gradient = design.T @ (observed - p) - ridge * theta
        step = np.linalg.solve(design.T @ (design * (p * (1 - p))[:, None]) + ridge * np.eye(len(theta)), gradient)
        now = loss(theta)
        while loss(theta + step) > now and abs(step).max() > tolerance:
            step /= 2
        theta = theta + step
        if abs(step).max() <= tolerance:
            return theta
    raise RuntimeError(f"no offline fit within 100 Newton steps: the last one moved by {abs(step).max():.1e}")


def shared_slope(feature: Floats, position: Integers, positions: int) -> Floats:
    """The design [n, 1 + K] of one slope and an intercept per position."""
    return np.column_stack([feature, position[:, None] == np.arange(positions)])


def offline_fit(labels: Labels, positions: int, ridge: float = 1e-3, tolerance: float = 1e-10) -> Floats:
    """float64 [1 + K]: slope and intercepts of least log-loss, on all labels at once."""
    return logistic_fit(shared_slope(labels.feature, labels.position, positions), labels.observed, ridge, tolerance)


def predict(theta: Floats, labels: Labels) -> Floats:
    """Acceptance probabilities of the offline fit."""
    return sigmoid(theta[0] * labels.feature + theta[1 + labels.position])


def log_losses(p: Floats, observed: Floats) -> Floats:
    """float64 [n], nats."""
    p = p.clip(SMALLEST, 1 - SMALLEST)
    return -np.log(np.where(observed > 0, p, 1 - p))


def area_under_curve(p: Floats, observed: Floats) -> float:
    """Share of (accepted, rejected) pairs in the right order, ties counted half; NaN where one kind is missing."""
    values, place = np.unique(p, return_inverse=True)
    hits = np.bincount(place, observed, len(values))
    misses = np.bincount(place, 1 - observed, len(values))
    pairs = hits.sum() * misses.sum()
    below = np.cumsum(misses) - misses
    return float((hits * (below + misses / 2)).sum() / pairs) if pairs else float("nan")


def bin_of(p: Floats) -> Integers:
    """int64 [n]: which of the 15 bins of equal width holds p."""
    return np.minimum((p * BINS).astype(np.int64), BINS - 1)


def reliability(p: Floats, observed: Floats) -> Iterator[tuple[float, float, int]]:
    """(mean predicted, share observed, count) of each of 15 bins of equal width that holds a draft."""
    place = bin_of(p)
    count = np.bincount(place, minlength=BINS)
    sums = np.bincount(place, p, BINS), np.bincount(place, observed, BINS)
    for n, predicted, seen in zip(count, *sums, strict=True):
        if n:
            yield predicted / n, seen / n, int(n)


def calibration_error(p: Floats, observed: Floats) -> float:
    """Expected calibration error: mean |predicted - observed| over the bins; NaN without labels."""
    error = sum(n * abs(predicted - seen) for predicted, seen, n in reliability(p, observed))
    return float(error / len(p)) if len(p) else float("nan")


@dataclass(frozen=True)
class Quality:
    """How good predictions are: area under the ROC curve, log-loss in nats, expected calibration error."""

    auc: float
    log_loss: float
    ece: float

    @classmethod
    def of(cls, p: Floats, observed: Floats) -> "Quality":
        loss = float(log_losses(p, observed).mean()) if len(p) else float("nan")
        return cls(area_under_curve(p, observed), loss, calibration_error(p, observed))


@dataclass(frozen=True)
class Report:
    """A replay judged on its second half, where the offline fit is made too (so the fit has seen its labels).

    theta: float64 [1 + K], the offline fit. predictions: by name, over `labels`.
    """

    replay: Replay
    labels: Labels
    theta: Floats
    predictions: dict[str, Floats]

    @classmethod
    def of(cls, result: Replay) -> "Report":
        labels = result.labels(len(result.predicted) // 2)
        theta = offline_fit(labels, result.trace.features.shape[-1])
        predictions = {
            "online": labels.online,
            "offline": predict(theta, labels),
            "q_max": sigmoid(labels.feature),
        }
        if labels.head is not None:
            predictions["head"] = labels.head
        return cls(result, labels, theta, predictions)

    def quality(self, mask: Mask | None = None) -> dict[str, Quality]:
        """By predictor, over the labels of `mask` (default: all)."""
        inside = np.ones(len(self.labels.observed), bool) if mask is None else mask
        return {name: Quality.of(p[inside], self.labels.observed[inside]) for name, p in self.predictions.items()}

    @property
    def excess(self) -> float:
        """Log-loss of the online estimator above that of the offline fit, nats per label."""
        quality = self.quality()
        return quality["online"].log_loss - quality["offline"].log_loss

    def cold_start(self) -> list[tuple[int, float, float]]:
        """(first label, log-loss online, log-loss of the offline fit) over spans of the labels since the first step.

        The first span has 250 labels, and every further one as many as all before it.
        """
        labels = self.replay.labels()
        online = log_losses(labels.online, labels.observed)
        offline = log_losses(predict(self.theta, labels), labels.observed)
        edges = [0, 250]
        while edges[-1] * 2 < len(online):
            edges.append(edges[-1] * 2)
        return [
            (first, float(online[first:last].mean()), float(offline[first:last].mean()))
            for first, last in itertools.pairwise([*edges, len(online)])
        ]
