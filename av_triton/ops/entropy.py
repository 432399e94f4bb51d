"""logits -> entropy of the draft distribution, in the same read as its logit(q_max).

With x the logits over temperature, m and c as in `logit_max`, and the moment

    t = sum of exp(x - m) (m - x) over all tokens        H = log(1 + c) + t / (1 + c)        (nats)

No term is negative, so nothing cancels, and the small entropy of a confident row is exact to five digits; log(sumexp) -
sum of q x loses all of it below 1e-6. Two disjoint sets of tokens merge by (m1 >= m2)

    t = t1 + (t2 + (c2 + 1) (m1 - m2)) exp(m2 - m1)

An estimator keeps entropies by slot (`Settings.entropy`); the gap of a drawn token x,

    log q_max - log q(x) = m - x >= 0, and 0 where x is a most likely token        log q(x) = -log(1 + c) - gap

comes from the same launch (`Settings.history`). Invalid rows (a NaN, all -inf) have entropy 0 and gap NaN.
"""

import torch

from av_triton.backend import use_triton
from av_triton.ops._checks import check_logits, temperature_argument
from av_triton.ops.logit_max import (
    MAX_LOG_ODDS,
    MAX_VOCAB,
    inverse_temperature,
    logit_from_partial,
    merge_logit_max_reference,
    run,
    winner_and_partial_reference,
)


def entropy_partial_reference(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, c, t) of every row; float64 in, float64 out."""
    return winner_and_partial_reference(logits, temperature, moment=True)[1:]


def merge_entropy_reference(
    maximum: torch.Tensor, complement: torch.Tensor, moment: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, c, t) of the union of the sets along `dim`."""
    m, c = merge_logit_max_reference(maximum, complement, dim)
    gap = m.unsqueeze(dim) - maximum
    e = torch.exp(-gap)
    return m, c, torch.where(e > 0, (moment + (complement + 1.0) * gap) * e, 0.0).sum(dim)


def entropy_from_partial(complement: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """H in nats from c and t of the whole vocabulary; 0 for an invalid row. Shapes and device as given."""
    h = torch.log1p(complement) + moment / (1.0 + complement)
    return torch.where(complement.isnan(), 0.0, h)


def entropy_reference(logits: torch.Tensor, temperature: torch.Tensor | float | None = None) -> torch.Tensor:
    """H of every row by the definition above; float64 in, float64 out."""
    return entropy_from_partial(*entropy_partial_reference(logits, temperature)[1:])


def gap_reference(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> torch.Tensor:
    """log q_max - log q(token), at most 40; NaN for an invalid row and a token that is none. tokens: int64 [...]."""
    x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    top = x.amax(-1)
    known = (tokens >= 0) & (tokens < x.shape[-1])
    drawn = x.gather(-1, torch.where(known, tokens, 0)[..., None]).squeeze(-1)
    gap = torch.where(drawn == top, 0.0, (top - drawn) * inverse_temperature(top, temperature))
    return torch.where(known & (top > -torch.inf), gap.clamp_max(MAX_LOG_ODDS), torch.nan)


@torch.library.custom_op("av_triton::logit_max_and_entropy", mutates_args=())
def _logit_max_and_entropy(
    logits: torch.Tensor, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    t = value if temperature is None else temperature
    if use_triton(logits.device):
        return run(logits, t, partial=False, moment=True)[:2]
    m, c, moment = entropy_partial_reference(logits, t)
    return logit_from_partial(m, c).float(), entropy_from_partial(c, moment).float()


@_logit_max_and_entropy.register_fake
def _(logits: torch.Tensor, temperature: torch.Tensor | None, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return out, torch.empty_like(out)


@torch.library.custom_op("av_triton::entropy_partial", mutates_args=())
def _entropy_partial(
    logits: torch.Tensor, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    t = value if temperature is None else temperature
    if use_triton(logits.device):
        return run(logits, t, partial=True, moment=True)
    m, c, moment = entropy_partial_reference(logits, t)
    return m.float(), c.float(), moment.float()


@_entropy_partial.register_fake
def _(
    logits: torch.Tensor, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return out, torch.empty_like(out), torch.empty_like(out)


@torch.library.custom_op("av_triton::merge_entropy", mutates_args=())
def _merge_entropy(
    maximum: torch.Tensor, complement: torch.Tensor, moment: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return merge_entropy_reference(maximum, complement, moment, dim)


@_merge_entropy.register_fake
def _(
    maximum: torch.Tensor, complement: torch.Tensor, moment: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m = maximum.select(dim, 0)
    return torch.empty_like(m), torch.empty_like(m), torch.empty_like(m)


def logit_max_and_entropy(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-odds of the most likely token, entropy in nats) of softmax(logits / temperature), in one read.

    Arguments as `logit_max`, whose result the first is.

    Returns:
        two float32 tensors [...]. The entropy is in [0, log V], 0 for a row that is all -inf or holds a NaN; error
        against float64: <= 1e-4 of it, down to 1e-8 and below.
    """
    check_logits(logits, MAX_VOCAB)
    pointer, value = temperature_argument(temperature, logits.shape[:-1], logits.device)
    return _logit_max_and_entropy(logits, pointer, value)


def entropy_partial(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, complement, moment) of one vocabulary shard, float32 [...] each, in units of logits / temperature.

    As `logit_max_partial`, with the moment. Merge shards in shard order with `merge_entropy`.
    """
    check_logits(logits, MAX_VOCAB)
    pointer, value = temperature_argument(temperature, logits.shape[:-1], logits.device)
    return _entropy_partial(logits, pointer, value)


def merge_entropy(
    maximum: torch.Tensor, complement: torch.Tensor, moment: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, complement, moment) of the whole vocabulary from those of its shards, stacked along `dim`.

    Args:
        maximum, complement, moment: float32 of one shape, as `entropy_partial` gives them.

    Returns:
        The same three without `dim`; `entropy_from_partial` turns the last two into the entropy, `logit_from_partial`
        the first two into the feature.
    """
    if not maximum.shape == complement.shape == moment.shape or maximum.dim() == 0 or maximum.shape[dim] == 0:
        raise ValueError(
            f"merge_entropy: maximum {tuple(maximum.shape)}, complement {tuple(complement.shape)} and moment "
            f"{tuple(moment.shape)} must have one shape with at least one shard along dim {dim}: stack the outputs of "
            "entropy_partial"
        )
    return _merge_entropy(maximum, complement, moment, dim)
