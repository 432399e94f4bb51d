"""Recorded rounds, served again as streams of batches: the same one for every estimator that is compared.

A round is one step of one request: its K drafts. The rounds of a request stay in their recorded order; which requests
share a batch, and the verdicts, are drawn anew.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.traces.quality import accepted_before_rejection
from benchmarks.traces.quality import load as load_trace

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rounds:
    """N rounds.

    features: float32 [N, K], logit(q_max). alpha: float32 [N, K], exact acceptance probabilities. log_q: float32
    [N, K], log q of the drafted token. hidden: float32 [N, K, d], the drafter's last hidden states; d = 0 where the
    trace has none. request, prompt, workload: int64 [N]; a request's rounds are in order. greedy: bool [N].
    """

    features: Floats
    alpha: Floats
    log_q: Floats
    hidden: Floats
    request: Integers
    prompt: Integers
    workload: Integers
    greedy: Mask

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, at: Any) -> "Rounds":
        return Rounds(*(getattr(self, field.name)[at] for field in fields(self)))

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """[N, K], the probability that the draft gets a label: that all drafts before it are accepted."""
        before = np.cumprod(self.alpha[:, :-1], 1, dtype=np.float64)
        return np.concatenate([np.ones((len(self), 1)), before], 1)

    def with_hidden(self, hidden: Floats) -> "Rounds":
        return replace(self, hidden=hidden)


def load(path: Path) -> Rounds:
    """A trace as `benchmarks/traces/README.md` has it, with `hid` [n, d] where the hidden states were recorded, and
    `round`, by whose restarts requests are told apart (without it: one request a row and prompt)."""
    trace = load_trace(path)
    steps, rows, positions = trace.features.shape
    missing = [name for name in ("prompt", "log_q_sampled") if name not in trace.extra]
    if missing:
        raise ValueError(f"{path}: no column {', '.join(missing)}; record it, or leave the trace out")
    with np.load(path) as file:
        order = np.lexsort((file["pos"], file["row"], file["step"]))
        rounds = file["round"][order].astype(np.int64) if "round" in file.files else np.zeros(len(order), np.int64)
    hidden = np.zeros((steps, rows, positions, 0), np.float32) if trace.hidden is None else trace.hidden
    prompt = trace.extra["prompt"][..., 0].astype(np.int64)
    number = rounds.reshape(steps, rows, positions)[..., 0]
    restarted = (prompt[1:] != prompt[:-1]) | (number[1:] < number[:-1])
    request = np.concatenate([np.zeros((1, rows), np.int64), np.cumsum(restarted, 0)]) * rows + np.arange(rows)
    by_row = (1, 0, 2)  # the rounds of a row one after the other
    return Rounds(
        features=trace.features.transpose(by_row).reshape(-1, positions),
        alpha=trace.alpha.transpose(by_row).reshape(-1, positions),
        log_q=trace.extra["log_q_sampled"].astype(np.float32).transpose(by_row).reshape(-1, positions),
        hidden=hidden.transpose(1, 0, 2, 3).reshape(steps * rows, positions, -1),
        request=request.T.ravel(),
        prompt=prompt.T.ravel(),
        workload=trace.workload.T.ravel(),
        greedy=np.full(steps * rows, trace.greedy),
    )


def joined(parts: Sequence[Rounds]) -> Rounds:
    """Several traces as one; requests and prompts of different traces are different."""
    moved = []
    requests = prompts = 0
    for part in parts:
        moved.append(replace(part, request=part.request + requests, prompt=part.prompt + prompts))
        requests, prompts = int(moved[-1].request.max()) + 1, int(moved[-1].prompt.max()) + 1
    return Rounds(*(np.concatenate([getattr(each, field.name) for each in moved]) for field in fields(Rounds)))


@dataclass(frozen=True)
class Batch:
    """One step of B requests. slots: int64 [B]; fresh: bool [B], new in its slot; at: int64 [B], which rounds these
    are; accepted: int64 [B], verdicts; taught: bool [B], whether the labels may be learned from."""

    rounds: Rounds
    slots: Integers
    fresh: Mask
    at: Integers
    accepted: Integers
    taught: Mask


Order = Callable[[np.random.Generator], Sequence[int]]


def shuffled(rounds: Rounds, passes: int = 1) -> Order:
    """All requests in random order, `passes` times."""
    requests = np.unique(rounds.request)
    return lambda rng: np.concatenate([rng.permutation(requests) for _ in range(passes)]).tolist()


def in_turn(rounds: Rounds, *workloads: int) -> Order:
    """The requests of one workload after those of the other, each in random order."""
    groups = [np.unique(rounds.request[rounds.workload == each]) for each in workloads]
    return lambda rng: np.concatenate([rng.permutation(group) for group in groups]).tolist()


def batches(rounds: Rounds, rows: int, order: Order, seed: int, taught: Mask | None = None) -> Iterator[Batch]:
    """Up to `rows` requests at a time; where one ends the next of the order takes its slot. taught: bool [N]."""
    rng = np.random.default_rng(seed)
    waiting = iter(order(rng))
    of = {int(request): np.flatnonzero(rounds.request == request) for request in np.unique(rounds.request)}
    running: list[tuple[Integers, int] | None] = [None] * rows
    while True:
        slots, fresh, at = [], [], []
        for slot in range(rows):
            now = running[slot]
            if now is None or now[1] == len(now[0]):
                request = next(waiting, None)
                running[slot] = now = None if request is None else (of[request], 0)
            if now is not None:
                slots.append(slot)
                fresh.append(now[1] == 0)
                at.append(now[0][now[1]])
                running[slot] = now[0], now[1] + 1
        if not at:
            return
        chosen = rounds[np.array(at)]
        accepted = accepted_before_rejection(rng.random(chosen.alpha.shape, np.float32) < chosen.alpha)
        may = np.ones(len(at), bool) if taught is None else taught[at]
        yield Batch(chosen, np.array(slots), np.array(fresh), np.array(at), accepted, may)
