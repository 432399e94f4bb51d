"""AdaptiveVerifier: estimator and planner as one object; what a runtime imports."""

import os

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from av_triton.backend import use_triton
from av_triton.cost import CostTable
from av_triton.estimator import AcceptanceEstimator, Coefficients, Drafts
from av_triton.ops import accumulate as _accumulate
from av_triton.ops import select as _select
from av_triton.planner import Plan, VerifyPlanner
from av_triton.settings import Settings


class Status(msgspec.Struct, frozen=True):
    """Whether adaptive verification is active, and why."""

    active: bool
    reason: str
    backend: str  # "torch" or "triton"
    policy: str
    steps: int
    refits: int
    explored: int  # requests verified to full depth by the exploration schedule
    bypassed: int  # segments verified in full because trimming promised too little
    additions: tuple[str, ...]  # to the log-odds, as served now: "offset" or "head", and the stratum


class AdaptiveVerifier:
    """Adaptive verification for one drafter/target pair, on one device and one stream.

    Per step: `score` (the drafter's logits), `plan` (what to verify), the target's forward, `observe` (the verdicts).
    The steady state neither synchronises with the host nor allocates; on a GPU every call is one launch (plan: two)
    that a CUDA graph can capture; with a head `score`, `sample` and `observe` are two each.

        verifier = AdaptiveVerifier(max_slots=256, num_draft_positions=7, device="cuda", cost=cost)
        verifier.reset(new_slots)
        verifier.score(draft_logits, slots)
        plan = verifier.plan(slots)
        ...                                    # verify plan.admitted drafts of each row
        verifier.observe(slots, accepted)

    Args:
        max_slots: size of the engine's request pool. num_draft_positions: K.
        device: where the logits live; of several GPUs the current one (`torch.cuda.set_device`).
        cost: step costs in milliseconds; None: verify all. settings: see `Settings`.
        max_rows: largest batch; default min(max_slots, 1024).
        hidden_size: see `AcceptanceEstimator`.
    """

    def __init__(
        self,
        max_slots: int,
        num_draft_positions: int,
        device: torch.device | str = "cpu",
        *,
        cost: CostTable | None = None,
        settings: Settings | None = None,
        max_rows: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        self.estimator = AcceptanceEstimator(
            max_slots, num_draft_positions, device, settings=settings, max_rows=max_rows, hidden_size=hidden_size
        )
        self.settings = self.estimator.settings
        self.planner = VerifyPlanner(
            max_slots, num_draft_positions, device, cost=cost, settings=self.settings, max_rows=max_rows
        )
        self.device = self.estimator.device

    def reset(self, slots: torch.Tensor, strata: torch.Tensor | None = None) -> None:
        """New requests live in `slots`; late verdicts for the old ones are ignored. See `AcceptanceEstimator.reset`."""
        self.estimator._reset(slots, strata, self.planner.state)

    def score(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        position: int | None = None,
        temperature: torch.Tensor | float | None = None,
        tokens: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Acceptance probabilities of the drafts; see `AcceptanceEstimator.score`."""
        return self.estimator.score(logits, slots, position, temperature, tokens, hidden)

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        seeds: torch.Tensor | None = None,
        position: int | None = None,
        temperature: torch.Tensor | float | None = None,
        hidden: torch.Tensor | None = None,
    ) -> Drafts:
        """Draw the drafts and score them, in place of `score`; see `AcceptanceEstimator.sample`."""
        return self.estimator.sample(logits, slots, seeds, position, temperature, hidden)

    def plan(
        self,
        slots: torch.Tensor,
        drafts: torch.Tensor | None = None,
        non_draft_tokens: torch.Tensor | int | None = None,
        budget: torch.Tensor | int | None = None,
        segments: torch.Tensor | None = None,
    ) -> Plan:
        """What to verify in this step; see `VerifyPlanner.plan`. Without a `score` since the last `observe`, all."""
        return self.planner.plan(self.estimator.state.scores, slots, drafts, non_draft_tokens, budget, segments)

    def observe(
        self,
        slots: torch.Tensor,
        accepted: torch.Tensor,
        admitted: torch.Tensor | None = None,
        teach: torch.Tensor | None = None,
        acceptance: torch.Tensor | None = None,
    ) -> None:
        """Learn from the verdicts, before the slots' next `score`; see `AcceptanceEstimator.observe`.

        admitted: what was really verified, where that is not what the plan said; None: the plan's.
        """
        self.estimator._observe(slots, accepted, admitted, teach, acceptance, self.planner.state)

    def set_cost(self, cost: CostTable | None) -> None:
        """Put another cost table in force; see `VerifyPlanner.set_cost`."""
        self.planner.set_cost(cost)

    def coefficients(self) -> Coefficients:
        """The coefficients in force; waits for the device."""
        return self.estimator.coefficients()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was learned (coefficients, gates, head) to a file, atomically; see `AcceptanceEstimator.save`."""
        self.estimator.save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what was saved; SnapshotError, and nothing changed, where the file does not fit. The counters go on
        as they were, `refits` among them."""
        self.estimator.load(path)

    def counters(self) -> dict[str, npt.NDArray[np.int64]]:
        """Totals since construction, int64: [K] per draft position, and scalars. Waits for the device.

        drafted, admitted, trimmed, accepted: drafts. labelled: drafts with a verdict to learn from;
        labelled_accepted: of those, accepted; expected_accepted: sum of their scores in Q20.
        steps, refits, explored, bypassed: scalars.
        """
        K = self.estimator.num_draft_positions
        rows = self.estimator.state.counters[:, :K].cpu().numpy().copy()
        plan = self.planner.state.counters.cpu().numpy().copy()
        clock = self.estimator.state.clock.cpu().numpy().copy()
        return {
            "drafted": rows[_accumulate.DRAFTED],
            "admitted": rows[_accumulate.ADMITTED],
            "trimmed": rows[_accumulate.DRAFTED] - rows[_accumulate.ADMITTED],
            "accepted": rows[_accumulate.ACCEPTED],
            "labelled": rows[_accumulate.LABELLED],
            "labelled_accepted": rows[_accumulate.HITS],
            "expected_accepted": rows[_accumulate.EXPECTED],
            "steps": plan[_select.STEPS],
            "refits": clock[_accumulate.REFITS],
            "explored": plan[_select.EXPLORED],
            "bypassed": plan[_select.BYPASSED],
        }

    def status(self) -> Status:
        """Active or not, and why; waits for the device."""
        plan = self.planner.state.counters.tolist()
        reason = self.planner.inactive_reason
        bypassed = int(self.planner._out.bypass[0]) and not self.planner._options.lookahead
        if reason is None:
            reason = f"policy {self.settings.policy}"
            if bypassed:
                reason = f"bypassed: trimming promises less than {self.settings.minimum_gain:.0%} now"
        return Status(
            active=self.planner.inactive_reason is None and not bypassed,
            reason=reason,
            backend="triton" if use_triton(self.device) else "torch",
            policy=self.settings.policy,
            steps=plan[_select.STEPS],
            refits=int(self.estimator.state.clock[_accumulate.REFITS]),
            explored=plan[_select.EXPLORED],
            bypassed=plan[_select.BYPASSED],
            additions=tuple(
                f"{what}, {stratum}"
                for what, gates in zip(("offset", "head"), self.estimator.state.gates.tolist(), strict=True)
                for stratum, gate in zip(self.settings.strata, gates, strict=True)
                if gate > 0
            ),
        )
