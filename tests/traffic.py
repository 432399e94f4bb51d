"""Random traffic for an estimator with a head: drafts whose acceptance depends on their hidden states, or does not."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from av_triton import AcceptanceEstimator
from av_triton.ops.accumulate import SETTLED
from av_triton.ops.select import Q30

ROWS, K, D = 6, 3, 16
SLOTS = ROWS + 2


def settle(estimator: AcceptanceEstimator) -> None:
    """As after many labels: its gates move from now on."""
    estimator.state.labels[:, 0] = SETTLED * Q30


def two_tokens(f: torch.Tensor) -> torch.Tensor:
    """Logits whose more likely token has the log-odds f >= 0: [..., 2]."""
    return torch.stack([f, torch.zeros_like(f)], -1)


@dataclass
class Step:
    slots: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    alpha: torch.Tensor
    accepted: torch.Tensor
    admitted: torch.Tensor
    teach: torch.Tensor

    @property
    def omega(self) -> torch.Tensor:
        return torch.cat([torch.ones_like(self.alpha[:, :1]), self.alpha[:, :-1]], 1).cumprod(1)

    def score(self, estimator: AcceptanceEstimator, order: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        hidden = None if estimator.hidden_size is None else self.hidden[order]
        scores = estimator.score(self.logits[order], self.slots[order], tokens=self.tokens[order], hidden=hidden)
        return scores.clone()

    def observe(
        self, estimator: AcceptanceEstimator, exact: bool = True, order: torch.Tensor | slice = slice(None)
    ) -> None:
        estimator.observe(
            *(each[order] for each in (self.slots, self.accepted, self.admitted, self.teach)),
            acceptance=self.alpha[order] if exact else None,
        )


def traffic(seed: int, steps: int, signal: float = 1.0, whole: bool = False) -> Iterator[Step]:
    """signal: what one deviation of the hidden states along a fixed direction adds to the log-odds of acceptance.
    whole: everything is verified and taught."""
    rng = torch.Generator().manual_seed(seed)
    direction = torch.randn(D, generator=torch.Generator().manual_seed(5))
    direction /= direction.norm()
    for _ in range(steps):
        f = (2 * torch.randn(ROWS, K, generator=rng)).abs()
        hidden = 1 + 2 * torch.randn(ROWS, K, D, generator=rng)
        alpha = torch.sigmoid(0.6 * f - 0.3 + signal * (hidden - 1) @ direction / 2)
        accepted = (torch.rand(ROWS, K, generator=rng) < alpha).long().cumprod(1).sum(1)
        admitted = torch.full((ROWS,), K) if whole else torch.randint(0, K + 1, (ROWS,), generator=rng)
        yield Step(
            slots=torch.randperm(SLOTS, generator=rng)[:ROWS] - (0 if whole else 1),  # -1: a padding row
            logits=two_tokens(f),
            tokens=torch.randint(0, 2, (ROWS, K), generator=rng),
            hidden=hidden,
            alpha=alpha,
            accepted=torch.minimum(accepted, admitted),
            admitted=admitted,
            teach=torch.rand(ROWS, generator=rng) > (-1 if whole else 0.1),
        )
