"""The adaptive verification of vLLM 0.33.0, restated in numpy: what its released estimator and planner decide.

Restated from the published source (`vllm/v1/worker/gpu/spec_decode/` and `model_runner.py`), to be compared with; no
line is copied. What differs from `av_triton`:

- the feature is -log(sumexp - 1) in float32, which cancels for confident rows;
- sums are float32, one set of coefficients serves greedy and sampled requests, a refit comes every 100 steps, and only
  a NaN or a negative slope stops a step, however large it is;
- the budget is chosen on the CPU from the confidences of the drafts before these (computed two steps before the one
  that uses them), in which a new request counts as certain;
- nothing but the budget is verified: no exploration, and nothing more where a captured graph would run anyway;
- the drafter always drafts all K positions.
"""

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from benchmarks.peers.budget import budget

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

REFIT_INTERVAL, DAMPING, RIDGE = 100, np.float32(50), np.float32(1e-3)
FIRST_SLOPE, FIRST_INTERCEPT = 0.5, -0.2
LARGEST_FEATURE = 40


def cancelled(features: Floats) -> Floats:
    """logit(q_max) as float32 gives it when the sum over all tokens is taken first and 1 subtracted from it."""
    others = np.float32(1) + np.exp(-features) - np.float32(1)
    with np.errstate(divide="ignore"):
        return -np.log(others).clip(-LARGEST_FEATURE, LARGEST_FEATURE)


class PeerEstimator:
    """p = sigmoid(w f + b_k), refitted by one damped Newton step on the sums of the last 100 steps; all float32."""

    def __init__(self, positions: int) -> None:
        self.slope = np.float32(FIRST_SLOPE)
        self.intercepts = np.full(positions, FIRST_INTERCEPT, np.float32)
        self.steps = 0
        self._clear()

    def _clear(self) -> None:
        positions = len(self.intercepts)
        self.info = np.zeros((3, positions), np.float32)
        self.gradient = np.zeros((2, positions), np.float32)
        self.counts = np.zeros(positions, np.float32)

    def score(self, features: Floats) -> Floats:
        """float32 [B, K] -> acceptance probabilities [B, K]."""
        p: Floats = expit(self.slope * features + self.intercepts)
        return p

    def observe(self, features: Floats, p: Floats, accepted: Integers, admitted: Integers) -> None:
        """Every draft up to and including the first rejection, where it was verified, is a label."""
        k = np.arange(features.shape[1])
        labelled = (k < admitted[:, None]) & (k <= accepted[:, None])
        weight = np.where(labelled, p * (1 - p), np.float32(0))
        residual = np.where(labelled, (k < accepted[:, None]).astype(np.float32) - p, np.float32(0))
        self.info += np.stack([(weight * features**power).sum(0) for power in (2, 1, 0)])
        self.gradient += np.stack([(residual * features).sum(0), residual.sum(0)])
        self.counts += labelled.sum(0, dtype=np.float32)
        self.steps += 1
        if self.steps % REFIT_INTERVAL == 0:
            self._refit()

    def _refit(self) -> None:
        (a, b, c), (h, g), n = self.info, self.gradient, self.counts
        c = c + RIDGE
        with np.errstate(all="ignore"):
            step = (h.sum() - (b * g / c).sum()) / (a.sum() + RIDGE - (b * b / c).sum())
            step *= n.sum() / (n.sum() + DAMPING)
            step = step if self.slope + step >= 0 else np.float32(0)  # false for a NaN
            moves = (g - b * step) / c * (n / (n + DAMPING))
        self.slope = self.slope + step
        self.intercepts = self.intercepts + np.where(np.isnan(moves), np.float32(0), moves)
        self._clear()


def ranked_prefixes(survival: Floats, drafts: int) -> Integers:
    """int64 [B], drafts admitted per row when the `drafts` best survivals [B, K] of the batch are."""
    winners = np.argsort(-survival, axis=None, kind="stable")[:drafts]
    return np.bincount(winners // survival.shape[1], minlength=len(survival))


class PeerRule:
    """A budget from the confidences of the drafts before these, spent on the best survivals of these.

    costs: float64 [B * K + 1], milliseconds of a step by the drafts it verifies; None: `fixed` drafts are verified.
    """

    def __init__(
        self, requests: int, positions: int, costs: npt.NDArray[np.float64] | None = None, fixed: int = 0
    ) -> None:
        self.estimator = PeerEstimator(positions)
        self.costs, self.fixed = costs, fixed
        self.p = np.ones((requests, positions), np.float32)
        self.features = np.zeros_like(self.p)

    def admit(self, features: Floats, fresh: npt.NDArray[np.bool_]) -> Integers:
        """int64 [B]; features: logit(q_max), float32 [B, K]; fresh: bool [B], the row's request is new in this step."""
        before = np.where(fresh[:, None], np.float32(1), self.p)
        self.features = cancelled(features)
        self.p = self.estimator.score(self.features)
        drafts = self.fixed if self.costs is None else budget(before, self.costs)
        return ranked_prefixes(np.cumprod(self.p, 1), drafts)

    def observe(self, accepted: Integers, admitted: Integers) -> None:
        """accepted, admitted: int64 [B], of the drafts that `admit` saw last."""
        self.estimator.observe(self.features, self.p, accepted, admitted)
