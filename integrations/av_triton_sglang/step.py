"""The step context: one verifier per worker, and what the drafter families share around it.

A decode step is begin -> score -> plan -> (verify) -> observe -> end. Slots are SGLang's `req_pool_indices`; they stay
in one persistent buffer, -1 beyond the batch, so that the calls that a graph may capture see the same addresses.
"""

import logging
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from av_triton import (
    AdaptiveVerifier,
    CostTable,
    Plan,
    entropy_from_partial,
    entropy_partial,
    logit_max_partial,
    merge_entropy,
    merge_logit_max,
)
from av_triton.ops.head import MAX_HIDDEN, OFFSET
from av_triton.ops.logit_max import INVALID, logit_from_partial
from av_triton.ops.score import acceptance_score_reference
from av_triton_sglang import costs, graphs, measure, metrics
from av_triton_sglang.flag import Launch
from av_triton_sglang.ranks import Ranks
from av_triton_sglang.status import Reporter
from av_triton_sglang.step_times import StepTimes

logger = logging.getLogger(__name__)

GREEDY_STRATUM = 1
# Steps between a proposal and the step that the host picks a graph for by it: SGLang's overlapped scheduler has waited
# for the results of two steps back when it launches one. No rank asks whether a copy has arrived; ranks would disagree.
LAG = 2


def changes_target(request: Any) -> bool:
    """Whether the request's target distribution is changed by something that the drafter does not see."""
    p = request.sampling_params
    return bool(
        p.frequency_penalty
        or p.presence_penalty
        or p.repetition_penalty != 1.0
        or p.min_new_tokens
        or p.logit_bias
        or p.json_schema
        or p.regex
        or p.ebnf
        or p.structural_tag
        or p.custom_params
        or p.watermark
        or request.grammar is not None
        or request.custom_logit_processor is not None
    )


class StepContext:
    """See the module. num_draft_positions: K. num_slots: rows of SGLang's request pool. max_rows: largest batch.
    autoregressive: the drafter pays per position, and its hooks follow `start_drafting`. hidden_size: of the drafter's
    last hidden state, if its hooks have it. Several ranks learn no head, for their hidden states may differ; nor does a
    state wider than a head may be.

    Every rank has one, and calls it alike; files, logs and metrics are rank 0's.
    """

    def __init__(
        self,
        launch: Launch,
        arguments: Any,
        *,
        num_draft_positions: int,
        num_slots: int,
        max_rows: int,
        device: str,
        autoregressive: bool = False,
        hidden_size: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = launch.config
        self.ranks = ranks or Ranks()
        self.algorithm = launch.algorithm
        self.num_draft_positions = num_draft_positions
        cost, self.cost_source = self.ranks.share_object(costs.load(self.config, arguments))
        self._wants_cost = cost is None and self.config.settings.policy != "fixed"
        with warnings.catch_warnings():
            # Of a missing table, which is measured before anything is trimmed; of a flat one the log tells.
            warnings.simplefilter("ignore", RuntimeWarning)
            # One slot more than the pool has, at index -1: there PyTorch writes what padding rows scored.
            self.verifier = AdaptiveVerifier(
                num_slots + 1,
                num_draft_positions,
                device,
                cost=cost,
                settings=msgspec.structs.replace(self.config.settings, lag=LAG, autoregressive=autoregressive),
                max_rows=max_rows,
                hidden_size=hidden_size if self.ranks.alone and (hidden_size or 0) <= MAX_HIDDEN else None,
            )
        if self.config.coefficients and Path(self.config.coefficients).exists():
            self.verifier.load(self.config.coefficients)
        state = self.verifier.estimator.state
        self.ranks.share(state.labels, state.gates, state.slopes, state.intercepts)
        with self.verifier.device:
            self._slots = torch.full((max_rows,), -1, dtype=torch.int64)
            self._teach = torch.ones(num_slots, dtype=torch.bool)
            self._drafts = torch.full((max_rows,), num_draft_positions, dtype=torch.int32)
        self.rows = 0
        # Positions that the next step may draft, and that the running one has drafted.
        self._depth = self.drafted = num_draft_positions
        # Of the running step: SGLang's RaggedVerifyLayout, accepted drafts that were cut away [B], hidden states noted
        # ahead of the drafts [B, K, H], and where SGLang samples by rejection the acceptance probabilities of the
        # drafts, fp32 [B, K].
        self.layout: Any = None
        self.trimmed: Tensor | None = None
        self.hidden: Tensor | None = None
        self.acceptance: Tensor | None = None
        self._proposed: deque[tuple[Tensor, int]] = deque(maxlen=LAG)  # (proposal, rows) of the last plans
        self._steps = 0
        self._cache_file = partial(measure.cache_file, self.config, arguments, device)
        self._clock: measure.DraftClock | None = None
        self._verify_costs: CostTable | None = None
        # On a GPU an overlapped host is one step ahead: between two begins of its steps the device ran the one before.
        ahead = self.verifier.device.type == "cuda" and not arguments.disable_overlap_schedule
        max_tokens = max_rows * (num_draft_positions + 1)
        self.times = StepTimes(cost, max_rows, max_tokens, behind=int(ahead), keep=self.config.refine_interval > 0)
        self._reporter = Reporter(
            self, metrics.build(arguments, str(launch.algorithm)) if self.ranks.is_first else None
        )

    def reset(self, slots: Tensor, requests: list[Any]) -> None:
        """The requests of a prefill batch begin (or go on being prefilled) in `slots`."""
        self.times.interrupt()
        device = self.verifier.device
        strata = None
        if len(self.config.settings.strata) > 1:
            greedy = [GREEDY_STRATUM if each.sampling_params.top_k == 1 else 0 for each in requests]
            strata = torch.tensor(greedy, dtype=torch.int32).to(device, non_blocking=True)
        self.verifier.reset(slots, strata)
        teach = torch.tensor([not changes_target(each) for each in requests]).to(device, non_blocking=True)
        self._teach[slots.long()] = teach

    def begin(self, slots: Tensor) -> None:
        self.times.begin()
        self.rows = slots.shape[0]
        self.layout = self.trimmed = self.hidden = self.acceptance = None
        self.drafted = self.num_draft_positions
        self._slots[: self.rows].copy_(slots)
        self._slots[self.rows :].fill_(-1)
        if self._clock is not None:
            self._clock.start()

    def slots(self, rows: int, first: int = 0) -> Tensor:
        """int64 [rows]: of the running step, from row `first`; -1 beyond the batch (a graph's padding)."""
        return self._slots[first : first + rows]

    def score(
        self,
        logits: Tensor,
        position: int | None = None,
        temperature: Tensor | None = None,
        first: int = 0,
        slots: Tensor | None = None,
        tokens: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        """Score the rows of the running step from `first` on, or the requests in `slots`.

        logits: [B, K, V], or [B, V] at one position. temperature: fp32 [B] of the drafter, 0 where it took the argmax;
        None: it always does. tokens: columns of `logits` that were drawn, if they are known. hidden: the drafter's last
        hidden states [B, K, H] or [B, H], if it has kept them.
        """
        if slots is None:
            slots = self.slots(logits.shape[0], first)
        hidden = self._known(hidden, logits)
        if temperature is None and tokens is None and self.verifier.estimator.hidden_size is not None:
            # Their argmax is known by then, and with it the history.
            self.verifier.sample(logits, slots, position=position, hidden=hidden)
        else:
            self.verifier.score(logits, slots, position, temperature, tokens, hidden)

    def sample(self, logits: Tensor, first: int, hidden: Tensor | None = None) -> Tensor:
        """Argmax drafts, int64 [B, K], of logits [B, K, V] of the rows from `first` on, scored in the same read."""
        slots = self.slots(logits.shape[0], first)
        return self.verifier.sample(logits, slots, hidden=self._known(hidden, logits)).tokens

    def _known(self, hidden: Tensor | None, logits: Tensor) -> Tensor | None:
        """The hidden states, where they are those of the logits."""
        size = self.verifier.estimator.hidden_size
        if hidden is None or size is None or hidden.shape != (*logits.shape[:-1], size):
            return None
        return hidden if hidden.stride(-1) == 1 else hidden.contiguous()

    def score_shard(self, logits: Tensor, first_token: int, first: int) -> Tensor:
        """As `score` of argmax drafts whose logits are split over the ranks: what travels is three numbers per row, and
        a fourth where entropies are kept.

        logits: [B, K, V / ranks], of the tokens from `first_token` on. Returns the drafts, int64 [B, K].
        """
        slots, state, K = self.slots(logits.shape[0], first), self.verifier.estimator.state, logits.shape[1]
        parts = logit_max_partial(logits) if state.entropies is None else entropy_partial(logits)
        token = (logits.argmax(-1) + first_token).float()  # exact: vocabularies have fewer than 2^24 tokens
        gathered = self.ranks.gather(torch.stack([*parts, token]))
        maxima, complements, tokens = gathered[:, 0], gathered[:, 1], gathered[:, -1]
        features = logit_from_partial(*merge_logit_max(maxima, complements))
        if state.entropies is not None:
            merged = merge_entropy(maxima, complements, gathered[:, 2])
            state.entropies[slots, :K] = entropy_from_partial(*merged[1:])
        if state.gaps is not None:
            state.gaps[slots, :K] = torch.where(features > INVALID, 0.0, torch.nan)
        strata = state.strata[slots].long()
        offsets = torch.where(state.gates[OFFSET, strata] > 0, state.offsets[slots], 0.0)
        intercepts = state.intercepts[strata, :K] + offsets[:, None]
        state.features[slots, :K] = features
        state.scores[slots, :K] = acceptance_score_reference(features, state.slopes[strata][:, None], intercepts)
        return tokens.gather(0, maxima.argmax(0, keepdim=True))[0].long()

    def start_drafting(self) -> int:
        """Positions to draft in the running step, 1 to K: the first is scored already when an EAGLE worker drafts."""
        self.drafted = self._depth
        return self.drafted

    def follow(self, plan: Plan) -> None:
        """Draft as deep as the plan says from the next step on, which waits for the device; a drafter that does not pay
        per position goes on drafting all."""
        if self.verifier.settings.autoregressive:
            self._depth = max(int(plan.draft_depth), 1)

    def plan(self, drafts: Tensor | None = None, budget: int | None = None) -> Plan:
        """drafts: int64, of the batch, where ranks may have drafted differently; overwritten by rank 0's.

        budget: what the host has picked a graph for; None: the device decides, from earlier scores.
        """
        if self._clock is not None:
            self._clock.stop()
        self._agree(drafts)
        counts = None
        if self.drafted < self.num_draft_positions:
            counts = self._drafts[: self.rows].fill_(self.drafted)
        plan = self.verifier.plan(self.slots(self.rows), counts, budget=budget)
        self._proposed.append((plan.proposal, self.rows))
        return plan

    def host_budget(self) -> int:
        """Drafts to verify in this step, known to the host without waiting: the proposal of LAG steps back, scaled to
        the requests of this one; in the first LAG steps all drafts."""
        everything = self.rows * self.num_draft_positions
        if self.config.settings.policy == "fixed":
            fixed = self.config.settings.fixed_budget
            return everything if fixed is None else min(fixed, everything)
        if len(self._proposed) < LAG:
            return everything
        proposal, rows = self._proposed[0]
        return min(int(proposal) * self.rows // rows, everything)

    def _agree(self, drafts: Tensor | None) -> None:
        if self.ranks.alone:
            return
        state, slots = self.verifier.estimator.state, self.slots(self.rows)
        kept = [each for each in (state.features, state.scores, state.entropies, state.gaps) if each is not None]
        rows = [each[slots] for each in kept]
        self.ranks.share(*([] if drafts is None else [drafts]), *rows)
        for each, shared in zip(kept, rows, strict=True):
            each[slots] = shared

    def observe(self, accepted: Tensor) -> None:
        """accepted: integers [B], accepted drafts of each row, at most what was verified."""
        slots, acceptance = self.slots(self.rows), self.acceptance
        if acceptance is not None:
            self.ranks.share(acceptance)
        self.verifier.observe(slots, accepted, teach=self._teach[slots], acceptance=acceptance)
        if self._clock is not None:
            self._clock.start()

    def end(self) -> None:
        """After every decode step: what is reported and saved at intervals."""
        self.layout = None
        self._steps += 1
        if self.config.refine_interval and self._steps % self.config.refine_interval == 0:
            self._refine_costs()
        if self._clock is not None:
            self._clock.stop()
            self._time_drafting(self._clock)
        if not self.ranks.is_first:
            return
        if self.config.log_interval and self._steps % self.config.log_interval == 0:
            self._reporter.report()
        if self.config.save_interval and self._steps % self.config.save_interval == 0:
            self.save()

    def save(self) -> None:
        """Write the coefficients, where the configuration names a file for them."""
        if self.config.coefficients and self.ranks.is_first:
            self.verifier.save(self.config.coefficients)

    def measure_costs(self, target_runner: Any, hidden_states: bool) -> None:
        """At start-up, where no cost table was given: from the cache, or by timing the target's verify forward.

        hidden_states: whether the drafter reads the target's. Drafting is timed later, in the first decode steps.
        """
        captured, given = graphs.captured_sizes(target_runner), self.times.table
        if given is not None and captured is not None and not given.captured:
            self._put_in_force(msgspec.structs.replace(given, captured=captured), self.cost_source)
        if not self._wants_cost:
            return
        self._cache = self._cache_file(captured)
        cached = self.ranks.share_object(self._cached_costs())
        if cached is not None:
            self._put_in_force(cached, f"{self._cache} (measured before)")
            return
        width = self.num_draft_positions + 1
        forward = measure.VerifyForward(target_runner, width, hidden_states, self.config.cost_context)
        self._verify_costs = measure.measure_verify(forward, self._slots.shape[0], width, captured, self.ranks.is_first)
        self._clock = measure.DraftClock()

    def _cached_costs(self) -> CostTable | None:
        if self._cache.exists():
            try:
                return CostTable.load(self._cache)
            except ValueError as error:
                logger.warning("Adaptive verification: %s; measuring the step costs again.", error)
        return None

    def _time_drafting(self, clock: measure.DraftClock) -> None:
        milliseconds = clock.end_step()
        if milliseconds is None or self._verify_costs is None:
            return
        costs = self._verify_costs
        own = msgspec.structs.replace(costs, draft=[(n, ms + milliseconds) for n, ms in costs.draft])
        self._clock = self._verify_costs = None
        table: CostTable = self.ranks.share_object(own)
        if self.ranks.is_first:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            table.save(self._cache)
        self._put_in_force(table, f"measured at start-up, kept in {self._cache}")

    def _refine_costs(self) -> None:
        """At a step that all ranks share: rank 0's times decide."""
        refined = self.ranks.share_object(self.times.refined())
        if refined is not None:
            self.verifier.set_cost(refined)
            self.times.use(refined)

    def _put_in_force(self, table: CostTable, source: str) -> None:
        self.verifier.set_cost(table)
        self.times.use(table)
        self.cost_source = source
        logger.info("Adaptive verification: step costs in force, %s.", source)

    def status(self) -> dict[str, Any]:
        return self._reporter.status()


_current: StepContext | None = None


def current() -> StepContext:
    """This process's step context; a process runs one worker."""
    if _current is None:
        raise RuntimeError("adaptive verification has no step context: the worker's memory pool was never allocated")
    return _current


def exists() -> bool:
    return _current is not None


def head_width(hidden_size: int | None, vocabulary: int, wanted: bool | None) -> int | None:
    """Of the hidden states that a head is given; None: there is no head.

    Where nobody says whether one is wanted: if the 6 bytes that it moves per coordinate and draft (read, keep, learn)
    are at most a fiftieth of the draft's float32 logits, which the score reads anyway.
    """
    if hidden_size is None or wanted is False:
        return None
    return hidden_size if wanted or 6 * hidden_size * 50 <= 4 * vocabulary else None


def build(
    launch: Launch,
    arguments: Any,
    model_runner: Any,
    num_draft_positions: int,
    autoregressive: bool = False,
    hidden_size: int | None = None,
) -> StepContext:
    """Make the step context of this process's worker, once its request pool is there; see `StepContext`."""
    from sglang.srt.runtime_context import get_parallel

    global _current
    pool = model_runner.req_to_token_pool.req_to_token
    _current = StepContext(
        launch,
        arguments,
        num_draft_positions=num_draft_positions,
        num_slots=pool.shape[0],
        max_rows=min(pool.shape[0], model_runner.max_running_requests),
        device=model_runner.device,
        autoregressive=autoregressive,
        hidden_size=head_width(hidden_size, int(model_runner.model_config.vocab_size), launch.config.settings.head),
        ranks=Ranks(get_parallel().tp_group),
    )
    status = _current.verifier.status()
    logger.info(
        "Adaptive verification: %s; algorithm %s, %d draft positions, costs from %s, coefficients %s, %s, backend %s.",
        f"active ({status.reason})" if status.active else f"INACTIVE ({status.reason})",
        launch.algorithm,
        num_draft_positions,
        _current.cost_source,
        f"{status.refits} refits so far" if status.refits else "initial",
        "no head" if (width := _current.verifier.estimator.hidden_size) is None else f"head on {width} coordinates",
        status.backend,
    )
    return _current


def forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """A hook around a worker's `forward_batch_generation`."""
    if _current is None or batch.forward_mode.is_idle():
        return original(worker, batch, *args, **kwargs)
    if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
        _current.reset(batch.req_pool_indices, batch.reqs)
        return original(worker, batch, *args, **kwargs)
    _current.begin(batch.req_pool_indices)
    result = original(worker, batch, *args, **kwargs)
    if _current.trimmed is not None:
        # What SGLang's statistics call the cap; its DSPARK worker sets both itself.
        result.cap_lens = _current.layout.verify_lens
        result.block_accept_lens = result.accept_lens + _current.trimmed
    _current.end()
    return result


def save_at_shutdown(result: None, scheduler: Any, request: Any) -> None:
    """A hook after the scheduler's `handle_shutdown`."""
    if _current is not None:
        _current.save()


def measure_costs(result: None, worker: Any, *args: Any, **kwargs: Any) -> None:
    """A hook after a worker's `init_cuda_graphs`, the last thing before it serves."""
    if _current is not None:
        runner = worker.target_worker.model_runner
        _current.measure_costs(runner, hidden_states=not runner.spec_algorithm.is_standalone())
