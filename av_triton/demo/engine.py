"""The decode loop. Each `Arm` decodes the same prompts in its way: plain, with a fixed number of drafts, adaptively."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from av_triton import GREEDY, SAMPLED, AdaptiveVerifier, CostTable
from av_triton.demo.drafters import Drafter
from av_triton.demo.model import Cache, Model, TokenList
from av_triton.demo.sampling import Sampler


class Prompts:
    """Prompts as token ids, and what a prefill of all but the last token leaves: computed once, shared by all arms."""

    def __init__(
        self,
        model: Model,
        ids: Sequence[list[int]],
        stop: int,
        taps: Sequence[int],
        track: Callable[[Sequence[list[int]]], Iterable[list[int]]] = iter,
    ) -> None:
        self.ids, self.stop, self.taps = ids, stop, tuple(taps)
        self.longest = max(map(len, ids))
        self.prefilled: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        scratch = model.cache(1, self.longest)
        for prompt in track(ids):
            n = len(prompt) - 1
            tokens = _tokens(scratch, [0], [0], [n])
            _, tapped = model.forward(torch.tensor(prompt[:-1], device=model.device), tokens, taps=self.taps)
            keys, values = (x[:, 0, :, :n].clone() for x in (scratch.keys, scratch.values))
            self.prefilled.append((keys, values, tapped))

    def fill(self, index: int, slot: int, cache: Cache, drafter: Drafter | None, draft_cache: Cache | None) -> None:
        keys, values, tapped = self.prefilled[index]
        n = keys.shape[2]
        cache.keys[:, slot, :, :n], cache.values[:, slot, :, :n] = keys, values
        if drafter is not None and draft_cache is not None:
            mine = [tapped[self.taps.index(layer)] for layer in drafter.taps]
            drafter.extend(mine, _tokens(draft_cache, [slot], [0], [n]), draft_cache)


def _tokens(cache: Cache, slots: list[int], starts: list[int], counts: list[int]) -> TokenList:
    a, b, c = (torch.tensor(x, device=cache.keys.device) for x in (slots, starts, counts))
    return TokenList(cache, a, b, c)


@dataclass
class Counts:
    """What an arm has done. Seconds by part: draft (with its scores), control (plan, observe), verify, sample."""

    steps: int = 0
    rows: int = 0
    emitted: int = 0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("draft", "control", "verify", "sample"), 0.0)
    )

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Labelled:
    """Drafts with a verdict: position, predicted probability and verdict, each [n]."""

    position: Tensor
    predicted: Tensor
    accepted: Tensor


class Arm:
    """One way to decode, with a pool of `batch` slots that waiting prompts take as they become free.

    The queue never runs dry, as in serving: after the last prompt the first ones come again, so that every step is one
    of a full batch. The arm has finished when every prompt has been decoded once.

    drafter None: plain decoding. verifier None: `depth` drafts per request, all verified. With a verifier: `depth`
    drafts at most; the plan says how many to verify, and how many to draft in the next step.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        prompts: Prompts,
        sampler: Sampler,
        batch: int,
        max_new: int,
        *,
        drafter: Drafter | None = None,
        depth: int = 0,
        verifier: AdaptiveVerifier | None = None,
    ) -> None:
        self.name, self.model, self.prompts, self.sampler = name, model, prompts, sampler
        self.max_new = max_new
        self.drafter, self.depth, self.verifier = drafter, depth, verifier
        self.next_depth = depth
        self.cache = model.cache(batch, prompts.longest + max_new + depth)
        self.draft_cache = drafter.cache(self.cache) if drafter else None
        self.started = 0
        self.outputs: list[list[int]] = []
        self.running = [0] * batch
        self.slots = torch.arange(batch, device=model.device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.pending = torch.zeros_like(self.lengths)
        self.counts = Counts()
        self.rounds: list[tuple[int, float]] = []
        self.labelled: list[Labelled] = []
        self.clock = 0.0
        for slot in range(batch):
            self._start(slot)

    @property
    def finished(self) -> bool:
        count = len(self.prompts.ids)
        return self.started >= count and min(self.running) >= count

    def round(self, tokens: int) -> None:
        """Decodes until it has emitted `tokens` tokens in all its rounds together, or has finished."""
        emitted, seconds = self.counts.emitted, self.counts.total_seconds
        while not self.finished and self.counts.emitted < tokens:
            self.step()
        self.rounds.append((self.counts.emitted - emitted, self.counts.total_seconds - seconds))

    def step(self) -> None:
        """Draft, plan, verify, accept, for every running request."""
        self.clock = time.perf_counter()
        slots, lengths, pending = self.slots, self.lengths, self.pending
        drafts, predicted, *distributions = self._draft(slots, lengths, pending)
        admitted = self._plan(slots, drafts)

        tokens = TokenList(self.cache, slots, lengths, admitted + 1)
        ids = torch.cat((pending[:, None], drafts), 1)[tokens.rows, tokens.columns]
        hidden, tapped = self.model.forward(ids, tokens, taps=self.drafter.taps if self.drafter else ())
        logits = self.model.head(hidden)
        if self.drafter and self.draft_cache:
            self.drafter.extend(tapped, tokens, self.draft_cache)
        self._lap("verify")

        accepted, following, acceptance = self.sampler.verify(logits, tokens.offsets, drafts, admitted, *distributions)
        self.lengths = lengths + accepted + 1
        self.pending = following
        kept = torch.cat((drafts, following[:, None]), 1)
        kept[torch.arange(len(slots), device=slots.device), accepted] = following
        host_accepted, host_kept = accepted.tolist(), kept.tolist()
        self._lap("sample")

        if self.verifier:
            self.verifier.observe(slots, accepted.to(torch.int32), acceptance=acceptance)
            self._lap("control")
            self._label(predicted, admitted, accepted)
        counts = self.counts
        counts.steps += 1
        counts.rows += len(slots)
        counts.drafted += drafts.numel()
        counts.admitted += len(ids) - len(slots)
        counts.accepted += sum(host_accepted)
        for slot, n, row in zip(range(len(slots)), host_accepted, host_kept, strict=True):
            self._emit(slot, row[: n + 1])

    def _lap(self, part: str) -> None:
        now = time.perf_counter()
        self.counts.seconds[part] += now - self.clock
        self.clock = now

    def _draft(self, slots: Tensor, lengths: Tensor, pending: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Drafts and scores [B, depth], draft logits [B, depth, V'] (empty when greedy), log-normalisers [B, depth]."""
        rows, depth = len(slots), self.next_depth
        kept: list[Tensor] = []
        scores: list[Tensor] = []
        normalisers: list[Tensor] = []

        def choose(logits: Tensor, position: int | None) -> Tensor:
            if self.verifier:
                seeds = self.sampler.seeds(*logits.shape[:-1])
                drawn = self.verifier.sample(logits, slots, seeds, position, self.sampler.temperature)
                tokens, log_normalisers = drawn.tokens.clone(), drawn.log_normalisers.clone()
                scores.append(drawn.scores.reshape(rows, -1).clone())
            else:
                tokens, log_normalisers = self.sampler.draw(logits)
            normalisers.append(log_normalisers.view(rows, -1))
            if self.sampler.temperature:
                kept.append(logits.view(rows, -1, logits.shape[-1]))
            return tokens

        if self.drafter is None or self.draft_cache is None or depth == 0:
            drafts = pending.new_zeros(rows, 0)
        else:
            drafts = self.drafter.draft(pending, slots, lengths, depth, self.draft_cache, choose)
        self._lap("draft")
        nothing = torch.zeros(rows, 0, 1, device=slots.device)
        predicted, log_normalisers = (torch.cat(x, 1) if x else nothing[:, :, 0] for x in (scores, normalisers))
        return drafts, predicted, torch.cat(kept, 1) if kept else nothing, log_normalisers

    def _plan(self, slots: Tensor, drafts: Tensor) -> Tensor:
        """How many drafts of each row to verify, int64 [B]."""
        rows, depth = drafts.shape
        if self.verifier is None:
            return torch.full_like(slots, depth)
        plan = self.verifier.plan(slots, torch.full((rows,), depth, dtype=torch.int32, device=slots.device))
        if self.verifier.settings.autoregressive:
            self.next_depth = int(plan.draft_depth)
        admitted = plan.admitted.long()
        self._lap("control")
        return admitted

    def _label(self, predicted: Tensor, admitted: Tensor, accepted: Tensor) -> None:
        position = torch.arange(predicted.shape[1], device=predicted.device).expand_as(predicted)
        known = (position < admitted[:, None]) & (position <= accepted[:, None])
        verdict = position < accepted[:, None]
        self.labelled.append(Labelled(position[known], predicted[known], verdict[known]))

    def _emit(self, slot: int, tokens: list[int]) -> None:
        output = self.outputs[self.running[slot]]
        for token in tokens[: self.max_new - len(output)]:
            output.append(token)
            self.counts.emitted += 1
            if token == self.prompts.stop:
                break
        if output[-1] == self.prompts.stop or len(output) == self.max_new:
            self._start(slot)

    def _start(self, slot: int) -> None:
        """Gives a free slot to the next prompt. The prefill counts for no arm: they share it."""
        index = self.started % len(self.prompts.ids)
        self.running[slot] = self.started
        self.started += 1
        self.outputs.append([])
        self.prompts.fill(index, slot, self.cache, self.drafter, self.draft_cache)
        self.lengths[slot] = len(self.prompts.ids[index]) - 1
        self.pending[slot] = self.prompts.ids[index][-1]
        if self.verifier:
            fresh = torch.tensor([slot], dtype=torch.int32, device=self.model.device)
            self.verifier.reset(fresh, torch.full_like(fresh, SAMPLED if self.sampler.temperature else GREEDY))


def run(arms: Sequence[Arm], round_tokens: int, advance: Callable[[Arm, int], None]) -> None:
    """Decodes with all arms in turns of `round_tokens` tokens, so that a slow spell of the machine meets them all."""
    goal = 0
    while not all(arm.finished for arm in arms):
        goal += round_tokens
        for arm in arms:
            if not arm.finished:
                arm.round(goal)
                advance(arm, arm.rounds[-1][0])


def choose_threads(model: Model, batch: int, context: int) -> int:
    """Sets and returns the number of torch threads, one or all, whichever decodes faster.

    Where others use the cores too, the late threads of every parallel region cost more than the others bring.
    """
    cache = model.cache(batch, context + 2)
    slots = torch.arange(batch, device=model.device)
    tokens = TokenList(cache, slots, torch.full_like(slots, context), torch.full_like(slots, 2))
    times = {}
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        laps = []
        for _ in range(5):
            start = time.perf_counter()
            model.head(model.forward(tokens.slots, tokens)[0]).argmax(-1)
            laps.append(time.perf_counter() - start)
        times[threads] = median(laps)
    best = min(times, key=lambda threads: times[threads])
    torch.set_num_threads(best)
    return best


def measure_costs(model: Model, drafter: Drafter, batch: int, depth: int, context: int, sampler: Sampler) -> CostTable:
    """Step times by size on this machine, at a context of `context` tokens per request."""
    cache = model.cache(batch, context + depth + 1)
    draft_cache = drafter.cache(cache)

    def rows(n: int) -> Tensor:
        return torch.arange(n, device=model.device)

    def draft(requests: int) -> None:
        slots = rows(requests)
        lengths = torch.full_like(slots, context)
        drafter.draft(slots, slots, lengths, depth, draft_cache, lambda logits, _: sampler.draw(logits)[0])

    def verify(n: int) -> None:
        slots = rows(min(n, batch))
        counts = n // len(slots) + (slots < n % len(slots)).long()
        tokens = TokenList(cache, slots, torch.full_like(slots, context), counts)
        hidden, tapped = model.forward(rows(n), tokens, taps=drafter.taps)
        drafter.extend(tapped, tokens, draft_cache)
        model.head(hidden).argmax(-1)

    # A matrix product of a height not met before costs the CPU library a set-up, as a new graph would: keep to a few.
    most = batch * (depth + 1)
    sixths = (*range(6, 12), *range(12, 18, 2), *range(18, 6 * (depth + 1), 6))
    sizes = sorted({batch * i // 6 for i in sixths if batch * i // 6 < most} | {most})
    return CostTable.measure(
        verify, sizes, max_tokens=most, captured=sizes, draft=draft, max_requests=batch, draft_sizes=[batch]
    )


def first_differences(model: Model, plain: Arm, other: Arm) -> list[tuple[int, int, float]]:
    """(prompt, position, gap of the two target logits) where another arm's output first leaves plain decoding's."""
    found = []
    for index in range(len(plain.prompts.ids)):
        a, b = plain.outputs[index], other.outputs[index]
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            if at == min(len(a), len(b)):
                found.append((index, at, float("inf")))
                continue
            ids = plain.prompts.ids[index] + a[:at]
            tokens = _tokens(model.cache(1, len(ids)), [0], [0], [len(ids)])
            hidden, _ = model.forward(torch.tensor(ids, device=model.device), tokens)
            logits = model.head(hidden[-1:])[0]
            found.append((index, at, float((logits[a[at]] - logits[b[at]]).abs())))
    return found
