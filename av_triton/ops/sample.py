"""logits -> a drawn token, logit(q_max) and the log-normaliser, in one read of the logits.

With x the logits over temperature, (m, c) as in `logit_max`, and one Philox4x32-10 draw r for every token,

    token          = argmax of x + G,  G = -log E,  E = -log(1 - u),  u = (r + 1/2) / 2^32      (Gumbel-max)
    feature        = -log c
    log-normaliser = m + log(1 + c)          log q(token) = x[token] - log-normaliser

so that the drafter's sampling pays for the read, and the estimator's feature comes with it. E is small for the tokens
that win, and small E are resolved to 2^-33. The word of token v is number (v // BLOCK) % 4 of the Philox block with
counter (v % BLOCK, v // (4 BLOCK), 0, 0) and the row's 64-bit seed as key, BLOCK = 2048: a row's draw depends on
its seed and its logits alone, not on the batch or the grid.

At temperature 0 and without seeds the token is the first maximum; at temperature 0 feature and log-normaliser are those
of temperature 1. The token of a row that is all -inf or NaN is 0; a NaN logit never wins.
"""

import torch
import triton
import triton.language as tl

from av_triton.backend import architecture, register_ceiling, use_triton
from av_triton.launches import launches
from av_triton.ops._checks import check_logits, check_seeds, temperature_argument
from av_triton.ops.logit_max import (
    _EMPTY,
    EMPTY,
    MAX_SPLITS,
    MAX_VOCAB,
    add_logit,
    fold,
    fold_splits,
    inverse_temperature,
    launch_shape,
    log_normaliser,
    logit_from_partial,
    logit_max_kernel,
    place,
    scale_for,
    store_law,
    store_nothing,
    store_score,
    store_split,
    temperature_of,
    winner_and_partial_reference,
)

BLOCK = 2048
_LARGEST_UNIFORM = 1 - 2**-24  # of float32, below 1
_LARGEST = tl.constexpr(_LARGEST_UNIFORM)


def philox_reference(seeds: torch.Tensor, vocab: int) -> torch.Tensor:
    """The 32-bit words of `vocab` tokens, int64 [..., vocab], for seeds int64 [...]."""
    groups, lanes, low = triton.cdiv(vocab, 4 * BLOCK), min(vocab, BLOCK), 0xFFFFFFFF
    shape = (*seeds.shape, groups, lanes)
    c0 = torch.arange(lanes, device=seeds.device).expand(shape)
    c1 = torch.arange(groups, device=seeds.device)[:, None].expand(shape)
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = (seeds & low)[..., None, None], ((seeds >> 32) & low)[..., None, None]

    def product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = a * b  # wraps into the sign; the 64 bits are right
        return (both >> 32) & low, both & low

    for _ in range(10):
        h0, l0 = product(0xD2511F53, c0)
        h2, l2 = product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = h2 ^ c1 ^ k0, l2, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack([c0, c1, c2, c3], -2).flatten(-3)[..., :vocab]


def sample_and_score_reference(
    logits: torch.Tensor, seeds: torch.Tensor | None, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `sample_and_score`, in float64 where a token is drawn."""
    x = logits if seeds is None else logits.double()
    winner, m, c, _ = winner_and_partial_reference(x, temperature)
    normaliser = torch.where(m > EMPTY, m + torch.log1p(c), torch.where(c.isnan(), torch.nan, -torch.inf))
    feature = logit_from_partial(m, c)
    if seeds is None:
        unordered = c.isnan()
        if unordered.any():
            finite = x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
            winner = torch.where(unordered, finite.argmax(-1), winner)
        return winner, feature, normaliser
    t = torch.ones_like(m)
    if temperature is not None:
        t = torch.as_tensor(temperature, dtype=m.dtype, device=m.device).expand_as(m)
    u = ((philox_reference(seeds, x.shape[-1]).double() + 0.5) / 2**32).clamp_max(_LARGEST_UNIFORM)
    noise = torch.where(t > 0, 1.0, 0.0)[..., None] * -torch.log(-torch.log1p(-u))
    scale = inverse_temperature(m, temperature)[..., None]
    token = (x * scale + noise).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(-1)
    return token, feature, normaliser


@triton.jit
def _gumbel(r):
    """log2 of 1 / E up to a constant: the Gumbel variable in the units of x log2(e)."""
    u = tl.minimum(r.to(tl.uint32).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, _LARGEST)
    near = u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25)))  # below 1/64, where log(1 - u) would cancel
    return -tl.log2(tl.where(u < 0.015625, near, -tl.log(1.0 - u)))


@triton.jit
def _take(row, at, hi, r, scale, unit, random, m, c, t, best, token, MOMENT: tl.constexpr):
    """Fold one block of logits into the running (m, c, t) and the running winner, per lane."""
    x = tl.load(row + at, mask=at < hi, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
    _d, m, c, t = add_logit(x, m, c, t, scale, MOMENT)
    y = x * unit + _gumbel(r) * random
    won = y > best
    return m, c, t, tl.where(won, y, best), tl.where(won, at, token)


@triton.jit
def _row_sample(row, lo, hi, scale, random, seed, vocab, BLOCK: tl.constexpr, MOMENT: tl.constexpr):
    """(m, c, t, y, token) of row[lo:hi]: the partial as `row_partial` gives it, and the largest y = (x / T + G) log2(e)
    with its token. `random` is 0 for a greedy row, which has no G and whose y is x: scaling would round neighbours
    together."""
    unit = tl.where(random > 0.0, scale, 1.0)
    lane = tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.uint32)
    m = tl.full([BLOCK], _EMPTY, tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    t = tl.zeros([BLOCK], tl.float32)
    y = tl.full([BLOCK], float("-inf"), tl.float32)
    v = tl.zeros([BLOCK], tl.int32)
    for j in tl.range(lo, hi, 4 * BLOCK):
        group = tl.full([BLOCK], j // (4 * BLOCK), tl.uint32)
        at = j + lane
        r0, r1, r2, r3 = tl.philox(seed, lane.to(tl.uint32), group, zero, zero)
        m, c, t, y, v = _take(row, at, hi, r0, scale, unit, random, m, c, t, y, v, MOMENT)
        m, c, t, y, v = _take(row, at + BLOCK, hi, r1, scale, unit, random, m, c, t, y, v, MOMENT)
        m, c, t, y, v = _take(row, at + 2 * BLOCK, hi, r2, scale, unit, random, m, c, t, y, v, MOMENT)
        m, c, t, y, v = _take(row, at + 3 * BLOCK, hi, r3, scale, unit, random, m, c, t, y, v, MOMENT)
    top, rest, moment = fold(m, c, t, scale, BLOCK, MOMENT)
    best = tl.max(y, 0)
    return top, rest, moment, best, tl.min(tl.where(y == best, v, vocab - 1), 0)


@triton.jit(
    do_not_specialize=["positions", "first_position", "seed_stride", "seed_position_stride", "num_slots"],
    do_not_specialize_on_alignment=["slots", "seeds", "temperature"],
)
def sample_kernel(
    logits,
    row_stride,
    position_stride,
    vocab,
    chunk,
    positions,
    first_position,
    seeds,
    seed_stride,
    seed_position_stride,
    temperature,
    temperature_value,
    parts,
    part_stride,
    part_token,
    ticket,
    features,
    scores,
    row_scores,
    slots,
    num_slots,
    strata,
    slopes,
    intercepts,
    offsets,
    gates,
    tokens,
    normalisers,
    entropies,
    gaps,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
):
    """As `logit_max_kernel`, with a token drawn by the seed of every row and position, int64."""
    item, row, j, start, slot, position = place(logits, row_stride, position_stride, positions, first_position, slots)
    split = tl.program_id(1)
    MOMENT: tl.constexpr = entropies is not None
    Y: tl.constexpr = 3 if MOMENT else 2
    if (slot >= 0) & (slot < num_slots):
        drawn_at = temperature_of(temperature, temperature_value, row)
        scale = scale_for(drawn_at)
        lo = split * chunk
        hi = tl.minimum(lo + chunk, vocab)
        random = tl.where(drawn_at > 0.0, 1.0, 0.0)
        seed = tl.load(seeds + row * seed_stride + j * seed_position_stride)
        m, c, t, y, token = _row_sample(start, lo, hi, scale, random, seed, vocab, BLOCK, MOMENT)
        last = True
        if SPLITS > 1:
            at = item.to(tl.int64) * SPLITS
            store_split(m, c, t, parts, part_stride, at + split, MOMENT)
            tl.store(parts + Y * part_stride + at + split, y)
            tl.store(part_token + at + split, token)
            last = tl.atomic_add(ticket + item, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            if SPLITS > 1:
                part = item.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)
                ys = tl.load(parts + Y * part_stride + part, cache_modifier=".cg")
                y = tl.max(ys, 0)
                token = tl.min(tl.where(ys == y, tl.load(part_token + part, cache_modifier=".cg"), vocab - 1), 0)
                _ms, m, c, t = fold_splits(parts, part_stride, part, scale, SPLITS, MOMENT)
                tl.store(ticket + item, 0)
            store_score(
                m, c, row, slot, position, features, scores, row_scores, strata, slopes, intercepts, offsets, gates, P
            )
            tl.store(tokens + row * P + position, tl.where(y > float("-inf"), token, 0).to(tl.int64))
            tl.store(normalisers + row * P + position, log_normaliser(m, c, scale))
            x = m
            if gaps is not None:
                x = tl.load(start + token).to(tl.float32)
            store_law(m, c, t, x, scale, slot * P + position, entropies, gaps)
    else:
        if split == 0:
            store_nothing(row * P + position, row_scores, tokens, normalisers)


def sample_shape(vocab: int, gpu: str | None = None) -> tuple[int, int, int]:
    """(splits, chunk, warps) for rows of `vocab` logits; chunks are whole Philox blocks of four words."""
    launch = launches(gpu or architecture()).sample
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(vocab, launch.logits)))
    return splits, triton.cdiv(triton.cdiv(vocab, splits), 4 * BLOCK) * 4 * BLOCK, launch.warps


@torch.library.custom_op("av_triton::sample_and_score", mutates_args=())
def _sample_and_score(
    logits: torch.Tensor, seeds: torch.Tensor | None, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not use_triton(logits.device):
        token, feature, normaliser = sample_and_score_reference(
            logits, seeds, value if temperature is None else temperature
        )
        return token, feature.float(), normaliser.float()
    shape, rows = logits.shape[:-1], logits.reshape(-1, logits.shape[-1])
    n = len(rows)
    token = torch.empty(n, dtype=torch.int64, device=rows.device)
    feature, normaliser = (torch.empty(n, dtype=torch.float32, device=rows.device) for _ in range(2))
    if n:
        t = None if temperature is None else temperature.reshape(-1)
        parts = torch.empty(3, n * MAX_SPLITS, dtype=torch.float32, device=rows.device)
        launch(
            rows, 0, 1, 0, None if seeds is None else seeds.reshape(-1), t, value, parts,
            torch.empty(n * MAX_SPLITS, dtype=torch.int32, device=rows.device),
            torch.zeros(n, dtype=torch.int32, device=rows.device),
            (feature, None, None, None, n, None, None, None, None, None, token, normaliser, None, None), 1,
        )  # fmt: skip
    return token.view(shape), feature.view(shape), normaliser.view(shape)


def launch(
    logits: torch.Tensor,
    position_stride: int,
    positions: int,
    first: int,
    seeds: torch.Tensor | None,
    temperature: torch.Tensor | None,
    value: float,
    parts: torch.Tensor,
    part_token: torch.Tensor | None,
    ticket: torch.Tensor,
    outputs: tuple[object, ...],
    P: int,
    drawn: torch.Tensor | None = None,
) -> None:
    """The kernel that draws, or without seeds the one that does not. logits [rows, ..., V]; seeds, and tokens `drawn`
    before, of any strides; parts float32 [3, >= items * splits], or with entropies [4, ...]: m, c, then t, and y of a
    draw; outputs: the arguments from `features` to `gaps`."""
    items, vocab = logits.shape[0] * positions, logits.shape[-1]
    cut = (logits, logits.stride(0), position_stride, vocab)
    if seeds is None:
        splits, chunk, block, warps = launch_shape(vocab, logits.element_size())
        logit_max_kernel[(items, splits)](
            *cut, chunk, positions, first, temperature, value, parts, parts.stride(0), part_token, ticket, None,
            None, None, *outputs, drawn, *_strides(drawn), SPLITS=splits, BLOCK=block, P=P, num_warps=warps,
            **({} if outputs[-2] is None else register_ceiling()),
        )  # fmt: skip
    else:
        splits, chunk, warps = sample_shape(vocab)
        sample_kernel[(items, splits)](
            *cut, chunk, positions, first, seeds, *_strides(seeds), temperature, value, parts, parts.stride(0),
            part_token, ticket, *outputs, SPLITS=splits, BLOCK=BLOCK, P=P, num_warps=warps,
        )  # fmt: skip


def _strides(per_draft: torch.Tensor | None) -> tuple[int | None, int | None]:
    """Of [rows, positions] or [rows]."""
    if per_draft is None:
        return None, None
    return per_draft.stride(0), per_draft.stride(1) if per_draft.dim() == 2 else 0


@_sample_and_score.register_fake
def _(
    logits: torch.Tensor, seeds: torch.Tensor | None, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return torch.empty_like(out, dtype=torch.int64), out, torch.empty_like(out)


def sample_and_score(
    logits: torch.Tensor, seeds: torch.Tensor | None, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a token from softmax(logits / temperature) and take its feature along, in one launch on a GPU.

    Args:
        logits: [..., V] float32, bfloat16 or float16; the last dimension contiguous, 1 <= V <= 262,144.
        seeds: int64 [...], on the device of the logits. Equal seed and logits, equal token: give every draw a new one.
            None: the first maximum of every row.
        temperature: None (1), a number, or float32 [...]. 0 is greedy: the first maximum; else clamped to >= 1e-4.

    Returns:
        (token int64, feature float32, log-normaliser float32), each [...]. The feature is that of `logit_max`. Token v
        has the log probability logits[v] / max(temperature, 1e-4) - log-normaliser, to about 1e-7 of the largest
        |logit| / temperature (but at temperature 0 the draw is certain). A row that is all -inf gives (0, -40, -inf);
        one with a NaN (a token that is not NaN where there is one, -40, NaN).

    The token is that of `sample_and_score_reference` unless the two best sums are closer than about 1e-5, or 4e-7 of
    the largest |logit| / temperature: sums are float32, logarithms the device's.
    """
    check_logits(logits, MAX_VOCAB)
    check_seeds(seeds, logits.shape[:-1], logits.device)
    pointer, value = temperature_argument(temperature, logits.shape[:-1], logits.device)
    return _sample_and_score(logits, seeds, pointer, 1.0 if temperature is None else value)
