"""What decides which drafts are verified: the project's verifier and the released peer's rule, behind one interface.

Both see the same steps: features, exact acceptance probabilities and the random numbers that draw the verdicts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from av_triton import AdaptiveVerifier, CostTable, Settings
from benchmarks.peers.adaptive_rule import PeerRule
from benchmarks.traces.quality import accepted_before_rejection, drafts_for, logits_for

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Step:
    """One step of B requests with K drafts each.

    features: float32 [B, K], logit(q_max). alpha: float32 [B, K], exact acceptance probabilities. uniform: float32
    [B, K]; a draft is accepted where it is below alpha. greedy, fresh: bool [B], the request's kind, and whether it is
    new in this step. cluster: int64 [B], what the row's drafts came from (a prompt). hidden: float32 [B, K, d], the
    drafter's hidden states, and log_q: float32 [B, K], log-probabilities of the drafts; where they are known.
    """

    features: Floats
    alpha: Floats
    uniform: Floats
    greedy: Mask
    fresh: Mask
    cluster: Integers
    hidden: Floats | None = None
    log_q: Floats | None = None

    def accepted(self, admitted: Integers | None = None) -> Integers:
        """int64 [B], drafts before the first rejection among the `admitted` ones (None: all)."""
        verdicts = self.uniform < self.alpha
        if admitted is not None:
            verdicts &= np.arange(verdicts.shape[1]) < admitted[:, None]
        return accepted_before_rejection(verdicts)


class Arm(Protocol):
    """p: float32 [B, K], the acceptance probabilities by which the last step was decided."""

    p: Floats

    def admit(self, step: Step) -> tuple[Integers, int]:
        """(int64 [B], drafts to verify per row; positions that were drafted)."""

    def observe(self, accepted: Integers, admitted: Integers) -> None: ...


class Ours:
    """`AdaptiveVerifier`, fed by its public interface.

    cost: None: the settings' fixed budget. theta: float64 [1 + K], coefficients that stay as they are; None: learned.
    With `Settings.lag` the budget is the proposal of so many steps before, as in an overlapped runtime. hidden_size: of
    the steps' hidden states, for a head, which is then taught exact labels as well; None: no head, and verdicts.
    """

    def __init__(
        self,
        requests: int,
        positions: int,
        settings: Settings,
        cost: CostTable | None = None,
        theta: npt.NDArray[np.float64] | None = None,
        hidden_size: int | None = None,
    ) -> None:
        self.verifier = AdaptiveVerifier(requests, positions, cost=cost, settings=settings, hidden_size=hidden_size)
        self.exact: torch.Tensor | None = None
        self.settings, self.learns = settings, theta is None
        self.slots = torch.arange(requests)
        self.depth = self.positions = positions
        self.proposals = [requests * positions] * settings.lag
        self.p = np.ones((requests, positions), np.float32)
        if theta is not None:
            state = self.verifier.estimator.state
            state.slopes.fill_(float(theta[0]))
            state.intercepts[:, :positions] = torch.from_numpy(theta[1:]).float()

    def admit(self, step: Step) -> tuple[Integers, int]:
        new = np.flatnonzero(step.fresh)
        if len(new):
            strata = torch.from_numpy(step.greedy[new].astype(np.int32))
            self.verifier.reset(torch.from_numpy(new), strata)
        depth = self.depth
        if depth:
            self.p[:, :depth] = self._score(step, depth).numpy()
        budget = self.proposals.pop(0) if self.settings.lag else None
        plan = self.verifier.plan(self.slots, torch.full_like(self.slots, depth), budget=budget)
        if self.settings.lag:
            self.proposals.append(int(plan.proposal[0]))
        if self.settings.autoregressive:
            self.depth = int(plan.draft_depth)
        return plan.admitted.numpy().astype(np.int64), depth

    def _score(self, step: Step, depth: int) -> torch.Tensor:
        features = step.features[:, :depth]
        if self.verifier.estimator.hidden_size is None or step.hidden is None or step.log_q is None:
            return self.verifier.score(logits_for(features), self.slots)
        self.exact = torch.from_numpy(step.alpha)
        logits, tokens = drafts_for(features, step.log_q[:, :depth])
        hidden = torch.from_numpy(np.ascontiguousarray(step.hidden[:, :depth]))
        return self.verifier.score(logits, self.slots, tokens=tokens, hidden=hidden)

    def observe(self, accepted: Integers, admitted: Integers) -> None:
        if self.learns:
            self.verifier.observe(self.slots, torch.from_numpy(accepted), acceptance=self.exact)


class Peer:
    """The released peer's rule. costs: as `PeerRule`; None: `fixed` drafts a step."""

    def __init__(
        self, requests: int, positions: int, costs: npt.NDArray[np.float64] | None = None, fixed: int = 0
    ) -> None:
        self.rule = PeerRule(requests, positions, costs, fixed)

    @property
    def p(self) -> Floats:
        return self.rule.p

    def admit(self, step: Step) -> tuple[Integers, int]:
        return self.rule.admit(step.features, step.fresh), step.features.shape[1]

    def observe(self, accepted: Integers, admitted: Integers) -> None:
        self.rule.observe(accepted, admitted)


def predictions(arm: Arm, steps: Iterable[Step]) -> Floats:
    """float32 [T, B, K]: the arm over the steps, each prediction made before its verdict is seen."""
    found = []
    for step in steps:
        admitted, _ = arm.admit(step)
        found.append(arm.p.copy())
        arm.observe(step.accepted(admitted), admitted)
    return np.stack(found)
