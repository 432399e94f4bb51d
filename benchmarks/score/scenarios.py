"""Streams on which an addition could do harm, and what is held out of learning where its gain is measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.online.scenarios import EASY, Law
from benchmarks.online.scenarios import drawn as drawn_steps
from benchmarks.score.streams import Batch, Mask, Order, Rounds, batches, in_turn, shuffled
from benchmarks.traces.quality import WORKLOADS

ROWS = 16  # requests at a time
FOLDS = 5
NOISE = (64, 576, 4096)  # coordinates
WIDTH = 576


@dataclass(frozen=True)
class Scenario:
    """rounds: made when they are needed, for hidden states are large. rows: most requests at a time. taught: bool [N],
    whose labels are learned from; the others are scored. None: all are both."""

    name: str
    rounds: Callable[[], Rounds]
    order: Callable[[Rounds], Order]
    rows: int = ROWS
    taught: Mask | None = None

    def stream(self, seed: int) -> Iterator[Batch]:
        rounds = self.rounds()
        return batches(rounds, self.rows, self.order(rounds), seed, self.taught)


def by_prompt(rounds: Rounds, fold: int) -> Mask:
    """bool [N]: not of the fold's prompts."""
    prompts = np.random.default_rng(0).permutation(np.unique(rounds.prompt))
    return ~np.isin(rounds.prompt, prompts[fold::FOLDS])


def held_out(name: str, rounds: Rounds, taught: Mask, rows: int = ROWS) -> Scenario:
    """Two passes, the second with new verdicts and in another order; what is held out is served with the rest."""
    return Scenario(name, lambda: rounds, partial(shuffled, passes=2), rows, taught)


def prompts_held_out(name: str, rounds: Rounds, rows: int = ROWS) -> list[Scenario]:
    return [held_out(f"{name}, fold {fold}", rounds, by_prompt(rounds, fold), rows) for fold in range(FOLDS)]


def workloads_held_out(name: str, rounds: Rounds) -> list[Scenario]:
    return [
        held_out(f"{name}, without workload {each}", rounds, rounds.workload != each)
        for each in np.unique(rounds.workload)
    ]


def served(name: str, rounds: Rounds, rows: int = ROWS, passes: int = 1) -> Scenario:
    return Scenario(name, lambda: rounds, partial(shuffled, passes=passes), rows)


def switched(name: str, rounds: Rounds, *workloads: int, rows: int = ROWS) -> Scenario:
    return Scenario(name, lambda: rounds, lambda found: in_turn(found, *workloads), rows)


def noise(rounds: Rounds, width: int) -> Rounds:
    shape = (*rounds.features.shape, width)
    return rounds.with_hidden(np.random.default_rng(0).standard_normal(shape, np.float32))


def scaled(rounds: Rounds, share: float = 0.05, scale: float = 1e3) -> Rounds:
    large = np.random.default_rng(0).random(len(rounds)) < share
    return rounds.with_hidden(rounds.hidden * np.where(large, np.float32(scale), np.float32(1))[:, None, None])


def misplaced(rounds: Rounds) -> Rounds:
    """Every draft with the hidden state of another."""
    return rounds.with_hidden(rounds.hidden[np.random.default_rng(0).permutation(len(rounds))])


def turned(rounds: Rounds) -> Rounds:
    """The hidden states of the second workload with the opposite sign: what was learned is wrong there."""
    sign = np.where(rounds.workload == rounds.workload.max(), np.float32(-1), np.float32(1))
    return rounds.with_hidden(rounds.hidden * sign[:, None, None])


def drawn(law: Law, steps: int = 200) -> Rounds:
    """Independent drafts by the law, requests of some steps each; noise for hidden states."""
    found = [step for step, _ in zip(drawn_steps(law, 0), range(steps), strict=False)]
    features, alpha, fresh = (
        np.stack([getattr(step, name) for step in found], 1) for name in ("features", "alpha", "fresh")
    )
    rows, _, positions = features.shape
    request = np.cumsum(fresh.ravel())
    rounds = Rounds(
        features=features.reshape(-1, positions),
        alpha=alpha.reshape(-1, positions),
        log_q=-np.logaddexp(0, -features).reshape(-1, positions).astype(np.float32),
        hidden=np.zeros((rows * steps, positions, 0), np.float32),
        request=request,
        prompt=request,
        workload=np.zeros(rows * steps, np.int64),
        greedy=np.zeros(rows * steps, bool),
    )
    return noise(rounds, WIDTH)


ONE_HOT = Law(0.5, (0.0,) * 5, one_hot=1.0)
THIRD_ONE_HOT = replace(EASY, one_hot=1 / 3)


def harmful(with_hidden: dict[str, Rounds], without: dict[str, Rounds]) -> list[Scenario]:
    """By name of the set. with_hidden: two workloads each."""
    found = []
    for name, rounds in with_hidden.items():
        a, b = (WORKLOADS[each] for each in np.unique(rounds.workload))
        first, second = np.unique(rounds.workload).tolist()
        found += [served(f"{name}: {rows} at a time", rounds, rows) for rows in (1, 4, 16, 48)]
        found += [
            switched(f"{name}: {a}, then {b}, 48 at a time", rounds, first, second, rows=48),
            switched(f"{name}: {b}, then {a}, 48 at a time", rounds, second, first, rows=48),
            switched(f"{name}: {a}, {b}, {a}", rounds, first, second, first),
            served(f"{name}: 5 % of the hidden states times 1000", scaled(rounds)),
            served(f"{name}: hidden states of other drafts", misplaced(rounds)),
            switched(f"{name}: {a}, then {b} with opposite hidden states", turned(rounds), first, second),
        ]
        found += [
            Scenario(f"{name}: {width} coordinates of noise", partial(noise, rounds, width), shuffled)
            for width in NOISE
        ]
    for name, rounds in without.items():
        if rounds.greedy.all():
            found.append(served(f"{name}, greedy: {WIDTH} coordinates of noise", noise(rounds, WIDTH), passes=2))
    for name, law in (("one-hot rows, 10 % accepted", ONE_HOT), ("a third of the rows one-hot", THIRD_ONE_HOT)):
        found.append(served(f"{name}: {WIDTH} coordinates of noise", drawn(law)))
    return found
