"""What is compared, behind one interface: each scores a batch, then sees what came of it."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from av_triton import GREEDY, SAMPLED, AcceptanceEstimator, Settings
from benchmarks.peers.adaptive_rule import PeerEstimator, cancelled
from benchmarks.score.streams import Batch
from benchmarks.traces.quality import logits_for


class Arm(Protocol):
    def score(self, batch: Batch) -> npt.NDArray[np.floating]:
        """[B, K], acceptance probabilities."""
        ...

    def observe(self, batch: Batch) -> None:
        """Of the batch that was scored last."""
        ...


class Peer:
    """The rule of vLLM 0.33.0."""

    def __init__(self, positions: int) -> None:
        self.rule = PeerEstimator(positions)

    def score(self, batch: Batch) -> npt.NDArray[np.floating]:
        self.features = cancelled(batch.rounds.features)
        self.p = self.rule.score(self.features)
        return self.p

    def observe(self, batch: Batch) -> None:
        self.rule.observe(self.features, self.p, batch.accepted, batch.taught * self.p.shape[1])


class Estimator:
    """`AcceptanceEstimator`, by its public interface. exact: it is taught acceptance probabilities."""

    def __init__(self, slots: int, positions: int, settings: Settings | None = None, exact: bool = False) -> None:
        self.inner, self.exact = AcceptanceEstimator(slots, positions, settings=settings), exact

    def score(self, batch: Batch) -> npt.NDArray[np.floating]:
        slots = torch.from_numpy(batch.slots)
        new = torch.from_numpy(batch.fresh)
        if new.any():
            strata = torch.from_numpy(np.where(batch.rounds.greedy, GREEDY, SAMPLED).astype(np.int32))
            self.inner.reset(slots[new], strata[new])
        scores: npt.NDArray[np.floating] = self.inner.score(logits_for(batch.rounds.features), slots).numpy().copy()
        return scores

    def observe(self, batch: Batch) -> None:
        admitted = torch.full((len(batch.slots),), batch.rounds.alpha.shape[1], dtype=torch.int32)
        known = {"acceptance": torch.from_numpy(batch.rounds.alpha)} if self.exact else {}
        slots, accepted, taught = map(torch.from_numpy, (batch.slots, batch.accepted, batch.taught))
        self.inner.observe(slots, accepted, admitted, taught, **known)
