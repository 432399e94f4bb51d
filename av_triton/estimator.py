"""AcceptanceEstimator: draft logits -> acceptance probabilities, with coefficients learned from the verdicts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import triton

from av_triton.backend import use_triton
from av_triton.ops import accumulate as _accumulate
from av_triton.ops import head as _head
from av_triton.ops import sample as _sample
from av_triton.ops._checks import (
    FLOATS,
    INTEGERS,
    check_acceptance,
    check_logits,
    check_per_draft,
    check_seeds,
    check_vector,
    temperature_argument,
)
from av_triton.ops.entropy import entropy_reference, gap_reference
from av_triton.ops.head import MAX_HIDDEN
from av_triton.ops.logit_max import INVALID, MAX_SPLITS, MAX_VOCAB, logit_max_reference
from av_triton.ops.refit import SUMS
from av_triton.ops.score import acceptance_score_reference
from av_triton.ops.segmented_topk import UNSCORED
from av_triton.ops.select import Q30, PlanState
from av_triton.settings import LARGEST, MAX_DRAFT_POSITIONS, MAX_ROWS, Settings, is_whole
from av_triton.snapshot import HeadSnapshot, Snapshot, SnapshotError

MAX_SLOTS = 1 << 20
CACHED_LOGITS = 1 << 18  # float32: 1 MiB


class Coefficients(msgspec.Struct, frozen=True):
    """The fitted coefficients: p = sigmoid(slopes[s] * logit(q_max) + intercepts[s][k]) for stratum s, position k."""

    strata: tuple[str, ...]
    slopes: list[float]
    intercepts: list[list[float]]
    refits: int


class Drafts(NamedTuple):
    """Drafts that were drawn and scored in one read of the logits; [B, k], or [B] at one position.

    tokens: int64. scores: float32, acceptance probabilities. log_normalisers: float32; token v was drawn with the log
    probability logits[v] / max(temperature, 1e-4) - log_normaliser, but at temperature 0, where the draw is certain.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    log_normalisers: torch.Tensor


def check_construction(
    max_slots: int, num_draft_positions: int, max_rows: int | None, settings: Settings | None
) -> Settings:
    """The bounds that the objects share; ValueError with the value and the remedy. Returns the settings in force."""
    if not isinstance(settings, Settings | None):
        raise ValueError(f"settings is {type(settings).__name__}: give a Settings, or None for the defaults")
    sizes = {"max_slots": max_slots, "num_draft_positions": num_draft_positions}
    for name, value in (sizes if max_rows is None else {**sizes, "max_rows": max_rows}).items():
        if not is_whole(value):
            raise ValueError(f"{name} = {value!r}: give a whole number")
    if not 1 <= max_slots <= MAX_SLOTS:
        raise ValueError(f"max_slots = {max_slots}: give the size of the engine's request pool, 1 to {MAX_SLOTS}")
    if not 1 <= num_draft_positions <= MAX_DRAFT_POSITIONS:
        raise ValueError(f"num_draft_positions = {num_draft_positions}: give K, 1 to {MAX_DRAFT_POSITIONS}")
    if max_rows is not None and not 1 <= max_rows <= MAX_ROWS:
        raise ValueError(f"max_rows = {max_rows}: give the largest batch, 1 to {MAX_ROWS} rows")
    return settings or Settings()


def check_slots(name: str, slots: torch.Tensor, max_rows: int, num_slots: int, device: torch.device) -> int:
    """Shape and dtype of a vector of slots; values too where they lie on the host. Returns the number of rows."""
    if not isinstance(slots, torch.Tensor) or slots.dim() != 1:
        what = f"shape {tuple(slots.shape)}" if isinstance(slots, torch.Tensor) else f"type {type(slots).__name__}"
        raise ValueError(f"{name} has {what}: give a tensor with one slot per row, int32 or int64 [rows]")
    rows = slots.shape[0]
    check_vector(name, slots, rows, INTEGERS, device)
    if rows > max_rows:
        raise ValueError(f"{name} has {rows} rows: at most max_rows = {max_rows}; split the batch or raise max_rows")
    if rows and device.type == "cpu" and not use_triton(device):
        low, high = int(slots.min()), int(slots.max())
        if low < -1 or high >= num_slots:
            raise ValueError(
                f"{name} holds {low if low < -1 else high}: slots are 0 to {num_slots - 1} (max_slots - 1), "
                "-1 for padding"
            )
    return rows


class AcceptanceEstimator:
    """Scores drafts and learns from their verdicts; all state on `device`, keyed by slot, allocated here once.

    Args:
        max_slots: size of the engine's request pool; slots are 0 to max_slots - 1, and -1 marks a padding row.
        num_draft_positions: K.
        device: where the logits live.
        settings: see `Settings`.
        max_rows: largest batch; default min(max_slots, 1024).
        hidden_size: width of the drafter's last hidden state, where the runtime gives it to `score` or `sample`; None:
            no head. State: 2 bytes per slot, position (K rounded up to a power of two) and entry.

    Raises ValueError for sizes out of bounds, and where refit_interval * max_rows * replicas could overflow the
    fixed-point sums.
    """

    def __init__(
        self,
        max_slots: int,
        num_draft_positions: int,
        device: torch.device | str = "cpu",
        *,
        settings: Settings | None = None,
        max_rows: int | None = None,
        hidden_size: int | None = None,
    ) -> None:
        self.settings = check_construction(max_slots, num_draft_positions, max_rows, settings)
        self.max_slots, self.num_draft_positions = max_slots, num_draft_positions
        self.max_rows = min(max_slots, MAX_ROWS) if max_rows is None else max_rows
        self.device = torch.empty(0, device=device).device
        labels = self.settings.refit_interval * self.max_rows * self.settings.replicas
        if _accumulate.LARGEST_ENTRY * Q30 * labels >= 1 << 63:
            raise ValueError(
                f"refit_interval {self.settings.refit_interval} x max_rows {self.max_rows} x replicas "
                f"{self.settings.replicas} = {labels} can overflow the fixed-point sums: keep it below "
                f"{(1 << 63) // (_accumulate.LARGEST_ENTRY * Q30)}"
            )
        if hidden_size is not None and not (is_whole(hidden_size) and 1 <= hidden_size <= MAX_HIDDEN):
            raise ValueError(
                f"hidden_size = {hidden_size!r}: give the width of the drafter's hidden state, 1 to {MAX_HIDDEN}, or "
                "None"
            )
        self.hidden_size = None if self.settings.head is False else hidden_size
        P, S = triton.next_power_of_2(num_draft_positions), len(self.settings.strata)
        history = self.settings.history or self.hidden_size is not None
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), self.device:
            self.state = _accumulate.EstimatorState(
                features=torch.full((max_slots, P), INVALID, dtype=torch.float32),
                scores=torch.full((max_slots, P), UNSCORED, dtype=torch.float32),
                strata=torch.zeros(max_slots, dtype=torch.int32),
                offsets=torch.zeros(max_slots, dtype=torch.float32),
                residuals=torch.zeros(max_slots, 2, dtype=torch.int64),
                gates=-torch.tensor(_accumulate.GATES)[:, None].repeat(1, S),
                gains=torch.zeros(2, S, dtype=torch.int64),
                slopes=torch.tensor(self.settings.initial_slopes, dtype=torch.float32),
                intercepts=torch.full((S, P), self.settings.initial_intercept, dtype=torch.float32),
                sums=torch.zeros(S, SUMS, P, dtype=torch.int64),
                labels=torch.zeros(S, P, dtype=torch.int64),
                counters=torch.zeros(6, P, dtype=torch.int64),
                clock=torch.zeros(4, dtype=torch.int64),
                entropies=torch.zeros(max_slots, P, dtype=torch.float32) if self.settings.entropy else None,
                gaps=torch.full((max_slots, P), torch.nan, dtype=torch.float32) if history else None,
                head=None if self.hidden_size is None else _head.new_state(S, max_slots, P, self.hidden_size),
            )
            self._row_scores = torch.zeros(self.max_rows, P, dtype=torch.float32)
            self._tickets = torch.zeros(self.max_rows * P, dtype=torch.int32)
            # For the largest vocabulary: a captured graph keeps the address.
            self._partials = torch.empty(
                4 if self.settings.entropy else 3, MAX_SPLITS * self.max_rows * P, dtype=torch.float32
            )
            self._partial_tokens = torch.empty(MAX_SPLITS * self.max_rows * P, dtype=torch.int32)
            self._row_tokens = torch.zeros(self.max_rows, P, dtype=torch.int64)
            self._row_normalisers = torch.zeros(self.max_rows, P, dtype=torch.float32)

    def reset(self, slots: torch.Tensor, strata: torch.Tensor | None = None) -> None:
        """New requests live in `slots`: forget their predecessors, whose offsets they would go on with otherwise.

        Args:
            slots: int32 or int64 [n]; -1 is skipped.
            strata: int32 [n], index into `settings.strata` (default: 0 sampled, 1 greedy, by the *request's*
                temperature); None: 0.
        """
        self._reset(slots, strata, None)

    def _reset(self, slots: torch.Tensor, strata: torch.Tensor | None, plan: PlanState | None) -> None:
        n = check_slots("slots", slots, self.max_slots, self.max_slots, self.device)
        if strata is not None:
            check_vector("strata", strata, n, (torch.int32,), self.device)
            if n and self.device.type == "cpu" and not use_triton(self.device):
                known = len(self.settings.strata)
                if not 0 <= int(strata.min()) <= int(strata.max()) < known:
                    raise ValueError(
                        f"strata holds {strata.tolist()}: give 0 to {known - 1}, for {self.settings.strata}"
                    )
        survival, admitted, drafts = (None, None, None) if plan is None else (plan.survival, plan.admitted, plan.drafts)
        _accumulate.reset(self.state, survival, admitted, drafts, slots, strata)

    @torch.no_grad()
    def score(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        position: int | None = None,
        temperature: torch.Tensor | float | None = None,
        tokens: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Acceptance probability of every draft, from the logits that it was drawn from.

        Args:
            logits: [B, k, V] of the first k <= K positions, or [B, V] at draft position `position` (0-based); float32,
                bfloat16 or float16, vocabulary contiguous.
            slots: int32 or int64 [B].
            temperature: the *drafter's* temperature: None (1), a number, or float32 [B]; 0 (argmax drafts) counts as 1.
            tokens: int64 [B, k] or [B], columns of `logits`: what was drawn from them; None where nothing was yet. Used
                with a head or `Settings.history`: how likely the draft at k - 1 was tells of the one at k. No score
                depends on its own draft.
            hidden: the drafter's last hidden states, from which the logits came, float32, bfloat16 or float16, vectors
                contiguous: [B, k, d], or [B, d] at one position or for all; d as `hidden_size`. None: unknown, then the
                head goes by the history alone. Ignored where there is no head. An entry that is NaN counts as average.

        Returns:
            float32 [B, k] or [B], a view of a buffer that the next call overwrites. NaN or all -inf rows get 0.
        """
        rows, first, count = self._check_drafts(logits, slots, position)
        check_per_draft("tokens", tokens, "drafts that are not drawn yet", logits.shape[:-1], self.device)
        hidden = self._check_hidden(hidden, rows, count)
        pointer, value = temperature_argument(temperature, (rows,), self.device)
        if not use_triton(self.device):
            parts = [logit_max_reference(x, t) for x, t, _ in self._in_cache(logits, count, pointer, value or None)]
            self._store(torch.cat(parts).float(), slots, first)
            self._store_law(logits, slots, first, count, pointer, value, tokens)
        elif rows:
            drawn = None if self.state.gaps is None else tokens
            self._launch(logits, slots, None, count, first, pointer, value, (None, None), drawn)
        self._correct(hidden, slots, first, count)
        return self._row_scores[:rows, :count] if position is None else self._row_scores[:rows, position]

    @torch.no_grad()
    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        seeds: torch.Tensor | None = None,
        position: int | None = None,
        temperature: torch.Tensor | float | None = None,
        hidden: torch.Tensor | None = None,
    ) -> Drafts:
        """Draw the drafts and score them, in one read of the logits; arguments as `score`, and

        seeds: int64 [B, k] or [B], as `sample_and_score` takes them; None: the drafts are the argmax.

        Returns views of buffers that the next call overwrites. A row without a slot (-1) gets token 0.
        """
        rows, first, count = self._check_drafts(logits, slots, position)
        check_seeds(seeds, logits.shape[:-1], self.device)
        hidden = self._check_hidden(hidden, rows, count)
        pointer, number = temperature_argument(temperature, (rows,), self.device)
        value = 1.0 if temperature is None else number
        outputs = self._row_tokens, self._row_scores, self._row_normalisers
        if not use_triton(self.device):
            self._sample_torch(logits, slots, seeds, first, count, pointer, value)
        elif rows:
            self._launch(logits, slots, seeds, count, first, pointer, value, (outputs[0], outputs[2]))
        self._correct(hidden, slots, first, count)
        at = slice(first, first + count) if position is None else position
        return Drafts(*(each[:rows, at] for each in outputs))

    def _check_drafts(self, logits: torch.Tensor, slots: torch.Tensor, position: int | None) -> tuple[int, int, int]:
        """(rows, first position, positions)."""
        rows = check_slots("slots", slots, self.max_rows, self.max_slots, self.device)
        check_logits(logits, MAX_VOCAB)
        K = self.num_draft_positions
        if position is None:
            want, fits = f"[{rows}, 1 to {K}, V]", logits.dim() == 3 and 1 <= logits.shape[1] <= K
        else:
            want, fits = f"[{rows}, V] at position {position}", logits.dim() == 2
        if not fits or logits.shape[0] != rows:
            raise ValueError(f"logits have shape {tuple(logits.shape)}: give {want} for {rows} slots")
        if position is not None and not (is_whole(position) and 0 <= position < K):
            raise ValueError(f"position = {position!r}: draft positions are 0 to {K - 1}")
        if logits.device != self.device:
            raise ValueError(f"logits are on {logits.device}: move them to {self.device}, where the estimator lives")
        return (rows, 0, logits.shape[1]) if position is None else (rows, position, 1)

    def _check_hidden(self, hidden: torch.Tensor | None, rows: int, count: int) -> torch.Tensor | None:
        """[rows, count, d]; None where there is no head."""
        if hidden is None or self.hidden_size is None:
            return None
        d = self.hidden_size
        if not isinstance(hidden, torch.Tensor) or hidden.dtype not in FLOATS or hidden.device != self.device:
            what = f"{hidden.dtype} on {hidden.device}" if isinstance(hidden, torch.Tensor) else repr(hidden)
            raise ValueError(f"hidden is {what}: give float32, bfloat16 or float16 on {self.device}, or None")
        if tuple(hidden.shape) not in ((rows, d), (rows, count, d)):
            raise ValueError(
                f"hidden has shape {tuple(hidden.shape)}: give [{rows}, {d}] or [{rows}, {count}, {d}], for {rows} "
                f"slots and hidden_size = {d}"
            )
        if d > 1 and hidden.stride(-1) != 1:
            raise ValueError(f"hidden has stride {hidden.stride(-1)} in its last dimension: give contiguous vectors")
        return hidden[:, None].expand(-1, count, -1) if hidden.dim() == 2 else hidden

    def _correct(self, hidden: torch.Tensor | None, slots: torch.Tensor, first: int, count: int) -> None:
        s = self.state
        if s.head is None or s.gaps is None:
            return
        _head.correct(
            s.head, hidden, slots, self.max_slots, first, count, (s.features, s.scores, self._row_scores, s.gaps),
            (s.strata, s.slopes, s.intercepts, s.offsets, s.gates),
        )  # fmt: skip

    def _launch(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        seeds: torch.Tensor | None,
        count: int,
        first: int,
        temperature: torch.Tensor | None,
        value: float,
        outputs: tuple[torch.Tensor | None, torch.Tensor | None],
        drawn: torch.Tensor | None = None,
    ) -> None:
        s = self.state
        _sample.launch(
            logits, logits.stride(1) if logits.dim() == 3 else 0, count, first, seeds, temperature, value,
            self._partials, self._partial_tokens, self._tickets,
            (
                s.features, s.scores, self._row_scores, slots, self.max_slots, s.strata, s.slopes, s.intercepts,
                s.offsets, s.gates, *outputs, s.entropies, s.gaps,
            ),
            s.features.shape[1], drawn,
        )  # fmt: skip

    def _in_cache(
        self, logits: torch.Tensor, count: int, temperature: torch.Tensor | None, value: float | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | float | None, slice]]:
        """(logits [b, k, V], temperature, rows) by rows that stay in the cache: a large batch at once takes about twice
        as long."""
        rows, vocab = logits.shape[0], logits.shape[-1]
        few = max(1, CACHED_LOGITS // max(1, count * vocab))
        x = logits.reshape(rows, count, vocab)
        for start in range(0, max(rows, 1), few):
            part = slice(start, start + few)
            t = (value if value != 1.0 else None) if temperature is None else temperature[part, None].expand(-1, count)
            yield x[part], t, part

    def _sample_torch(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        seeds: torch.Tensor | None,
        first: int,
        count: int,
        temperature: torch.Tensor | None,
        value: float,
    ) -> None:
        drawn = [
            _sample.sample_and_score_reference(x, None if seeds is None else seeds.reshape(-1, count)[part], t)
            for x, t, part in self._in_cache(logits, count, temperature, value)
        ]
        tokens, f, normalisers = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        columns, nobody = slice(first, first + count), ((slots < 0) | (slots >= self.max_slots))[:, None]
        self._row_tokens[: len(slots), columns] = tokens.masked_fill(nobody, 0)
        self._row_normalisers[: len(slots), columns] = normalisers.float().masked_fill(nobody, -torch.inf)
        self._store(f.float(), slots, first)
        self._store_law(logits, slots, first, count, temperature, value, None if seeds is None else tokens)
        if seeds is None and self.state.gaps is not None:
            real = ~nobody[:, 0]  # where the argmax is no distance from itself
            self.state.gaps[slots[real].long(), columns] = torch.where(f[real] > INVALID, 0.0, torch.nan).float()

    def _store(self, f: torch.Tensor, slots: torch.Tensor, first: int) -> None:
        """Features float32 [B, k] of the positions from `first` on, and their scores."""
        s, rows, columns = self.state, len(slots), slice(first, first + f.shape[1])
        real = (slots >= 0) & (slots < self.max_slots)
        at = slots[real].long()
        stratum = s.strata[at].long()
        offsets = torch.where(s.gates[_head.OFFSET, stratum] > 0, s.offsets[at], 0.0)
        intercepts = s.intercepts[stratum, columns] + offsets[:, None]
        p = acceptance_score_reference(f[real], s.slopes[stratum][:, None], intercepts)
        self._row_scores[:rows, columns] = 0.0
        self._row_scores[:rows, columns][real] = p
        s.features[at, columns], s.scores[at, columns] = f[real], p

    def _store_law(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        first: int,
        count: int,
        temperature: torch.Tensor | None,
        value: float,
        tokens: torch.Tensor | None,
    ) -> None:
        """Entropies and gaps, where they are kept."""
        s, columns = self.state, slice(first, first + count)
        real = (slots >= 0) & (slots < self.max_slots)
        at = slots[real].long()
        if s.entropies is not None:
            batches = self._in_cache(logits, count, temperature, value)
            s.entropies[at, columns] = torch.cat([entropy_reference(x, t) for x, t, _ in batches])[real].float()
        if s.gaps is not None:
            s.gaps[at, columns] = torch.nan
        if s.gaps is not None and tokens is not None:
            drawn = tokens.reshape(len(slots), count)
            batches = self._in_cache(logits, count, temperature, value)
            s.gaps[at, columns] = torch.cat([gap_reference(x, drawn[rows], t) for x, t, rows in batches])[real].float()

    def observe(
        self,
        slots: torch.Tensor,
        accepted: torch.Tensor,
        admitted: torch.Tensor,
        teach: torch.Tensor | None = None,
        acceptance: torch.Tensor | None = None,
    ) -> None:
        """Learn from the verdicts of one step; every `refit_interval` calls the coefficients take a Newton step.

        Args:
            slots: int32 or int64 [B].
            accepted: int32 or int64 [B], accepted drafts without the bonus, before truncation by EOS or a length limit;
                -1: no verdict.
            admitted: int32 or int64 [B], drafts that were verified.
            teach: bool [B]; False rows are counted but not learned from (their target distribution was changed by
                something that the drafter did not see).
            acceptance: float32 [B, k], k <= K, where the runtime samples by rejection and knows them: the acceptance
                probabilities min(1, p(x) / q(x)) of the verified drafts x, by the target's law p and the drafter's q.
                They are then learned from in place of the verdicts, whose expectation they are: the same coefficients
                from fewer steps. Clamped to [0, 1]; a NaN ends the row's labels. None: verdicts.
        """
        if admitted is None:
            raise ValueError("admitted is None: an estimator on its own needs the verified lengths, int32 [B]")
        self._observe(slots, accepted, admitted, teach, acceptance, None)

    @torch.no_grad()
    def _observe(
        self,
        slots: torch.Tensor,
        accepted: torch.Tensor,
        admitted: torch.Tensor | None,
        teach: torch.Tensor | None,
        acceptance: torch.Tensor | None,
        plan: PlanState | None,
    ) -> None:
        rows = check_slots("slots", slots, self.max_rows, self.max_slots, self.device)
        check_vector("accepted", accepted, rows, INTEGERS, self.device)
        if admitted is not None:
            check_vector("admitted", admitted, rows, INTEGERS, self.device)
        if teach is not None:
            check_vector("teach", teach, rows, (torch.bool,), self.device)
        if acceptance is not None:
            check_acceptance(acceptance, rows, self.num_draft_positions, self.device)
        c = self.settings
        slot_admitted, slot_drafts = (None, None) if plan is None else (plan.admitted, plan.drafts)
        _accumulate.observe(
            self.state, slot_admitted, slot_drafts, slots, accepted, admitted, teach, acceptance,
            self.num_draft_positions, c.refit_interval, c.ridge, c.damping, c.memory, c.max_slope_step,
            c.max_intercept_step, c.offset_prior,
        )  # fmt: skip
        if self.state.head is not None:
            _head.learn(self.state.head, slots, self.state.strata)

    def coefficients(self) -> Coefficients:
        """The coefficients in force. Waits for the device: for reports and files, not for the decode loop."""
        K = self.num_draft_positions
        return Coefficients(
            strata=self.settings.strata,
            slopes=self.state.slopes.tolist(),
            intercepts=self.state.intercepts[:, :K].tolist(),
            refits=int(self.state.clock[_accumulate.REFITS]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was learned to a JSON file: a temporary file first, then renamed over `path`. With a head of d
        inputs about 160 d bytes for each stratum."""
        now, s = self.coefficients(), self.state
        Snapshot(
            num_draft_positions=self.num_draft_positions,
            strata=list(now.strata),
            slopes=now.slopes,
            intercepts=now.intercepts,
            refits=now.refits,
            labels=s.labels[:, : self.num_draft_positions].tolist(),
            gates=s.gates.tolist(),
            head=None if s.head is None else _saved(s.head),
        ).write(Path(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what was saved; of a file without a head, or for an estimator without one, all the rest.
        SnapshotError, and nothing changed, where the file does not fit."""
        K, s = self.num_draft_positions, self.state
        snapshot = Snapshot.read(Path(path), K, list(self.settings.strata))
        slopes, intercepts = (
            torch.tensor(each, dtype=torch.float32, device="cpu") for each in (snapshot.slopes, snapshot.intercepts)
        )
        if max(slopes.max(), intercepts.abs().max()) > 2 * LARGEST:
            raise SnapshotError(
                f"{path}: one of the slopes {snapshot.slopes} and intercepts {snapshot.intercepts} is larger than "
                f"{2 * LARGEST}; start without the file"
            )
        if snapshot.head is not None and s.head is not None and snapshot.head.hidden_size != self.hidden_size:
            raise SnapshotError(
                f"{path}: its head has hidden_size {snapshot.head.hidden_size}, this estimator {self.hidden_size}; "
                "load a file of the same drafter, or start without it"
            )
        s.slopes.copy_(slopes)
        s.intercepts[:, :K] = intercepts.to(self.device)
        s.sums.zero_()
        s.labels.zero_()
        if snapshot.labels is not None:
            s.labels[:, :K] = torch.tensor(snapshot.labels, device=self.device)
        bounds = torch.tensor(_accumulate.GATES, device=self.device)[:, None]
        s.gates.copy_(-bounds)
        if snapshot.gates is not None:
            offset, head = self.settings.offset_prior is not None, s.head is not None and snapshot.head is not None
            there = torch.tensor([offset, head], device=self.device)[:, None]
            saved = torch.tensor(snapshot.gates, device=self.device).clamp(-bounds, bounds)
            s.gates.copy_(torch.where(there, saved, -bounds))
            _accumulate.close_unsettled(s.gates, s.labels)
        if s.head is not None:
            self._load_head(s.head, snapshot.head)
        s.clock[_accumulate.CYCLE].clamp_(max=0)  # below 0 where `distributed.ReplicaRefit` refits

    @staticmethod
    def _load_head(head: _head.HeadState, saved: HeadSnapshot | None) -> None:
        """None: the head begins anew."""
        for tensor in (head.weights, head.curvature, head.mean, head.sums, head.counts):
            tensor.zero_()
        head.variance.fill_(1.0)
        if saved is not None:
            for name in ("weights", "curvature", "mean", "variance"):
                getattr(head, name).copy_(torch.tensor(getattr(saved, name), dtype=torch.float32, device="cpu"))
            head.counts[:, :, _head.BEHIND] = torch.tensor(saved.behind, device=head.counts.device)[:, None]


def _saved(head: _head.HeadState) -> HeadSnapshot:
    return HeadSnapshot(
        hidden_size=head.inputs.shape[-1],
        weights=head.weights.tolist(),
        curvature=head.curvature.tolist(),
        mean=head.mean.tolist(),
        variance=head.variance.tolist(),
        behind=head.counts[:, 0, _head.BEHIND].tolist(),
    )
