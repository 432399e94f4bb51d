"""Drawing drafts, and speculative sampling over a ragged list of target logits; the output law is the target's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from av_triton.ops.logit_max import argmax
from av_triton.ops.sample import sample_and_score

# Log-normalisers are float32: far below it logits / temperature would be too large for them.
LEAST_TEMPERATURE = 0.01


class Verdicts(NamedTuple):
    """What verification made of the drafts of B rows.

    accepted: int64 [B], accepted drafts. following: int64 [B], the token after them. acceptance: float32 [B, K], the
    probability min(1, p / q) that each draft had of being accepted, valid where it was admitted; None when greedy.
    """

    accepted: Tensor
    following: Tensor
    acceptance: Tensor | None


class Sampler:
    """One temperature for drafter and target, nucleus on the target only; temperature 0 is greedy."""

    def __init__(self, temperature: float, top_p: float, seed: int, device: torch.device | str = "cpu") -> None:
        if not (temperature == 0 or temperature >= LEAST_TEMPERATURE) or not 0 < top_p <= 1:
            raise ValueError(
                f"temperature {temperature}, top-p {top_p}: give temperature 0 (greedy) or at least "
                f"{LEAST_TEMPERATURE}, and 0 < top-p <= 1"
            )
        self.temperature, self.top_p = temperature, top_p
        self.generator = torch.Generator(device).manual_seed(seed)

    def seeds(self, *shape: int) -> Tensor | None:
        """New seeds for `shape` drafts, int64; None when greedy."""
        if not self.temperature:
            return None
        return torch.randint(-(2**63), 2**63 - 1, shape, generator=self.generator, device=self.generator.device)

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draft logits [..., V] -> (tokens int64 [...], log-normalisers float32 [...])."""
        if not self.temperature:
            return argmax(logits), torch.zeros(logits.shape[:-1], device=logits.device)
        token, _, log_normaliser = sample_and_score(logits, self.seeds(*logits.shape[:-1]), self.temperature)
        return token, log_normaliser

    def verify(
        self,
        logits: Tensor,
        offsets: Tensor,
        drafts: Tensor,
        admitted: Tensor,
        draft_logits: Tensor,
        log_normalisers: Tensor,
    ) -> Verdicts:
        """The verdicts of target logits [N, V].

        offsets int64 [B + 1]: row b's logits are those at offsets[b] .. offsets[b] + admitted[b].
        drafts int64 [B, K], admitted int64 [B]. draft_logits [B, K, V'] with V' <= V and log_normalisers [B, K]: of the
        draft distributions (not looked at when greedy).
        """
        steps = torch.arange(drafts.shape[1], device=drafts.device)
        live = steps < admitted[:, None]
        at = (offsets[:-1, None] + steps).clamp(max=len(logits) - 1)
        if not self.temperature:
            best = argmax(logits)
            accepted = (live & (drafts == best[at])).cumprod(1).sum(1)
            return Verdicts(accepted, best[offsets[:-1] + accepted], None)
        p = self.target_law(logits)
        p_draft = p[at, drafts]
        q_draft = (draft_logits.gather(2, drafts[:, :, None])[:, :, 0] / self.temperature - log_normalisers).exp()
        u = torch.rand(drafts.shape, generator=self.generator, device=drafts.device)
        accepted = (live & (u * q_draft < p_draft)).cumprod(1).sum(1)
        target = p[offsets[:-1] + accepted]
        rejected = (accepted < admitted).nonzero()[:, 0]
        residual = target[rejected]
        q = draft_logits[rejected, accepted[rejected]] / self.temperature
        residual[:, : q.shape[1]] -= (q - log_normalisers[rejected, accepted[rejected], None]).exp()
        residual.clamp_(min=0)
        # Rounding may leave nothing where p and q agree to the last bits.
        target[rejected] = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target[rejected])
        return Verdicts(accepted, self._pick(target), (p_draft / q_draft).clamp(max=1))

    def target_law(self, logits: Tensor) -> Tensor:
        """Target logits [N, V] -> the probabilities that the output follows when sampling, [N, V]."""
        return nucleus(logits / self.temperature, self.top_p)

    def _pick(self, weights: Tensor) -> Tensor:
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """logits [N, V] -> probabilities of the smallest set, most likely first, whose mass reaches top_p, renormalised."""
    p = torch.softmax(logits, -1)
    if top_p == 1:
        return p
    kept, rows = torch.zeros_like(p), torch.arange(len(p), device=p.device)
    for size in (256, 4096, p.shape[1]):
        top, at = p[rows].topk(min(size, p.shape[1]), -1)
        inside = top.masked_fill(top.cumsum(-1) - top >= top_p, 0)
        kept[rows] = torch.zeros_like(p[rows]).scatter_(1, at, inside / inside.sum(-1, keepdim=True))
        # Few rows are so flat that their set is larger: only these are sorted as a whole.
        rows = rows[top.sum(-1) < top_p]
        if not len(rows):
            break
    return kept
