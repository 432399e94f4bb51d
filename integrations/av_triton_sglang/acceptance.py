"""Exact labels: SGLang's rejection sampler has the acceptance probability of every draft at hand, and forgets it."""

from typing import Any

import torch
from torch import Tensor

from av_triton_sglang import step
from av_triton_sglang.hooks import BEFORE, Hook


def note(*args: Any, candidates: Tensor, target_probs: Tensor, draft_probs: Tensor, **kwargs: Any) -> None:
    """Keep min(1, p / q) of the drafts for the running step's `observe`. Draft k's laws are rows k of both.

    candidates: [B, K + 1], anchors first. target_probs: fp32 [B, K + 1, V]. draft_probs: fp32 [B, >= K, V].
    """
    if not step.exists():
        return
    drafts = candidates[:, 1:, None].long()
    p, q = (law[:, : drafts.shape[1]].gather(2, drafts)[..., 0].float() for law in (target_probs, draft_probs))
    # As in the sampler: a draft whose q is no probability is rejected.
    step.current().acceptance = torch.where((q > 0) & (q <= 1), p / q, 0.0).clamp(max=1)


# Where SGLang's modules import it from; its registry replaces it in all of them.
HOOKS = (Hook("sglang.kernels.ops.speculative.verify_sampling.chain_speculative_sampling_triton", note, BEFORE),)
