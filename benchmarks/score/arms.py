"""What is compared, behind one interface: each scores a batch, then sees what came of it."""

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from av_triton import GREEDY, SAMPLED, AcceptanceEstimator, Settings
from benchmarks.peers.adaptive_rule import PeerEstimator, cancelled
from benchmarks.score.streams import Batch
from benchmarks.traces.quality import accepted_before_rejection, drafts_for, logits_for


class Arm(Protocol):
    def score(self, batch: Batch) -> npt.NDArray[np.floating]:
        """[B, K], acceptance probabilities."""
        ...

    def observe(self, batch: Batch) -> None:
        """Of the batch that was scored last."""
        ...


class Redrawn:
    """An arm that is taught by verdicts of its own, drawn once more for the same drafts."""

    def __init__(self, inner: Arm) -> None:
        self.inner = inner
        self.random: np.random.Generator | None = None

    def score(self, batch: Batch) -> npt.NDArray[np.floating]:
        return self.inner.score(batch)

    def observe(self, batch: Batch) -> None:
        # Other draws for another order, which begins with other requests.
        self.random = self.random or np.random.default_rng([*batch.at, *batch.accepted])
        accepted = accepted_before_rejection(self.random.random(batch.rounds.alpha.shape) < batch.rounds.alpha)
        self.inner.observe(replace(batch, accepted=accepted))


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
    """`AcceptanceEstimator`, by its public interface. exact: it is taught acceptance probabilities. width: of the
    hidden states that its head gets; 0: it has none."""

    def __init__(
        self, slots: int, positions: int, settings: Settings | None = None, exact: bool = False, width: int = 0
    ) -> None:
        self.inner = AcceptanceEstimator(slots, positions, settings=settings, hidden_size=width or None)
        self.exact = exact

    def score(self, batch: Batch) -> npt.NDArray[np.floating]:
        slots = torch.from_numpy(batch.slots)
        new = torch.from_numpy(batch.fresh)
        if new.any():
            strata = torch.from_numpy(np.where(batch.rounds.greedy, GREEDY, SAMPLED).astype(np.int32))
            self.inner.reset(slots[new], strata[new])
        scores: npt.NDArray[np.floating] = self._score(batch, slots).numpy().copy()
        return scores

    def _score(self, batch: Batch, slots: torch.Tensor) -> torch.Tensor:
        if self.inner.hidden_size is None:
            return self.inner.score(logits_for(batch.rounds.features), slots)
        logits, tokens = drafts_for(batch.rounds.features, batch.rounds.log_q)
        return self.inner.score(logits, slots, tokens=tokens, hidden=torch.from_numpy(batch.rounds.hidden))

    def observe(self, batch: Batch) -> None:
        admitted = torch.full((len(batch.slots),), batch.rounds.alpha.shape[1], dtype=torch.int32)
        known = {"acceptance": torch.from_numpy(batch.rounds.alpha)} if self.exact else {}
        slots, accepted, taught = map(torch.from_numpy, (batch.slots, batch.accepted, batch.taught))
        self.inner.observe(slots, accepted, admitted, taught, **known)
