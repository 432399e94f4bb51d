"""logits -> logit(q_max): the log-odds of the most likely token, exact for confident rows, and fused with its score.

With x the logits over temperature, m their maximum and c the sum of exp(x - m) over every token but one maximiser,

    q_max = 1 / (1 + c)        logit(q_max) = log(q_max / (1 - q_max)) = -log c

Nothing is subtracted from a number close to itself, unlike log(sumexp - 1), which is off by 0.25 at log-odds 15.
Two disjoint sets of tokens merge by (m1 >= m2)

    (m1, c1) + (m2, c2) = (m1, c1 + (c2 + 1) exp(m2 - m1))

so that splits of a row and vocabulary shards of a tensor-parallel drafter meet in two floats each. A third one, the
moment, gives the entropy (`entropy.py`); it is an option of the same kernel.
"""

import functools

import torch
import triton
import triton.language as tl

from av_triton.backend import architecture, register_ceiling, use_triton
from av_triton.launches import LogitMaxLaunch, launches
from av_triton.ops._checks import check_logits, temperature_argument

MAX_LOG_ODDS = 40.0
INVALID = -40.0  # feature of a row that is all -inf or holds a NaN; finite rows have f >= -log(V - 1) > -13
EMPTY = -3.0e38  # maximum of a set without a finite logit; its complement is 0
MIN_TEMPERATURE = 1e-4
MAX_VOCAB = 262_144
MAX_SPLITS = 16  # of a row, one program each

_EMPTY = tl.constexpr(EMPTY)
# Tokens further than this below the maximum count as this far: finite, even times MAX_VOCAB, and its exponential is 0.
_FAR = tl.constexpr(1e33)
_MAX_LOG_ODDS = tl.constexpr(MAX_LOG_ODDS)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_LOG2E = tl.constexpr(1.4426950408889634)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Index of the first maximum along the last dimension, int64 [...]; of the first NaN where there is one."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return x.argmax(-1)
    # torch's reductions that return an index are scalar code on the CPU; numpy's is vectorised, 3 to 10 times as fast.
    return torch.as_tensor(x.detach().numpy().argmax(-1), device=x.device)


def inverse_temperature(like: torch.Tensor, temperature: torch.Tensor | float | None) -> torch.Tensor:
    """1 / T of every row, in shape and dtype of `like`; 1 for a greedy row."""
    scale = torch.ones_like(like)
    if temperature is None:
        return scale
    t = torch.as_tensor(temperature, dtype=like.dtype, device=like.device).expand_as(like)
    return torch.where(t > 0, 1.0 / t.clamp_min(MIN_TEMPERATURE), scale)


def winner_and_partial_reference(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None, moment: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(first maximiser, m, c, t) of every row, t = 0 unless `moment`; in the dtype of `logits` if that is float32 or
    float64, else in float32."""
    x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    winner = argmax(x)[..., None]
    top = x.gather(-1, winner)
    d = x - top
    top = top.squeeze(-1)
    scale = inverse_temperature(top, temperature)
    if temperature is not None:
        d.mul_(scale[..., None])
    gap = -d if moment else None
    e = d.exp_().scatter_(-1, winner, 0.0)
    c = e.sum(-1)
    c = torch.where(top.isnan(), torch.nan, torch.where(top == -torch.inf, 0.0, c))
    t = torch.zeros_like(c) if gap is None else torch.where(e > 0, e * gap, 0.0).sum(-1)
    m = torch.where(top > EMPTY, top * scale, EMPTY)
    return winner.squeeze(-1), m.clamp_min(EMPTY), c, t


def logit_max_partial_reference(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, c) of every row; dtypes as in `winner_and_partial_reference`."""
    return winner_and_partial_reference(logits, temperature)[1:3]


def merge_logit_max_reference(
    maximum: torch.Tensor, complement: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, c) of the union of the sets along `dim`; the first maximiser keeps its own complement."""
    m, winner = maximum.max(dim=dim, keepdim=True)
    share = (complement + 1.0) * torch.exp(maximum - m)
    share.scatter_(dim, winner, complement.gather(dim, winner))
    m = m.squeeze(dim)
    return m, torch.where(m > EMPTY, share.sum(dim), 0.0 * complement.sum(dim))


def logit_from_partial(maximum: torch.Tensor, complement: torch.Tensor) -> torch.Tensor:
    """f = -log c, clamped to +-40; -40 for a row without a finite logit or with a NaN. Shapes and device as given."""
    f = -torch.log(complement)
    f = torch.where(f.isnan() | (maximum <= EMPTY), torch.full_like(f, INVALID), f)
    return f.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)


def logit_max_reference(logits: torch.Tensor, temperature: torch.Tensor | float | None = None) -> torch.Tensor:
    """logit(q_max) by the definition above; float64 in, float64 out."""
    return logit_from_partial(*logit_max_partial_reference(logits, temperature))


@triton.jit
def fold(m, c, t, scale, N: tl.constexpr, MOMENT: tl.constexpr):
    """Merge N partials with maxima in units of x: one winner keeps its c, every other adds (c + 1) exp((m - max) / T).
    Built-in reductions only: a tuple reduction costs the interpreter seconds. `scale` is log2(e) / T. If MOMENT, the t
    as well: (t + (c + 1) (max - m)) exp((m - max) / T) of the others."""
    top = tl.max(m, 0)
    i = tl.arange(0, N)
    wins = i == tl.min(tl.where(m == top, i, N), 0)
    tokens = c + 1.0
    e = tl.exp2((m - top) * scale)
    rest = tl.where(top > _EMPTY, tl.sum(tl.where(wins, c, tokens * e), 0), 0.0 * tl.sum(c, 0))
    moment = 0.0
    if MOMENT:
        moment = tl.sum(tl.where(wins, t, (t + tokens * tl.minimum(top - m, _FAR)) * e), 0)
    return top, rest, moment


@triton.jit
def first_of(m, top, token, vocab):
    """The smallest token among those with the largest m; 0 for a set without a finite logit."""
    return tl.where(top > _EMPTY, tl.min(tl.where(m == top, token, vocab - 1), 0), 0)


@triton.jit
def add_logit(x, m, c, t, scale, MOMENT: tl.constexpr):
    """(x - m, and m, c, t with the logit x added), per lane, with one exp2. Where x wins, the tokens so far move x - m
    further away, and the former maximum is one of them. `scale` is log2(e) / T."""
    d = x - m
    e = tl.exp2(tl.abs(d) * -scale)
    stays = tl.where(d > 0.0, e, 1.0)
    c = c * stays + e
    if MOMENT:
        t = t * stays + tl.minimum(tl.abs(d), _FAR) * tl.where(d > 0.0, c, e)
    return d, tl.maximum(m, x), c, t


@triton.jit
def row_partial(row, lo, hi, scale, vocab, BLOCK: tl.constexpr, TOKEN: tl.constexpr, MOMENT: tl.constexpr):
    """(m, c, t, first maximiser) of row[lo:hi], m and t in units of x; t only if MOMENT, the maximiser only if TOKEN.
    `scale` is log2(e) / T."""
    lane = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], _EMPTY, tl.float32)
    c = tl.zeros([BLOCK], tl.float32)
    t = tl.zeros([BLOCK], tl.float32)
    start = tl.zeros([BLOCK], tl.int32)
    full = lo + tl.maximum(hi - lo, 0) // BLOCK * BLOCK
    for j in tl.range(lo, full, BLOCK):
        x = tl.load(row + j + lane, eviction_policy="evict_first").to(tl.float32)
        d, m, c, t = add_logit(x, m, c, t, scale, MOMENT)
        if TOKEN:
            start = tl.where(d > 0.0, j, start)
    if full < hi:
        x = tl.load(row + full + lane, mask=full + lane < hi, other=float("-inf")).to(tl.float32)
        d, m, c, t = add_logit(x, m, c, t, scale, MOMENT)
        if TOKEN:
            start = tl.where(d > 0.0, full, start)
    top, rest, moment = fold(m, c, t, scale, BLOCK, MOMENT)
    token = 0
    if TOKEN:
        token = first_of(m, top, start + lane, vocab)
    return top, rest, moment, token


@triton.jit
def place(logits, row_stride, position_stride, positions, first_position, slots):
    """(item, row, j, start of its logits, slot, position) of a program: item = row * positions + j."""
    item = tl.program_id(0)
    row = (item // positions).to(tl.int64)
    j = item % positions
    slot = row
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
    return item, row, j, logits + row * row_stride + j.to(tl.int64) * position_stride, slot, first_position + j


@triton.jit
def temperature_of(temperature, temperature_value, row):
    t = temperature_value
    if temperature is not None:
        t = tl.load(temperature + row).to(tl.float32)
    return t


@triton.jit
def scale_for(t):
    """log2(e) / T, T = 1 for a greedy row."""
    return tl.where(t > 0.0, _LOG2E / tl.maximum(t, _MIN_TEMPERATURE), _LOG2E)


@triton.jit
def scaled(m, scale):
    """m in units of x / T; an empty set keeps its mark. Clamped, for at T < 1 a large negative m overflows."""
    return tl.where(m > _EMPTY, tl.maximum(m * (scale / _LOG2E), _EMPTY), _EMPTY)


@triton.jit
def log1p(c):
    return tl.where(c < 1e-3, c * (1.0 - 0.5 * c), tl.log(1.0 + c))


@triton.jit
def log_normaliser(m, c, scale):
    nothing = tl.where(c == c, float("-inf"), float("nan"))
    return tl.where(m > _EMPTY, scaled(m, scale) + log1p(c), nothing)


@triton.jit
def entropy_of(c, t, scale):
    """In nats, t in units of x."""
    return tl.where(c == c, log1p(c) + t * (scale / _LOG2E) / (1.0 + c), 0.0)


@triton.jit
def gap_of(m, c, x, scale):
    """log q_max - log q of the token with the logit x, at most 40; NaN where x is, and for an invalid row."""
    gap = tl.minimum(tl.maximum((m - x) * (scale / _LOG2E), 0.0), _MAX_LOG_ODDS)  # 0 for inf - inf, which is no number
    return tl.where((m > _EMPTY) & (c == c) & (x == x), gap, float("nan"))


@triton.jit
def feature_of(m, c):
    f = tl.minimum(tl.maximum(-tl.log(c), -_MAX_LOG_ODDS), _MAX_LOG_ODDS)
    return tl.where((m > _EMPTY) & (c == c), f, -_MAX_LOG_ODDS)


@triton.jit
def sigmoid_score(f, slope, intercept):
    p = 1.0 / (1.0 + tl.exp(-(slope * f + intercept)))
    return tl.where(f > -_MAX_LOG_ODDS, p, 0.0)


@triton.jit
def store_score(
    m, c, row, slot, position, features, scores, row_scores, strata, slopes, intercepts, offsets, gates, P: tl.constexpr
):
    """Feature and score of one draft: by slot, and the score by row too. Where the gate of the stratum is open, the
    slot's offset adds to the intercept."""
    f = feature_of(m, c)
    tl.store(features + slot * P + position, f)
    if scores is not None:
        stratum = 0
        if strata is not None:
            stratum = tl.load(strata + slot)
        intercept = tl.load(intercepts + stratum * P + position)
        if offsets is not None:
            intercept += tl.where(tl.load(gates + stratum) > 0, tl.load(offsets + slot), 0.0)
        p = sigmoid_score(f, tl.load(slopes + stratum), intercept)
        tl.store(scores + slot * P + position, p)
        if row_scores is not None:
            tl.store(row_scores + row * P + position, p)


@triton.jit
def store_law(m, c, t, x, scale, at, entropies, gaps):
    """Entropy of one draft's distribution and gap of the drawn token, whose logit is x."""
    if entropies is not None:
        tl.store(entropies + at, entropy_of(c, t, scale))
    if gaps is not None:
        tl.store(gaps + at, gap_of(m, c, x, scale))


@triton.jit
def store_split(m, c, t, parts, part_stride, at, MOMENT: tl.constexpr):
    tl.store(parts + at, m)
    tl.store(parts + part_stride + at, c)
    if MOMENT:
        tl.store(parts + 2 * part_stride + at, t)


@triton.jit
def fold_splits(parts, part_stride, at, scale, SPLITS: tl.constexpr, MOMENT: tl.constexpr):
    """(m of every split, and m, c, t of the row)."""
    ms = tl.load(parts + at, cache_modifier=".cg")
    cs = tl.load(parts + part_stride + at, cache_modifier=".cg")
    ts = cs
    if MOMENT:
        ts = tl.load(parts + 2 * part_stride + at, cache_modifier=".cg")
    m, c, t = fold(ms, cs, ts, scale, SPLITS, MOMENT)
    return ms, m, c, t


@triton.jit
def store_nothing(at, row_scores, tokens, normalisers):
    """What a padding row gets: score 0, token 0."""
    if row_scores is not None:
        tl.store(row_scores + at, 0.0)
    if tokens is not None:
        tl.store(tokens + at, 0)
        tl.store(normalisers + at, float("-inf"))


@triton.jit(
    do_not_specialize=["positions", "first_position", "num_slots", "drawn_stride", "drawn_position_stride"],
    do_not_specialize_on_alignment=["slots", "temperature", "drawn"],
)
def logit_max_kernel(
    logits,
    row_stride,
    position_stride,
    vocab,
    chunk,
    positions,
    first_position,
    temperature,
    temperature_value,
    parts,
    part_stride,
    part_token,
    ticket,
    out_m,
    out_c,
    out_t,
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
    drawn,
    drawn_stride,
    drawn_position_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
):
    """One launch from logits to score. Grid (rows * positions, SPLITS); the last program of a row to finish merges
    the splits, writes the result and resets the row's ticket for the next launch.

    Optional pointers are None when absent: out_m/out_c/out_t (partials), features, scores, row_scores, slots, strata,
    offsets and gates, temperature; tokens (the argmax) and normalisers; out_t or entropies, for which the moment is
    taken; gaps (of the argmax where there are `tokens`, else of `drawn`, or NaN). All are indexed by row, but
    `features`, `scores`, `offsets`, `entropies` and `gaps` by slot; `gates` by stratum.
    """
    item, row, j, start, slot, position = place(logits, row_stride, position_stride, positions, first_position, slots)
    split = tl.program_id(1)
    MOMENT: tl.constexpr = out_t is not None or entropies is not None
    if (slot >= 0) & (slot < num_slots):
        scale = scale_for(temperature_of(temperature, temperature_value, row))
        lo = split * chunk
        hi = tl.minimum(lo + chunk, vocab)
        m, c, t, token = row_partial(start, lo, hi, scale, vocab, BLOCK, tokens is not None, MOMENT)
        last = True
        if SPLITS > 1:
            at = item.to(tl.int64) * SPLITS
            store_split(m, c, t, parts, part_stride, at + split, MOMENT)
            if tokens is not None:
                tl.store(part_token + at + split, token)
            last = tl.atomic_add(ticket + item, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if last:
            if SPLITS > 1:
                part = item.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)
                ms, m, c, t = fold_splits(parts, part_stride, part, scale, SPLITS, MOMENT)
                if tokens is not None:
                    token = first_of(ms, m, tl.load(part_token + part, cache_modifier=".cg"), vocab)
                tl.store(ticket + item, 0)
            if out_m is not None:
                tl.store(out_m + item, scaled(m, scale))
                tl.store(out_c + item, c)
                if out_t is not None:
                    tl.store(out_t + item, t * (scale / _LOG2E))
            if features is not None:
                store_score(
                    m, c, row, slot, position, features, scores, row_scores, strata, slopes, intercepts, offsets, gates,
                    P,
                )  # fmt: skip
            if tokens is not None:
                tl.store(tokens + row * P + position, token.to(tl.int64))
                tl.store(normalisers + row * P + position, log_normaliser(m, c, scale))
            x = float("nan")
            if tokens is not None:
                x = m
            if drawn is not None:
                v = tl.load(drawn + row * drawn_stride + j * drawn_position_stride)
                x = tl.load(start + v, mask=(v >= 0) & (v < vocab), other=float("nan")).to(tl.float32)
            store_law(m, c, t, x, scale, slot * P + position, entropies, gaps)
    else:
        if split == 0:
            store_nothing(row * P + position, row_scores, tokens, normalisers)


@functools.cache
def _launch_shape(launch: LogitMaxLaunch, vocab: int, itemsize: int) -> tuple[int, int, int, int]:
    block = min(launch.block_bytes // itemsize, triton.next_power_of_2(max(vocab, 128)))
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(vocab, launch.logits)))
    return (
        splits,
        triton.cdiv(triton.cdiv(vocab, splits), block) * block,
        block,
        min(launch.warps, max(block // 256, 1)),
    )


def launch_shape(vocab: int, itemsize: int, gpu: str | None = None) -> tuple[int, int, int, int]:
    """(splits, chunk, block, warps) for rows of `vocab` logits; chunks keep every split 16-byte aligned. A function of
    the vocabulary and the GPU (default: the current one) alone, so that a changed batch size compiles nothing."""
    return _launch_shape(launches(gpu or architecture()).logit_max, vocab, itemsize)


def scratch(items: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(partials float32 [3, items * MAX_SPLITS], tickets int32 [items]) for `items` rows: aligned for any number."""
    return (
        torch.empty(3, items * MAX_SPLITS, dtype=torch.float32, device=device),
        torch.zeros(items, dtype=torch.int32, device=device),
    )


def run(
    logits: torch.Tensor, temperature: torch.Tensor | float | None, partial: bool, moment: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(m, c, t) of every row if `partial`, else (feature, entropy, nothing); t and entropy only if `moment`."""
    rows = logits.reshape(-1, logits.shape[-1])
    n, vocab = rows.shape
    out = tuple(torch.empty(n, dtype=torch.float32, device=rows.device) for _ in range(3))
    if n:
        pointer, value = temperature_argument(temperature, logits.shape[:-1], rows.device)
        parts, ticket = scratch(n, rows.device)
        splits, chunk, block, warps = launch_shape(vocab, rows.element_size())
        m, c, t, feature, entropy = (*out, None, None) if partial else (None, None, None, *out[:2])
        logit_max_kernel[(n, splits)](
            rows, rows.stride(0), 0, vocab, chunk, 1, 0, pointer, value, parts, parts.stride(0), None, ticket, m, c,
            t if moment else None, feature, None, None, None, n, None, None, None, None, None, None, None,
            entropy if moment else None, None, None, None, None, SPLITS=splits, BLOCK=block, P=1, num_warps=warps,
            **(register_ceiling() if moment else {}),
        )  # fmt: skip
    first, second, third = (each.view(logits.shape[:-1]) for each in out)
    return first, second, third


@torch.library.custom_op("av_triton::logit_max", mutates_args=())
def _logit_max(logits: torch.Tensor, temperature: torch.Tensor | None, value: float) -> torch.Tensor:
    t = value if temperature is None else temperature
    if use_triton(logits.device):
        return run(logits, t, partial=False)[0]
    return logit_max_reference(logits, t).float()


@_logit_max.register_fake
def _(logits: torch.Tensor, temperature: torch.Tensor | None, value: float) -> torch.Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("av_triton::logit_max_partial", mutates_args=())
def _logit_max_partial(
    logits: torch.Tensor, temperature: torch.Tensor | None, value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    t = value if temperature is None else temperature
    if use_triton(logits.device):
        return run(logits, t, partial=True)[:2]
    m, c = logit_max_partial_reference(logits, t)
    return m.float(), c.float()


@_logit_max_partial.register_fake
def _(logits: torch.Tensor, temperature: torch.Tensor | None, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    out = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return out, torch.empty_like(out)


@torch.library.custom_op("av_triton::merge_logit_max", mutates_args=())
def _merge_logit_max(maximum: torch.Tensor, complement: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return merge_logit_max_reference(maximum, complement, dim)


@_merge_logit_max.register_fake
def _(maximum: torch.Tensor, complement: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    m = maximum.select(dim, 0)
    return torch.empty_like(m), torch.empty_like(m)


def logit_max(logits: torch.Tensor, temperature: torch.Tensor | float | None = None) -> torch.Tensor:
    """Log-odds of the most likely token of softmax(logits / temperature).

    Args:
        logits: [..., V] float32, bfloat16 or float16; the last dimension contiguous, 1 <= V <= 262,144. A -inf logit
            is a token outside the vocabulary.
        temperature: None (1), a number, or float32 of shape [...]. Clamped to >= 1e-4; 0 (a greedy row) counts as 1.

    Returns:
        float32 [...] in [-40, 40]. -40 marks a row that is all -inf or holds a NaN. 40: the row is certain.

    Error against float64: <= 2e-6 * max(1, |f|) for float32 logits.
    """
    check_logits(logits, MAX_VOCAB)
    pointer, value = temperature_argument(temperature, logits.shape[:-1], logits.device)
    return _logit_max(logits, pointer, value)


def logit_max_partial(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(maximum, complement) of one vocabulary shard, float32 [...] each, in units of logits / temperature.

    Arguments as `logit_max`. Merge shards in shard order with `merge_logit_max`, so that every rank gets equal bits.
    """
    check_logits(logits, MAX_VOCAB)
    pointer, value = temperature_argument(temperature, logits.shape[:-1], logits.device)
    return _logit_max_partial(logits, pointer, value)


def merge_logit_max(maximum: torch.Tensor, complement: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(maximum, complement) of the whole vocabulary from those of its shards, stacked along `dim`.

    Args:
        maximum, complement: float32 of one shape, as `logit_max_partial` gives them.

    Returns:
        The same pair without `dim`; `logit_from_partial` turns it into the feature.
    """
    if maximum.shape != complement.shape or maximum.dim() == 0 or maximum.shape[dim] == 0:
        raise ValueError(
            f"merge_logit_max: maximum {tuple(maximum.shape)} and complement {tuple(complement.shape)} must have one "
            f"shape with at least one shard along dim {dim}: stack the outputs of logit_max_partial"
        )
    return _merge_logit_max(maximum, complement, dim)
