"""Acceptance probabilities -> survival: the probability that a draft and all before it are accepted.

    survival[k] = p[0] p[1] ... p[k]        0 from position `drafts` on

A sequential product. A parallel scan rounds differently from position to position and is not monotone (3 % of random
rows), and then the best drafts of a batch are no longer a prefix of each request.
"""

import torch
import triton
import triton.language as tl

from av_triton.backend import use_triton
from av_triton.ops._checks import INTEGERS, check_vector


def survival_reference(scores: torch.Tensor, drafts: torch.Tensor | None = None) -> torch.Tensor:
    """As `survival`, in the dtype of `scores`."""
    p = torch.where(scores > 0, scores, torch.zeros_like(scores)).clamp_max(1.0)
    columns = []
    running = torch.ones_like(p[:, 0])
    for column in p.unbind(1):
        running = running * column
        columns.append(running)
    s = torch.stack(columns, 1)
    if drafts is not None:
        s = torch.where(torch.arange(p.shape[1], device=p.device) < drafts[:, None], s, torch.zeros_like(s))
    return s


@triton.jit(do_not_specialize=["rows"])
def survival_kernel(scores, row_stride, drafts, out, rows, K, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = r < rows
    depth = tl.zeros([BLOCK], tl.int32) + K
    if drafts is not None:
        depth = tl.load(drafts + r, mask=live, other=0).to(tl.int32)
    s = tl.full([BLOCK], 1.0, tl.float32)
    for k in range(K):
        p = tl.load(scores + r.to(tl.int64) * row_stride + k, mask=live, other=0.0)
        s = s * tl.where(p > 0.0, tl.minimum(p, 1.0), 0.0)
        tl.store(out + r.to(tl.int64) * K + k, tl.where(k < depth, s, 0.0), mask=live)


@torch.library.custom_op("av_triton::survival", mutates_args=())
def _survival(scores: torch.Tensor, drafts: torch.Tensor | None) -> torch.Tensor:
    if not use_triton(scores.device):
        return survival_reference(scores, drafts)
    out = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    if out.numel():
        survival_kernel[(triton.cdiv(scores.shape[0], 128),)](
            scores, scores.stride(0), drafts, out, scores.shape[0], scores.shape[1], BLOCK=128
        )
    return out


@_survival.register_fake
def _(scores: torch.Tensor, drafts: torch.Tensor | None) -> torch.Tensor:
    return scores.new_empty(scores.shape)


def survival(scores: torch.Tensor, drafts: torch.Tensor | None = None) -> torch.Tensor:
    """Sequential product of the scores along the draft positions.

    Args:
        scores: float32 [rows, K], acceptance probabilities, positions contiguous; clamped to [0, 1], NaN counts as 0.
        drafts: int32 or int64 [rows], drafts that each row has; None for K.

    Returns:
        float32 [rows, K], non-increasing along K.
    """
    if scores.dtype != torch.float32 or scores.dim() != 2 or scores.shape[1] < 1:
        raise ValueError(f"scores are {scores.dtype} {tuple(scores.shape)}: give float32 [rows, K]")
    if scores.shape[1] > 1 and scores.stride(1) != 1:
        raise ValueError(f"scores have stride {scores.stride(1)} along the positions: make that dimension contiguous")
    if drafts is not None:
        check_vector("drafts", drafts, scores.shape[0], INTEGERS, scores.device)
    return _survival(scores, drafts)
