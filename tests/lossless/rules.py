"""Memoryless rules for the verify lengths, for what needs no planner: fixed lengths, thresholds, counter-examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.lossless.exact import Lengths, View


@dataclass(frozen=True)
class Rule:
    """The lengths of a step as a function of what is shown in that step alone."""

    lengths: Callable[[tuple[View, ...]], Lengths]
    depth: int

    def start(self) -> None:
        return None

    def depths(self, state: None, batch: tuple[int, ...]) -> Lengths:
        return (self.depth,) * len(batch)

    def plan(self, state: None, batch: tuple[int, ...], views: tuple[View, ...]) -> tuple[Lengths, None]:
        return self.lengths(views), None

    def observe(self, state: None, accepted: Lengths, acceptance: object) -> None:
        return None
