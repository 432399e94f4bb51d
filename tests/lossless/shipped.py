"""The shipped verifier as a policy of the exact enumeration: real objects decide, fractions carry the law.

One verifier serves all histories of the enumeration: before a step is planned, the state that it had after the history
so far is put back. It computes in floats, as in use; what it decides is a deterministic function of what it was shown,
and that is all that the enumeration needs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from av_triton import AdaptiveVerifier, CostTable, Settings
from av_triton.ops.accumulate import GATES
from av_triton.ops.head import MINIBATCH, PENDING
from av_triton.ops.select import Q30
from tests.lossless.exact import Acceptance, Lengths, View

WIDTH = 18
"""Logits handed to the verifier are padded with -inf to this width, as those of a reduced draft vocabulary are."""


HIDDEN_SIZE = 3


def hidden_state(view: View, position: int) -> tuple[float, ...]:
    """A drafter's hidden state at a position: it knows the drafts before it. Rows as `exact.with_the_drawn_token`."""
    before = [row[-1] for row in view[:position]]
    return view[position][0] - 0.7, before[-1] - 0.5 if before else 0.0, math.prod(before) - 0.4


def hidden_state_after(view: View, position: int) -> tuple[float, ...]:
    """A lie: the hidden state after the draft at that position."""
    return (*hidden_state(view, position)[:1], view[position][-1] - 0.5, view[position][-1] - 0.4)


class Memory:
    """Everything that an object of the library remembers: the contents of its tensors and its plain attributes."""

    def __init__(self, root: object) -> None:
        self.owners: list[object] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self._collect(root)

    def _collect(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, tuple | list):
            for item in value:
                self._collect(item)
        elif isinstance(value, dict):
            self._collect(list(value.values()))
        elif type(value).__module__.startswith("av_triton") and hasattr(value, "__dict__"):
            self.owners.append(value)
            self._collect(vars(value))

    def take(self) -> tuple[list[dict], list[torch.Tensor]]:
        return [dict(vars(owner)) for owner in self.owners], [t.clone() for t in self.tensors.values()]

    def put_back(self, taken: tuple[list[dict], list[torch.Tensor]]) -> None:
        for owner, attributes in zip(self.owners, taken[0], strict=True):
            vars(owner).clear()
            vars(owner).update(attributes)
        for tensor, content in zip(self.tensors.values(), taken[1], strict=True):
            tensor.copy_(content)


@dataclass(frozen=True)
class History:
    """What the verifier remembers after a history, and what a runtime remembers beside it."""

    memory: tuple[list[dict], list[torch.Tensor]]
    coefficients: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    step: int = 0
    joined: frozenset[int] = frozenset()
    proposals: tuple[int, ...] = ()
    draft_depth: int | None = None
    batch: tuple[int, ...] = ()
    admitted: Lengths = ()


Budget = Callable[[History, "torch.Tensor | None"], "int | None"]
"""The budget that a runtime puts in force, from the history and this step's scores [rows, K] (which are off limits)."""


@dataclass
class Shipped:
    """``AdaptiveVerifier`` as a policy. Requests r live in ``slots[r]``; rows follow the batch."""

    depth: int
    cost: CostTable | None
    settings: Settings
    requests: int = 2
    slots: tuple[int, ...] = (3, 1, 4)
    strata: tuple[int, ...] = (0, 0, 0)
    scored: Callable[[int, int], bool] = lambda step, request: True
    """Whether this request's drafts are scored in this step."""
    teach: Callable[[int, int], bool] | None = None
    budget: Budget = lambda history, scores: None
    replans: bool = False
    """Plan every step twice: a misuse, for the second plan takes this step's survivals for those of an earlier one."""
    peeks: bool = False
    """Learn before planning, a misuse: the last number of a view's row is taken for its draft's acceptance."""
    hidden: Callable[[View, int], tuple[float, ...]] | None = None
    """Hidden state at a position of a view; the verifier then has a head, and is told the drawn tokens."""
    position_wise: bool = False
    """Score one draft position at a time, as a runtime with an autoregressive drafter does."""
    follow_depth: bool = False
    fixed_depths: Lengths | None = None
    """Drafts drawn per request, where they differ."""
    segments: tuple[int, ...] | None = None
    padding: bool = False
    """A padding row (slot -1) with logits of its own in front of the last row."""
    learns: bool = False
    """Whether verdicts are learned from. If not, histories that differ in verdicts only are one, which saves plans."""
    warm_up: int = 0
    """Steps with random scores and verdicts before the first enumerated one; they move counters and the bypass."""
    seed: int = 0
    verifier: AdaptiveVerifier | None = None
    histories: list[History] = field(default_factory=list)
    budgets: set[tuple[int, ...]] = field(default_factory=set)
    """Budgets in force in the enumerated steps."""
    statuses: set[bool] = field(default_factory=set)
    """What status().active said after the enumerated plans."""
    plans: int = 0
    _memory: Memory | None = None
    _planned: dict[tuple, tuple[Lengths, int]] = field(default_factory=dict)
    _observed: dict[tuple, int] = field(default_factory=dict)
    _tensors: dict[View, torch.Tensor] = field(default_factory=dict)

    def start(self) -> int:
        if not self.histories:
            torch.set_num_threads(1)
            size = None if self.hidden is None else HIDDEN_SIZE
            self.verifier = AdaptiveVerifier(
                6, self.depth, "cpu", cost=self.cost, settings=self.settings, max_rows=4, hidden_size=size
            )
            self._serve_additions()
            self._memory = Memory(self.verifier)
            history, rng = History(self._memory.take()), random.Random(self.seed)
            batch = tuple(range(self.requests))
            for _ in range(self.warm_up):
                lengths, history = self._plan(history, batch, tuple(self._random_view(rng) for _ in batch))
                history = self._observe(history, tuple(rng.randint(0, n) for n in lengths))
            self.histories.append(replace(history, step=0))
            self.budgets.clear()
            self.statuses.clear()
            self.plans = 0
        return 0

    def _serve_additions(self) -> None:
        """Whatever they gain; with a head that has learned, and is about to learn again."""
        state = self.verifier.estimator.state
        state.gates.copy_(torch.tensor(GATES)[:, None])
        if state.head is not None:
            state.head.weights.copy_(torch.tensor([1.5, -2.0, 1.0, -1.5]))
            state.head.curvature.fill_(1e-3)
            state.head.counts[..., PENDING] = (MINIBATCH - 1) * Q30

    def depths(self, state: int, batch: tuple[int, ...]) -> Lengths:
        if self.fixed_depths is not None:
            return tuple(self.fixed_depths[r] for r in batch)
        depth = self.histories[state].draft_depth if self.follow_depth else None
        return (self.depth if depth is None else depth,) * len(batch)

    def plan(self, state: int, batch: tuple[int, ...], views: tuple[View, ...]) -> tuple[Lengths, int]:
        key = state, batch, views
        if key not in self._planned:
            lengths, history = self._plan(self.histories[state], batch, views)
            self.histories.append(history)
            self._planned[key] = lengths, len(self.histories) - 1
        return self._planned[key]

    def observe(self, state: int, accepted: Lengths, acceptance: tuple[Acceptance, ...] | None) -> int:
        key = state, (accepted, acceptance) if self.learns else None
        if key not in self._observed:
            self.histories.append(self._observe(self.histories[state], accepted, acceptance))
            self._observed[key] = len(self.histories) - 1
        return self._observed[key]

    def _random_view(self, rng: random.Random) -> View:
        peaks = [rng.uniform(0.5, 0.99) for _ in range(self.depth)]
        if self.hidden is None:
            return tuple((peak, 1 - peak) for peak in peaks)
        return tuple((peak, 1 - peak, rng.choice([peak, 1 - peak])) for peak in peaks)

    def _drawn(self, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the drawn tokens, int64 [depth], and hidden states [depth, d]; rows end with q(drawn)."""
        tokens, hidden = torch.zeros(self.depth, dtype=torch.int64), torch.zeros(self.depth, HIDDEN_SIZE)
        for k, row in enumerate(view):
            tokens[k], hidden[k] = row[:-1].index(row[-1]), torch.tensor(self.hidden(view, k))
        return tokens, hidden

    def _logits(self, view: View) -> torch.Tensor:
        if view not in self._tensors:
            logits = torch.full((self.depth, WIDTH), -torch.inf)
            for k, row in enumerate(view):
                logits[k, : len(row)] = torch.tensor(row, dtype=torch.float64).log().float()
            logits[len(view) :, :2] = 0.0  # positions that were not drafted hold anything finite
            self._tensors[view] = logits
        return self._tensors[view]

    def _plan(self, history: History, batch: tuple[int, ...], views: tuple[View, ...]) -> tuple[Lengths, History]:
        verifier = self.verifier
        self._memory.put_back(history.memory)
        new = [r for r in batch if r not in history.joined]
        if new:
            verifier.reset(self._ids(new), torch.tensor([self.strata[r] for r in new], dtype=torch.int32))
        scored = [i for i, r in enumerate(batch) if self.scored(history.step, r)]
        drawn = [] if self.hidden is None else [self._drawn(views[i]) for i in scored]
        if self.peeks:
            seen = torch.tensor([[row[-1] for row in view] for view in views])
        if self.peeks or self.hidden is not None:
            views = tuple(tuple(row[:-1] for row in view) for view in views)
        rows = [self._logits(views[i]) for i in scored]
        slots, score_slots = list(self._ids(batch)), list(self._ids([batch[i] for i in scored]))
        drafts = [len(view) for view in views]
        at = len(batch) - 1
        if self.padding:
            rows.insert(min(at, len(rows)), torch.randn(self.depth, WIDTH, generator=torch.Generator().manual_seed(1)))
            score_slots.insert(min(at, len(score_slots)), torch.tensor(-1))
            if drawn:
                drawn.insert(min(at, len(drawn)), drawn[0])
            slots.insert(at, torch.tensor(-1))
            drafts.insert(at, 0)
        scores = None
        if scored:
            logits, ids = torch.stack(rows), torch.stack(score_slots).int()
            tokens, hidden = (torch.stack(each) for each in zip(*drawn, strict=True)) if drawn else (None, None)
            if self.position_wise:
                for k in range(max(drafts)):
                    token, state = (None if each is None else each[:, k] for each in (tokens, hidden))
                    verifier.score(logits[:, k].contiguous(), ids, position=k, tokens=token, hidden=state)
            else:
                scores = verifier.score(logits, ids, tokens=tokens, hidden=hidden)
                if self.peeks:
                    everything = torch.full(ids.shape, self.depth, dtype=torch.int32)
                    verifier.observe(ids, everything, everything, acceptance=seen)
                    scores = verifier.score(logits, ids)
        ids = torch.stack(slots).int()
        plan = verifier.plan(
            ids,
            drafts=None if all(d == self.depth for d in drafts) else torch.tensor(drafts, dtype=torch.int32),
            budget=self.budget(history, scores),
            segments=None if self.segments is None else torch.tensor(self.segments, dtype=torch.int32),
        )
        if self.replans:
            plan = verifier.plan(ids)
        admitted = plan.admitted.tolist()
        if self.padding and admitted.pop(at) != 0:
            raise AssertionError("a padding row was admitted")
        self.plans += 1
        self.budgets.add(tuple(plan.budget.tolist()))
        self.statuses.add(bool(verifier.status().active))
        after = replace(
            history,
            memory=self._memory.take(),
            joined=history.joined | set(batch),
            proposals=(*history.proposals, int(plan.proposal.sum()))[-4:],
            draft_depth=int(plan.draft_depth[0]),
            batch=batch,
            admitted=tuple(admitted),
        )
        return tuple(admitted), after

    def _observe(
        self, history: History, accepted: Lengths, acceptance: tuple[Acceptance, ...] | None = None
    ) -> History:
        self._memory.put_back(history.memory)
        teach = None
        if not self.learns:
            teach = torch.zeros(len(accepted), dtype=torch.bool)
        elif self.teach is not None:
            teach = torch.tensor([self.teach(history.step, r) for r in history.batch])
        self.verifier.observe(
            self._ids(history.batch),
            torch.tensor(accepted, dtype=torch.int32),
            admitted=torch.tensor(history.admitted, dtype=torch.int32),
            teach=teach,
            acceptance=None if acceptance is None else self._told(acceptance),
        )
        fitted = self.verifier.coefficients()
        coefficients = (*map(float, fitted.slopes), *(float(b) for row in fitted.intercepts for b in row))
        state = self.verifier.estimator.state
        return replace(
            history,
            memory=self._memory.take(),
            coefficients=coefficients,
            offsets=tuple(state.offsets.tolist()),
            weights=() if state.head is None else tuple(state.head.weights[0].tolist()),
            step=history.step + 1,
        )

    def _told(self, acceptance: tuple[Acceptance, ...]) -> torch.Tensor:
        told = torch.full((len(acceptance), self.depth), torch.nan)
        for row, found in zip(told, acceptance, strict=True):
            row[: len(found)] = torch.tensor(found)
        return told

    def _ids(self, requests: Sequence[int]) -> torch.Tensor:
        return torch.tensor([self.slots[r] for r in requests], dtype=torch.int32)
