"""VerifyPlanner: acceptance probabilities -> how many drafts of each request are verified in this step."""

import warnings
from typing import NamedTuple

import torch

from av_triton.cost import CostTable
from av_triton.estimator import check_construction, check_slots
from av_triton.ops._checks import INTEGERS, check_vector
from av_triton.ops.budget import NO_CAP, BudgetOptions, CostArrays, propose
from av_triton.ops.segmented_topk import PPM, check_segments, tile
from av_triton.ops.select import UNKNOWN, VERIFY_ALL, PlanOutput, PlanState, select
from av_triton.settings import MAX_ROWS, Settings

# A drafter that pays per position drafts to full depth for the whole batch when one row explores: many rows share it.
EXPLORE_EVERY = 32


class Plan(NamedTuple):
    """What to verify in this step: views of buffers that the next `plan()` overwrites. B rows, S segments.

    `proposal` stays for `Settings.lag` further plans, so that the host reads exactly the one of that many steps back.
    """

    admitted: torch.Tensor  # int32 [B], drafts to verify, per row
    cu_verify: torch.Tensor  # int32 [B + 1], prefix sums of admitted + 1 (the bonus row); padding rows count 0
    budget: torch.Tensor  # int32 [S], drafts granted to each segment
    proposal: torch.Tensor  # int32 [S], the budget proposed for later steps; in pinned host memory on CUDA
    draft_depth: torch.Tensor  # int32 [1], positions worth drafting next, 0 to K (drafters that pay per position)


class VerifyPlanner:
    """Chooses budgets and allocates them; all state on `device`, keyed by slot, allocated here once.

    The proposal is the argmax of accepted tokens per millisecond over the survivals that *earlier* plans stored for
    the slots of the batch. Without `budget=` the proposal is in force on the device at once; with `budget=` (what the
    host took from an earlier `Plan.proposal`) that number is in force, and the proposal is for later steps.

    Args:
        max_slots, num_draft_positions, device, settings, max_rows: as `AcceptanceEstimator`.
        cost: step costs; None: verify all.
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
    ) -> None:
        self.settings = check_construction(max_slots, num_draft_positions, max_rows, settings)
        self.max_slots, self.num_draft_positions = max_slots, num_draft_positions
        self.max_rows = min(max_slots, MAX_ROWS) if max_rows is None else max_rows
        self.device = torch.empty(0, device=device).device
        self._tile = tile(self.max_rows, num_draft_positions)
        P = self._tile[0]
        max_tokens = self.max_rows * (num_draft_positions + 1) + 8192
        with torch.inference_mode(False), self.device:
            self.state = PlanState(
                survival=torch.full((max_slots, P), UNKNOWN, dtype=torch.float32),
                admitted=torch.zeros(max_slots, dtype=torch.int32),
                drafts=torch.zeros(max_slots, dtype=torch.int32),
                mean=torch.full((P,), UNKNOWN, dtype=torch.float32),
                sums=torch.zeros(P + 1, dtype=torch.int64),
                counters=torch.zeros(4, dtype=torch.int64),
            )
            self._out = PlanOutput(
                admitted=torch.zeros(self.max_rows, dtype=torch.int32),
                cu_verify=torch.zeros(self.max_rows + 1, dtype=torch.int32),
                budget=torch.zeros(self.max_rows, dtype=torch.int32),
                proposal=torch.full((self.max_rows,), self.settings.fixed_budget or 0, dtype=torch.int32),
                depth=torch.full((self.max_rows,), num_draft_positions, dtype=torch.int32),
                bypass=torch.zeros(self.max_rows, dtype=torch.int32),
            )
            self._ranked = torch.zeros(self.max_rows * num_draft_positions, dtype=torch.int64)
            self._tickets = torch.zeros(self.max_rows, dtype=torch.int32)
            self._costs = CostArrays(
                draft=torch.zeros(self.max_rows + 1, dtype=torch.float64),
                verify=torch.zeros(max_tokens + 1, dtype=torch.float64),
                padded=torch.zeros(max_tokens + 1, dtype=torch.int32),
            )
            c = self.settings
            self._host_proposals, self._plans = [self._out.proposal], 0
            if self.device.type == "cuda":
                self._host_proposals = [self._out.proposal.cpu().pin_memory() for _ in range(c.lag + 1)]
            elif c.lag:
                self._host_proposals = [self._out.proposal.clone() for _ in range(c.lag + 1)]
        self._options = BudgetOptions(
            cap=NO_CAP if c.max_verify_tokens is None else c.max_verify_tokens,
            ppm=round(c.exploration * PPM),
            every=EXPLORE_EVERY if c.autoregressive else 1,
            gain_ppm=round(c.minimum_gain * PPM),
            autoregressive=c.autoregressive,
            lookahead=c.policy == "lookahead",
        )
        self.inactive_reason: str | None = None
        self.set_cost(cost)

    def set_cost(self, cost: CostTable | None) -> None:
        """Put another cost table in force, at the same addresses: captured graphs see it at their next replay. A graph
        captured without a table, or with a flat one, goes on verifying all: capture it again.

        On several ranks call it with equal tables and at the same step. A missing or flat table means that every draft
        is verified, with one warning.
        """
        if not isinstance(cost, CostTable | None):
            raise ValueError(f"cost is {type(cost).__name__}: give a CostTable, or None to verify all")
        self.inactive_reason = None
        if self.settings.policy == "fixed":
            return
        if cost is None:
            self._verify_all("no cost table: every draft is verified; measure one with CostTable.measure()")
            return
        dense = cost.dense(self.max_rows, len(self._costs.verify) - 1)
        self._costs.draft.copy_(torch.from_numpy(dense.draft))
        self._costs.verify.copy_(torch.from_numpy(dense.verify))
        self._costs.padded.copy_(torch.from_numpy(dense.padded))
        if dense.is_flat:
            self._verify_all(
                "flat cost table: verifying more tokens costs nothing, so every draft is verified; "
                "measure larger sizes, or turn adaptive verification off"
            )

    def _verify_all(self, reason: str) -> None:
        self.inactive_reason = reason
        # A runtime that goes by the proposals has to verify all as well.
        self._out.proposal.fill_(self.max_rows * self.num_draft_positions)
        self._out.depth.fill_(self.num_draft_positions)
        self._out.bypass.zero_()
        warnings.warn(reason, RuntimeWarning, stacklevel=4)

    def plan(
        self,
        scores: torch.Tensor,
        slots: torch.Tensor,
        drafts: torch.Tensor | None = None,
        non_draft_tokens: torch.Tensor | int | None = None,
        budget: torch.Tensor | int | None = None,
        segments: torch.Tensor | None = None,
    ) -> Plan:
        """Admit the drafts with the best survival, as many as the budget says.

        Args:
            scores: float32 [max_slots, P] by *slot*, P = K rounded up to a power of two; -1: not scored (such a row is
                verified to full depth, and first).
            slots: int32 or int64 [B]; -1: padding. drafts: int32 or int64 [B], drafts per row; None: K.
            non_draft_tokens: tokens of the step that are not drafts, per segment: a number or int32 [S]; None: one
                per real row.
            budget: drafts per segment, a number or int32 [S]; None: the proposal, decided on the device, or all drafts
                of a segment in which no row was scored.
            segments: int32 [S + 1], ascending offsets over the rows; None: one segment.
        """
        rows = check_slots("slots", slots, self.max_rows, self.max_slots, self.device)
        if scores.shape != self.state.survival.shape or scores.dtype != torch.float32:
            raise ValueError(
                f"scores are {scores.dtype} {tuple(scores.shape)}: give float32 {tuple(self.state.survival.shape)}, "
                "one row per slot"
            )
        if drafts is not None:
            check_vector("drafts", drafts, rows, INTEGERS, self.device)
        count = check_segments(segments, self.device)
        if count > self.max_rows:
            raise ValueError(f"{count} segments: at most max_rows = {self.max_rows}")
        for name, value in (("non_draft_tokens", non_draft_tokens), ("budget", budget)):
            if isinstance(value, torch.Tensor):
                check_vector(name, value, count, (torch.int32,), self.device)
            elif value is not None and not (isinstance(value, int) and value >= 0):
                raise ValueError(f"{name} = {value!r}: give a whole number, 0 or more, an int32 tensor, or None")

        own = budget is None
        adaptive = self.settings.policy != "fixed" and self.inactive_reason is None
        if not adaptive and own:
            budget = VERIFY_ALL if self.settings.fixed_budget is None else self.settings.fixed_budget
        inline = adaptive and own
        if inline:
            self._propose(scores, slots, drafts, segments, count, non_draft_tokens, later=False)
        select(
            self.state, self._out, scores, slots, drafts, segments, count,
            self._out.proposal[:count] if budget is None else budget, own, non_draft_tokens, self._options.cap,
            self.num_draft_positions, self._options.ppm, self._options.every, self._tile,
        )  # fmt: skip
        if adaptive and not inline:
            self._propose(scores, slots, drafts, segments, count, non_draft_tokens, later=True)
        proposal = self._host_proposals[self._plans % len(self._host_proposals)][:count]
        self._plans += 1
        if len(self._host_proposals) > 1 or self.device.type == "cuda":
            proposal.copy_(self._out.proposal[:count], non_blocking=True)
        return Plan(
            admitted=self._out.admitted[:rows],
            cu_verify=self._out.cu_verify[: rows + 1],
            budget=self._out.budget[:count],
            proposal=proposal,
            draft_depth=self._out.depth[:1],
        )

    def _propose(
        self,
        scores: torch.Tensor,
        slots: torch.Tensor,
        drafts: torch.Tensor | None,
        segments: torch.Tensor | None,
        count: int,
        non_draft: torch.Tensor | int | None,
        later: bool,
    ) -> None:
        # After `select` the step counter already points at the next plan.
        shift = max(self.settings.lag, 1) - 1 if later else 0
        propose(
            self.state, self._out, self._costs, self._options, self._ranked, self._tickets, slots, drafts, segments,
            count, non_draft, self.num_draft_positions, shift, later, self._tile, scores,
        )  # fmt: skip
