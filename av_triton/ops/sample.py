"""logits -> a drawn token, logit(q_max) and the log-normaliser, in one read of the logits.

With x the logits over temperature, (m, c) as in `logit_max`, and one Philox4x32-10 draw r for every token,

    token          = argmax of x + G,  G = -log E,  E = -log(1 - u),  u = (r + 1/2) / 2^32      (Gumbel-max)
    feature        = -log c
    log-normaliser = m + log(1 + c)          log q(token) = x[token] - log-normaliser

so that the drafter's sampling pays for the read, and the estimator's feature comes with it. E is small for the tokens
that win, and small E are resolved to 2^-33. The word of token v is number (v // BLOCK) % 4 of the Philox block with
counter (v % BLOCK, v // (4 BLOCK), 0, 0) and the row's 64-bit seed as key, BLOCK = 2048: a row's draw depends on
its seed and its logits alone, not on the batch or the grid.

At temperature 0 the token is the first maximum, and feature and log-normaliser are those of temperature 1. The token of
a row that is all -inf or NaN is 0; a NaN logit never wins.
"""

import torch
import triton
import triton.language as tl

from av_triton.backend import use_triton
from av_triton.ops._checks import check_logits, temperature_argument
from av_triton.ops.logit_max import (
    _EMPTY,
    _LOG2E,
    _MIN_TEMPERATURE,
    EMPTY,
    MAX_SPLITS,
    MAX_VOCAB,
    MIN_TEMPERATURE,
    feature_of,
    fold,
    logit_from_partial,
    logit_max_partial_reference,
)

BLOCK = 2048
CHUNK = 8 * BLOCK
_WARPS = 8
_LARGEST_UNIFORM = 1 - 2**-24  # of float32, below 1
_LARGEST = tl.constexpr(_LARGEST_UNIFORM)


def philox_reference(seeds: torch.Tensor, vocab: int) -> torch.Tensor:
    """The 32-bit words of `vocab` tokens, int64 [..., vocab], for seeds int64 [...]."""
    v = torch.arange(vocab, device=seeds.device)
    word, shape = (v // BLOCK) % 4, (*seeds.shape, vocab)
    low = 0xFFFFFFFF
    c0, c1 = (v % BLOCK).expand(shape), (v // (4 * BLOCK)).expand(shape)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = (seeds & low)[..., None], ((seeds >> 32) & low)[..., None]

    def product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # In 16-bit halves: the 64-bit product of two unsigned words does not fit into int64.
        lo, hi = a * (b & 0xFFFF), a * (b >> 16)
        upper = hi + (lo >> 16)
        return upper >> 16, ((upper & 0xFFFF) << 16) | (lo & 0xFFFF)

    for _ in range(10):
        h0, l0 = product(0xD2511F53, c0)
        h2, l2 = product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = h2 ^ c1 ^ k0, l2, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack([c0, c1, c2, c3]).gather(0, word.expand(shape)[None])[0]


def sample_and_score_reference(
    logits: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `sample_and_score`, in float64."""
    x = logits.double()
    t = torch.ones(x.shape[:-1], dtype=torch.float64, device=x.device)
    if temperature is not None:
        t = torch.as_tensor(temperature, dtype=torch.float64, device=x.device).expand(x.shape[:-1])
    m, c = logit_max_partial_reference(x, t)
    u = ((philox_reference(seeds, x.shape[-1]).double() + 0.5) / 2**32).clamp_max(_LARGEST_UNIFORM)
    noise = torch.where(t > 0, 1.0, 0.0)[..., None] * -torch.log(-torch.log1p(-u))
    scale = torch.where(t > 0, 1 / t.clamp_min(MIN_TEMPERATURE), 1.0)[..., None]
    token = (x * scale + noise).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(-1)
    normaliser = torch.where(m > EMPTY, m + torch.log1p(c), torch.where(c.isnan(), torch.nan, -torch.inf))
    return token, logit_from_partial(m, c), normaliser


@triton.jit
def _gumbel(r):
    """log2 of 1 / E up to a constant: the Gumbel variable in the units of x log2(e)."""
    u = tl.minimum(r.to(tl.uint32).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, _LARGEST)
    near = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))  # below 1/64, where log(1 - u) would cancel
    return -tl.log2(tl.where(u < 0.015625, near, -tl.log(1.0 - u)))


@triton.jit
def _take(row, at, hi, r, scale, random, m, c, best, token):
    """Fold one block of logits into the running (m, c) and the running winner, per lane."""
    x = tl.load(row + at, mask=at < hi, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
    d = x - m
    e = tl.exp2(tl.abs(d) * -scale)
    c = c * tl.where(d > 0.0, e, 1.0) + e
    m = tl.maximum(m, x)
    y = x * scale + _gumbel(r) * random
    won = y > best
    return m, c, tl.where(won, y, best), tl.where(won, at, token)


@triton.jit(do_not_specialize_on_alignment=["seeds", "temperature"])
def sample_kernel(
    logits, row_stride, vocab, chunk, seeds, temperature, temperature_value, part_m, part_c, part_y, part_token, ticket,
    tokens, features, normalisers, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, SPLITS); the last program of a row merges its splits and resets the ticket."""
    item = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    t = temperature_value
    if temperature is not None:
        t = tl.load(temperature + item)
    scale = tl.where(t > 0.0, _LOG2E / tl.maximum(t, _MIN_TEMPERATURE), _LOG2E)
    random = tl.where(t > 0.0, 1.0, 0.0)
    seed = tl.load(seeds + item)
    row = logits + item * row_stride
    lane = tl.arange(0, BLOCK)
    lo = split * chunk
    hi = tl.minimum(lo + chunk, vocab)
    zero = tl.zeros([BLOCK], tl.uint32)
    m = tl.full([BLOCK], _EMPTY, tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    for j in tl.range(lo, hi, 4 * BLOCK):
        group = tl.full([BLOCK], j // (4 * BLOCK), tl.uint32)
        r0, r1, r2, r3 = tl.philox(seed, lane.to(tl.uint32), group, zero, zero)
        m, c, best, token = _take(row, j + lane, hi, r0, scale, random, m, c, best, token)
        m, c, best, token = _take(row, j + BLOCK + lane, hi, r1, scale, random, m, c, best, token)
        m, c, best, token = _take(row, j + 2 * BLOCK + lane, hi, r2, scale, random, m, c, best, token)
        m, c, best, token = _take(row, j + 3 * BLOCK + lane, hi, r3, scale, random, m, c, best, token)
    top, rest = fold(tl.where(m > _EMPTY, tl.maximum(m * (scale / _LOG2E), _EMPTY), _EMPTY), c, BLOCK)
    y = tl.max(best, 0)
    winner = tl.min(tl.where(best == y, token, vocab - 1), 0)
    last = True
    if SPLITS > 1:
        at = item * SPLITS + split
        tl.store(part_m + at, top)
        tl.store(part_c + at, rest)
        tl.store(part_y + at, y)
        tl.store(part_token + at, winner)
        last = tl.atomic_add(ticket + item, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        if SPLITS > 1:
            part = item * SPLITS + tl.arange(0, SPLITS)
            ys = tl.load(part_y + part, cache_modifier=".cg")
            y = tl.max(ys, 0)
            each = tl.load(part_token + part, cache_modifier=".cg")
            winner = tl.min(tl.where(ys == y, each, vocab - 1), 0)
            top, rest = fold(
                tl.load(part_m + part, cache_modifier=".cg"), tl.load(part_c + part, cache_modifier=".cg"), SPLITS
            )
            tl.store(ticket + item, 0)
        tl.store(tokens + item, tl.where(y > float("-inf"), winner, 0).to(tl.int64))
        tl.store(features + item, feature_of(top, rest))
        log1p = tl.where(rest < 1e-3, rest * (1.0 - 0.5 * rest), tl.log(1.0 + rest))
        nothing = tl.where(rest == rest, float("-inf"), float("nan"))
        tl.store(normalisers + item, tl.where(top > _EMPTY, top + log1p, nothing))


@torch.library.custom_op("av_triton::sample_and_score", mutates_args=())
def _sample_and_score(
    logits: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not use_triton(logits.device):
        # -1 stands for no temperature, for 0 is greedy.
        t = temperature if temperature is not None else (1.0 if value < 0 else value)
        token, feature, normaliser = sample_and_score_reference(logits, seeds, t)
        return token, feature.float(), normaliser.float()
    shape, rows = logits.shape[:-1], logits.reshape(-1, logits.shape[-1])
    n, vocab = rows.shape
    token = torch.empty(n, dtype=torch.int64, device=rows.device)
    feature, normaliser = (torch.empty(n, dtype=torch.float32, device=rows.device) for _ in range(2))
    if n:
        splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(vocab, CHUNK)))
        parts = torch.empty(3, n * splits, dtype=torch.float32, device=rows.device)
        part_token = torch.empty(n * splits, dtype=torch.int32, device=rows.device)
        ticket = torch.zeros(n, dtype=torch.int32, device=rows.device)
        sample_kernel[(n, splits)](
            rows, rows.stride(0), vocab, triton.cdiv(triton.cdiv(vocab, splits), 4 * BLOCK) * 4 * BLOCK,
            seeds.reshape(-1), None if temperature is None else temperature.reshape(-1), 1.0 if value < 0 else value,
            parts[0], parts[1], parts[2], part_token, ticket, token, feature, normaliser,
            SPLITS=splits, BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return token.view(shape), feature.view(shape), normaliser.view(shape)


@_sample_and_score.register_fake
def _(
    logits: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return torch.empty_like(out, dtype=torch.int64), out, torch.empty_like(out)


def sample_and_score(
    logits: torch.Tensor, seeds: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a token from softmax(logits / temperature) and take its feature along, in one launch on a GPU.

    Args:
        logits: [..., V] float32, bfloat16 or float16; the last dimension contiguous, 1 <= V <= 262,144.
        seeds: int64 [...], on the device of the logits. Equal seed and logits, equal token: give every draw a new one.
        temperature: None (1), a number, or float32 [...]. 0 is greedy: the first maximum; else clamped to >= 1e-4.

    Returns:
        (token int64, feature float32, log-normaliser float32), each [...]. The feature is that of `logit_max`; the log
        of the probability of token v is logits[v] / temperature - log-normaliser. A row that is all -inf gives
        (0, -40, -inf); one with a NaN (a token that is not NaN where there is one, -40, NaN).

    The token is that of `sample_and_score_reference` unless the two best sums are closer than about 1e-5: logarithms
    are the device's.
    """
    check_logits(logits, MAX_VOCAB)
    if not isinstance(seeds, torch.Tensor) or seeds.dtype != torch.int64 or seeds.device != logits.device:
        what = f"{seeds.dtype} on {seeds.device}" if isinstance(seeds, torch.Tensor) else repr(seeds)
        raise ValueError(f"seeds are {what}: give int64 on {logits.device}, one per row")
    if seeds.shape != logits.shape[:-1]:
        raise ValueError(f"seeds have shape {tuple(seeds.shape)}: give one per row, {tuple(logits.shape[:-1])}")
    pointer, value = temperature_argument(temperature, logits.shape[:-1], logits.device)
    return _sample_and_score(logits, seeds.contiguous(), pointer, -1.0 if temperature is None else value)
