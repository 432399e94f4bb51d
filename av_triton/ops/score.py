"""logit(q_max) -> acceptance probability, p = sigmoid(slope * f + intercept[k]).

The slope is shared by the draft positions k and the intercepts are their own. A row marked invalid (f = -40) gets
p = 0: it ranks last. `score_logits` computes feature and score in the one launch of `logit_max_kernel`.
"""

import torch
import triton
import triton.language as tl

from av_triton.backend import use_triton
from av_triton.ops._checks import check_logits, temperature_argument
from av_triton.ops.logit_max import (
    INVALID,
    MAX_VOCAB,
    launch_shape,
    logit_max_kernel,
    logit_max_reference,
    scratch,
    sigmoid_score,
)


def acceptance_score_reference(features: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor) -> torch.Tensor:
    """p in the dtype of `features`; slope broadcasts against [...], intercepts against [..., K]."""
    z = slope.to(features.dtype) * features + intercepts.to(features.dtype)
    return torch.where(features > INVALID, 1.0 / (1.0 + torch.exp(-z)), torch.zeros_like(z))


@triton.jit(do_not_specialize=["n"])
def acceptance_score_kernel(features, slope, intercepts, scores, n, K, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(features + i, mask=i < n, other=0.0)
    p = sigmoid_score(f, tl.load(slope), tl.load(intercepts + i % K, mask=i < n, other=0.0))
    tl.store(scores + i, p, mask=i < n)


@torch.library.custom_op("av_triton::acceptance_score", mutates_args=())
def _acceptance_score(features: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor) -> torch.Tensor:
    if not use_triton(features.device):
        return acceptance_score_reference(features, slope, intercepts)
    f = features.contiguous()
    out = torch.empty_like(f)
    if f.numel():
        acceptance_score_kernel[(triton.cdiv(f.numel(), 1024),)](
            f, slope, intercepts.contiguous(), out, f.numel(), f.shape[-1], BLOCK=1024
        )
    return out


@_acceptance_score.register_fake
def _(features: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor) -> torch.Tensor:
    return features.new_empty(features.shape)


@torch.library.custom_op("av_triton::score_logits", mutates_args=())
def _score_logits(
    logits: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not use_triton(logits.device):
        t = value if temperature is None else temperature[..., None].expand(logits.shape[:-1])
        f = logit_max_reference(logits, t).float()
        return f, acceptance_score_reference(f, slope, intercepts)
    positions, vocab = logits.shape[-2:]
    x = logits.reshape(-1, positions, vocab)
    f, p = (torch.empty(logits.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    if n := f.numel():
        parts, ticket = scratch(n, x.device)
        splits, chunk, block, warps = launch_shape(vocab, x.element_size())
        logit_max_kernel[(n, splits)](
            x, x.stride(0), x.stride(1), vocab, chunk, positions, 0, temperature, value, parts, parts.stride(0),
            None, ticket, None, None, None, f, p, None, None, x.shape[0], None, slope, intercepts.contiguous(), None,
            None, None, None, None, None, None, None, None, SPLITS=splits, BLOCK=block, P=positions, num_warps=warps,
        )  # fmt: skip
    return f, p


@_score_logits.register_fake
def _(
    logits: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return out, torch.empty_like(out)


def _check_coefficients(slope: torch.Tensor, intercepts: torch.Tensor, positions: int, device: torch.device) -> None:
    if slope.numel() != 1 or intercepts.shape != (positions,):
        raise ValueError(
            f"slope {tuple(slope.shape)} and intercepts {tuple(intercepts.shape)}: give one slope and one intercept "
            f"for each of {positions} draft positions"
        )
    if {slope.dtype, intercepts.dtype} != {torch.float32} or {slope.device, intercepts.device} != {device}:
        raise ValueError(
            f"slope is {slope.dtype} on {slope.device}, intercepts {intercepts.dtype} on {intercepts.device}: "
            f"give float32 on {device}"
        )


def acceptance_score(features: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor) -> torch.Tensor:
    """Acceptance probability of every draft, sigmoid(slope * features + intercepts).

    Args:
        features: float32 [..., K], log-odds of the most likely token at each draft position.
        slope: float32 with one element. intercepts: float32 [K].

    Returns:
        float32 [..., K] in [0, 1]; 0 where the feature is the invalid mark -40.
    """
    if features.dtype != torch.float32 or features.dim() < 1:
        raise ValueError(f"features are {features.dtype} {tuple(features.shape)}: give float32 [..., K]")
    _check_coefficients(slope, intercepts, features.shape[-1], features.device)
    return _acceptance_score(features, slope, intercepts)


def score_logits(
    logits: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    temperature: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, acceptance probabilities) of draft logits, in one launch on a GPU.

    Args:
        logits: [..., K, V] float32, bfloat16 or float16; vocabulary contiguous.
        slope, intercepts: as `acceptance_score`.
        temperature: None (1), a number, or float32 of shape [...], one per request; 0 (greedy) counts as 1.

    Returns:
        two float32 tensors [..., K].
    """
    if logits.dim() < 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: give [..., K, V]")
    check_logits(logits, MAX_VOCAB)
    _check_coefficients(slope, intercepts, logits.shape[-2], logits.device)
    pointer, value = temperature_argument(temperature, logits.shape[:-2], logits.device)
    return _score_logits(logits, slope, intercepts, pointer, value)
