"""The additions to the article's score, restated in numpy: an offset per request, and an online linear head.

    z_k = w f_k + b_k                                 the article's estimator; it learns as if there were nothing else
    p_k = sigmoid(z_k + g_offset o + g_head c_k)      o: of the request's slot. c_k = v . x_k. g: gates, 0 or 1

Labels are verdicts, or exact acceptance probabilities: y_k with weight omega_k. All sums are over labelled drafts.

- **Offset.** o = R / (V + prior), R = sum omega (y - sigmoid(z)), V = sum omega sigmoid(z) (1 - sigmoid(z)) over the
  request so far. The prior is the inverse variance of the requests' true offsets.
- **Inputs.** x = (history, unit row): the history is (log q(x_{k-1}) + 1) / 2, 0 at the first position; the row is
  u / |u|, u_i = clip((h_i - mean_i) / deviation_i, +-4), of the drafter's hidden state h. No scale of h changes it, and
  |x| is bounded.
- **Head.** v starts at 0. Whenever 32 labels or more have come in: g = sum omega (y - p) x / sum omega with the gates
  taken as open, then Adagrad: s = (1 - 1/256) s + g^2, v += rate g / sqrt(s). It forgets, so the steps stay large
  enough to follow a new workload. With weight r = labels / (labels so far, at most 4096), mean += r deviation <u> and
  variance *= 1 + r (<u^2> - 1), <.> over these labels, from 0 and 1: about the old mean and of clipped values, so that
  it finds any scale from there.
- **Gate.** S += sum omega (loss without - loss with), in nats, after each step, S kept within +-bound; open where
  S > 0: a CUSUM test. S is -bound until the coefficients have been refitted on 4096 labels: to be ahead of coefficients
  that still move is little evidence, and the nats that a gate can lose are few per label by then. Were the score
  without the addition true, e^-bound would bound the chance that a run of labels opens it. The bound is 4 for the
  offset, which has no coefficients, and 8 for the head, with hundreds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from benchmarks.score.streams import Batch, Mask

Floats = npt.NDArray[np.float64]

CLIP = 4.0  # standard deviations of a coordinate; log-odds of an offset or a correction
OFFSET_BOUND, HEAD_BOUND = 4.0, 8.0  # nats
EVIDENCE_FROM = 4096  # labels
RATE, UPDATE, FORGET, MEMORY = 0.1, 32, 1 / 256, 4096


@dataclass(frozen=True)
class Additions:
    """Which there are. exact: labels are acceptance probabilities, not verdicts. offset: its prior. gated: as above;
    False: always open."""

    exact: bool = False
    offset: float | None = None
    history: bool = False
    hidden: bool = False
    gated: bool = True


def softplus(z: Floats) -> Floats:
    return np.logaddexp(0.0, z)


class Base:
    """The article's estimator with the refits of `av_triton.ops.refit`, in float64."""

    def __init__(self, positions: int, slope: float = 0.5, interval: int = 32) -> None:
        self.slope, self.intercepts, self.interval = slope, np.full(positions, -0.2), interval
        self.past = np.zeros(positions)
        self.sums = np.zeros((6, positions))
        self.steps = 0

    def log_odds(self, f: Floats) -> Floats:
        return self.slope * f + self.intercepts

    def observe(self, f: Floats, y: Floats, omega: Floats) -> None:
        p = expit(self.log_odds(f))
        w, r = omega * p * (1 - p), omega * (y - p)
        self.sums += np.stack([(w * f * f).sum(0), (w * f).sum(0), w.sum(0), (r * f).sum(0), r.sum(0), omega.sum(0)])
        self.steps += 1
        if self.steps % self.interval == 0:
            self._refit()

    def _refit(self, ridge: float = 1e-3, damping: float = 50.0, memory: float = 8.0) -> None:
        a, b, c, h, g, n = self.sums

        def damped(step: Floats, information: Floats, n: Floats, past: Floats) -> Floats:
            m = np.where(step * step * information > 9, n, np.minimum(past + n, memory * n))
            moved: Floats = step * n / (m + damping)
            return moved

        c = c + ridge
        information = a.sum() + ridge - (b * b / c).sum()
        dw = damped((h.sum() - (b * g / c).sum()) / information, information, n.sum(), self.past.sum())
        dw = max(float(np.clip(dw, -0.1, 0.1)), -self.slope)
        db = np.where(n > 0, damped((g - b * dw) / c, c, n, self.past), 0.0).clip(-2, 2)
        self.slope, self.intercepts, self.past = self.slope + dw, self.intercepts + db, self.past + n
        self.sums[:] = 0


class Gate:
    def __init__(self, bound: float) -> None:
        self.bound, self.evidence = bound, -bound

    @property
    def open(self) -> bool:
        return self.evidence > 0

    def observe(self, gain: float) -> None:
        """gain: nats by which a step's labels were predicted better with the addition."""
        self.evidence = float(np.clip(self.evidence + gain, -self.bound, self.bound))


class Head:
    """`scalars` inputs as they are, then a hidden state of `width` coordinates."""

    rate, update, forget, clip = RATE, UPDATE, FORGET, CLIP

    def __init__(self, scalars: int, width: int) -> None:
        self.scalars = scalars
        self.v, self.squares, self.gradient = np.zeros((3, scalars + width))
        self.mean, self.variance = np.zeros(width), np.ones(width)
        self.first, self.second = np.zeros((2, width))
        self.labels = self.seen = 0.0

    def standardised(self, hidden: npt.NDArray[np.floating]) -> Floats:
        u: Floats = ((hidden - self.mean) / np.sqrt(self.variance)).clip(-self.clip, self.clip)
        return u

    def inputs(self, scalars: Floats, u: Floats) -> Floats:
        """[..., scalars + width]"""
        return np.concatenate([scalars, self.row(u)], -1)

    def row(self, u: Floats) -> Floats:
        found: Floats = u / np.maximum(np.linalg.norm(u, axis=-1, keepdims=True), 1e-6)
        return found

    def observe(self, x: Floats, u: Floats, residual: Floats, omega: Floats) -> None:
        """x [B, K, n], u [B, K, d]; residual, omega [B, K]."""
        every = ((0, 1), (0, 1))
        self.gradient += np.tensordot(omega * residual, x, every)
        self.first += np.tensordot(omega, u, every)
        self.second += np.tensordot(omega, u * u, every)
        self.labels += omega.sum()
        if self.labels < self.update:
            return
        self.step(self.gradient / self.labels)
        self.seen = min(self.seen + self.labels, MEMORY)
        weight = min(self.labels / self.seen, 1.0)
        m, q = self.first / self.labels, self.second / self.labels
        self.mean += weight * m * np.sqrt(self.variance)
        self.variance = (self.variance * (1 + weight * (q - 1))).clip(1e-12)
        self.gradient[:] = self.first[:] = self.second[:] = 0
        self.labels = 0.0

    def step(self, g: Floats) -> None:
        self.squares = (1 - self.forget) * self.squares + g * g
        self.v += self.rate * g / (np.sqrt(self.squares) + 1e-8)


class Restated:
    """The estimator with additions. p: float64 [B, K], of the last batch."""

    def __init__(
        self,
        slots: int,
        positions: int,
        width: int,
        additions: Additions,
        greedy: bool = False,
        head: type[Head] = Head,
    ) -> None:
        self.a = a = additions
        self.base = Base(positions, slope=0.9 if greedy else 0.5)
        self.residuals, self.informations = np.zeros((2, slots))
        self.offset_gate, self.head_gate = Gate(OFFSET_BOUND), Gate(HEAD_BOUND)
        self.head = head(int(a.history), width if a.hidden else 0)
        self.has_head = a.history or a.hidden
        self.log_odds: tuple[Floats, Floats, Floats] | None = None

    def _inputs(self, batch: Batch) -> tuple[Floats, Floats]:
        log_q = batch.rounds.log_q.astype(np.float64)
        history = np.concatenate([np.zeros((len(log_q), 1)), (log_q[:, :-1] + 1) / 2], 1)[..., None]
        u = self.head.standardised(batch.rounds.hidden[..., : len(self.head.mean)])
        return self.head.inputs(history[..., : self.head.scalars], u), u

    def score(self, batch: Batch) -> Floats:
        self.residuals[batch.slots[batch.fresh]] = self.informations[batch.slots[batch.fresh]] = 0.0
        z = self.base.log_odds(batch.rounds.features.astype(np.float64))
        offset = np.zeros((len(z), 1))
        if self.a.offset is not None:
            r, v = self.residuals[batch.slots], self.informations[batch.slots]
            offset[:, 0] = (r / (v + self.a.offset)).clip(-CLIP, CLIP)
        correction = np.zeros_like(z)
        if self.has_head:
            self.x, self.u = self._inputs(batch)
            correction = (self.x @ self.head.v).clip(-CLIP, CLIP)
        with_offset = z + offset if self.offset_gate.open or not self.a.gated else z
        self.log_odds = z, z + offset, with_offset
        self.correction = correction
        p: Floats = expit(with_offset + correction if self.head_gate.open or not self.a.gated else with_offset)
        return p

    def observe(self, batch: Batch) -> None:
        """Labels of the batch that was scored last."""
        assert self.log_odds is not None
        y, omega = labels(batch, self.a.exact)
        z, offset, below = self.log_odds
        above = below + self.correction

        def gain(without: Floats, adds: Floats) -> float:
            return float((omega * (softplus(without) - softplus(adds) + y * (adds - without))).sum())

        if self.base.past.sum() >= EVIDENCE_FROM:
            self.offset_gate.observe(gain(z, offset))
            self.head_gate.observe(gain(below, above))
        p = expit(z)
        self.residuals[batch.slots] += (omega * (y - p)).sum(1)
        self.informations[batch.slots] += (omega * p * (1 - p)).sum(1)
        if self.has_head:
            self.head.observe(self.x, self.u, y - expit(above), omega)
        self.base.observe(batch.rounds.features.astype(np.float64), y, omega)


def labels(batch: Batch, exact: bool) -> tuple[Floats, Floats]:
    """(y, omega), float64 [B, K]; omega is 0 where nothing may be learned."""
    taught: Mask = batch.taught[:, None]
    if exact:
        return batch.rounds.alpha.astype(np.float64), batch.rounds.weights * taught
    k, accepted = np.arange(batch.rounds.alpha.shape[1]), batch.accepted[:, None]
    return (k < accepted).astype(np.float64), ((k <= accepted) & taught).astype(np.float64)
