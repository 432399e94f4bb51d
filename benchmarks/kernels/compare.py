"""One comparison: two arms timed in turns, and a speed-up that exists only where the results were checked."""

import statistics
import time
from collections.abc import Callable

import msgspec


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in microseconds. `wrong` says what the correctness check of the same shape found; empty: nothing.

    ratio: median over the rounds of peer / ours, both measured in the same round.
    """

    what: str
    shape: str
    ours: str
    peer: str
    ours_us: float
    peer_us: float
    ratio: float
    wrong: str = ""

    @property
    def speed_up(self) -> float | None:
        """None where the results are wrong: nothing that computes something else is faster."""
        return None if self.wrong else self.ratio

    def shown(self) -> str:
        return f"refused: {self.wrong}" if self.speed_up is None else f"{self.speed_up:.1f}"


def host_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds of the calling thread per call: its CPU time, which other processes on the machine do not change."""
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls * 1e6


def in_turns(
    arms: dict[str, Callable[[], object]],
    rounds: int,
    calls: int,
    timer: Callable[[Callable[[], object], int], float] = host_us,
) -> dict[str, list[float]]:
    """Microseconds per call, one sample an arm and round; every other round in reverse order. The first is dropped."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            samples[name].append(timer(arms[name], calls))
    return {name: found[1:] for name, found in samples.items()}


def compare(
    what: str, shape: str, samples: dict[str, list[float]], pairs: list[tuple[str, str]], wrong: dict[str, str]
) -> list[Comparison]:
    """Every (ours, peer) of `pairs`; `wrong`: by arm, what its correctness check found."""
    return [
        Comparison(
            what=what,
            shape=shape,
            ours=ours,
            peer=peer,
            ours_us=statistics.median(samples[ours]),
            peer_us=statistics.median(samples[peer]),
            ratio=statistics.median(b / a for a, b in zip(samples[ours], samples[peer], strict=True)),
            wrong="; ".join(filter(None, (wrong.get(ours, ""), wrong.get(peer, "")))),
        )
        for ours, peer in pairs
    ]
