"""The confidence of the published form, restated: a softmax's maximum and sum of exponentials by blocks of 4,096
logits, a second launch that merges them, and

    logit(q_max) = -log(sumexp - 1)        p = sigmoid(slope * logit(q_max) + intercept[k])

It is what `score_logits` is measured against. The subtraction cancels for confident rows: compare at modest log-odds.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 4
MAX_LOG_ODDS = 40.0
_MAX_LOG_ODDS = tl.constexpr(MAX_LOG_ODDS)


@triton.jit(do_not_specialize=["rows"])
def block_softmax_kernel(
    logits, row_stride, temperature, top, sumexp, parts_stride, rows, positions, vocab, BLOCK: tl.constexpr
):
    """Grid (rows, blocks): one tile per program, no loop."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if row < rows:
        t = tl.load(temperature + row // positions)
        t = tl.where(t > 0.0, t, 1.0)
        at = part * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / t
        m = tl.max(x, 0)
        tl.store(top + row * parts_stride + part, m)
        tl.store(sumexp + row * parts_stride + part, tl.where(m > float("-inf"), tl.sum(tl.exp(x - m), 0), 0.0))


@triton.jit(do_not_specialize=["rows"])
def merge_and_score_kernel(
    top, sumexp, parts_stride, slope, intercepts, features, scores, rows, positions, parts, PARTS: tl.constexpr
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    if row < rows:
        i = tl.arange(0, PARTS)
        m = tl.load(top + row * parts_stride + i, mask=i < parts, other=float("-inf"))
        z = tl.load(sumexp + row * parts_stride + i, mask=i < parts, other=0.0)
        rest = tl.maximum(tl.sum(tl.where(i < parts, z * tl.exp(m - tl.max(m, 0)), 0.0), 0) - 1.0, 0.0)
        f = tl.minimum(tl.maximum(-tl.log(rest), -_MAX_LOG_ODDS), _MAX_LOG_ODDS)
        tl.store(features + row, f)
        tl.store(scores + row, tl.sigmoid(tl.load(slope) * f + tl.load(intercepts + row % positions)))


def score_blocks(
    logits: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, scores) float32 [B, K] of logits [B, K, V]; temperature float32 [B]. Two launches."""
    rows, positions, vocab = logits.shape
    n, parts = rows * positions, triton.cdiv(vocab, BLOCK)
    top, sumexp = (torch.empty(n, parts, device=logits.device) for _ in range(2))
    features, scores = (torch.empty(rows, positions, device=logits.device) for _ in range(2))
    block_softmax_kernel[(n, parts)](
        logits, logits.stride(1), temperature, top, sumexp, parts, n, positions, vocab, BLOCK=BLOCK, num_warps=WARPS
    )
    merge_and_score_kernel[(n,)](
        top, sumexp, parts, slope, intercepts, features, scores, n, positions, parts,
        PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return features, scores


def score_torch(
    logits: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same form in torch operations, for eager execution and for `torch.compile`."""
    x = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    rest = (torch.logsumexp(x, -1) - x.amax(-1)).exp() - 1.0
    features = (-torch.log(rest.clamp_min(0.0))).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    return features, torch.sigmoid(slope * features + intercepts)


def sample_torch(
    logits: torch.Tensor, slope: torch.Tensor, intercepts: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, features, scores): `score_torch`, and a draw by the exponential race."""
    features, scores = score_torch(logits, slope, intercepts, temperature)
    q = torch.softmax(logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None, None], -1)
    return (q / torch.empty_like(q).exponential_()).argmax(-1), features, scores
