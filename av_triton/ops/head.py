"""Hidden state of the drafter and history of the draft -> a correction of the log-odds, learned online.

For a draft at position k with hidden state h, of a request in stratum s,

    z[i] = clamp((h[i] - mean[s, i]) / sqrt(variance[s, i]), -4, 4)        a NaN counts as 0
    x    = (z / |z|, (log q(x_{k-1}) + 1) / 2)                             the last entry at least -4;
                                                                           0 at k = 0 or where unknown
    c    = weights[s] . x, at most 4 either way

With p = sigmoid(w f + b + o + c), the offset o where it is served, the residual omega (y - p) of every labelled draft
adds to the gradient. When a minibatch of 32 labels is full, each weight takes a step of Adagrad, and mean and variance
move to those of the labelled hidden states, as a running mean over at most 4096 labels:

    g = gradient / labels    curvature = (1 - 1/256) curvature + g²    weights += 0.1 g / sqrt(curvature)

It forgets, so that its steps stay large enough to follow a new workload.

What is summed is quantised once per draft and coordinate to int64 Q30, so the order of the rows does not matter.
Weights start at 0: a cold start is exactly the estimator without a head.

Adagrad: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", JMLR 12 (2011). Adam learns no more and keeps one vector
more (`python -m benchmarks.score.form`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from av_triton.backend import register_ceiling, use_triton
from av_triton.ops.logit_max import INVALID, sigmoid_score
from av_triton.ops.score import acceptance_score_reference
from av_triton.ops.select import Q30, gather_slots

MAX_HIDDEN = 8192
RATE, FORGET, MINIBATCH, HORIZON = 0.1, 1 / 256, 32, 4096
LARGEST_INPUT, LARGEST_CORRECTION, LARGEST_WEIGHT = 4.0, 4.0, 64.0
LEAST_VARIANCE, LARGEST_VARIANCE = 1e-12, 1e30

OFFSET, HEAD = range(2)  # rows of EstimatorState.gates
# Rows of HeadState.sums and HeadState.counts.
GRADIENT, FIRST, SECOND = range(3)
PENDING, KNOWN, BEHIND, TICKET = range(4)

_Q30 = tl.constexpr(float(Q30))
_INVALID = tl.constexpr(INVALID)
_RATE = tl.constexpr(RATE)
_KEEP = tl.constexpr(1.0 - FORGET)
_MINIBATCH = tl.constexpr(MINIBATCH * Q30)
_HORIZON = tl.constexpr(HORIZON * Q30)
_LARGEST_INPUT = tl.constexpr(LARGEST_INPUT)
_LARGEST_CORRECTION = tl.constexpr(LARGEST_CORRECTION)
_LARGEST_WEIGHT = tl.constexpr(LARGEST_WEIGHT)
_LEAST_VARIANCE = tl.constexpr(LEAST_VARIANCE)
_LARGEST_VARIANCE = tl.constexpr(LARGEST_VARIANCE)
_COLUMNS = 64  # of a program that learns: a cache line
_ITEMS = 32  # drafts of its tile


class HeadState(NamedTuple):
    """Device state of a head. d: width of the hidden state; P: K rounded up to a power of two; S: strata.

    The last of the d + 1 columns is the history; its mean and variance are not used.
    """

    weights: torch.Tensor  # float32 [S, d + 1]
    curvature: torch.Tensor  # float32 [S, d + 1], forgetful sums of squared gradients
    mean: torch.Tensor  # float32 [S, d + 1]
    variance: torch.Tensor  # float32 [S, d + 1]
    sums: torch.Tensor  # int64 Q30 [S, 3, d + 1], of the minibatch: gradient, first and second moment of z
    # int64 [S, blocks of columns, 4]: labels of the minibatch, those of them with a hidden state, labels behind the
    # mean, all Q30, and a ticket. Every block has its own copy, so that none waits for another.
    counts: torch.Tensor
    # Of the drafts that wait for their verdict:
    inputs: torch.Tensor  # float16 [slots, P, d], z
    norms: torch.Tensor  # float32 [slots, P], 1 / |z|; 0: no hidden state
    histories: torch.Tensor  # float32 [slots, P]
    corrections: torch.Tensor  # float32 [slots, P]
    omegas: torch.Tensor  # float32 [slots, P], of the last observation; 0: no label
    residuals: torch.Tensor  # float32 [slots, P], omega (y - p)


def new_state(strata: int, slots: int, positions: int, hidden_size: int) -> HeadState:
    """positions: P. On torch's default device."""
    columns = hidden_size + 1
    row_width = triton.cdiv(columns, 16) * 16  # rows start at a multiple of 64 bytes: loads of 16 bytes

    def by_column(value: float) -> torch.Tensor:
        return torch.full((strata, row_width), value, dtype=torch.float32)[:, :columns]

    per_draft = [torch.zeros(slots, positions, dtype=torch.float32) for _ in range(5)]
    return HeadState(
        weights=by_column(0.0),
        curvature=by_column(0.0),
        mean=by_column(0.0),
        variance=by_column(1.0),
        sums=torch.zeros(strata, 3, columns, dtype=torch.int64),
        counts=torch.zeros(strata, triton.cdiv(columns, _COLUMNS), 4, dtype=torch.int64),
        inputs=torch.zeros(slots, positions, hidden_size, dtype=torch.float16),
        norms=per_draft[0],
        histories=per_draft[1],
        corrections=per_draft[2],
        omegas=per_draft[3],
        residuals=per_draft[4],
    )


def inputs_reference(hidden: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """z, float16, in the shape of `hidden`; mean and variance broadcast against it."""
    z = ((hidden.float() - mean) / variance.sqrt()).nan_to_num(0.0, LARGEST_INPUT, -LARGEST_INPUT)
    return z.clamp(-LARGEST_INPUT, LARGEST_INPUT).half()


def history_reference(features: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
    """(log q(x_{k-1}) + 1) / 2 for k = 1, 2, ... of the features and gaps [..., K] at k - 1: float32 [..., K - 1]."""
    f, gap = features[..., :-1], gaps[..., :-1]
    log_q = -torch.nn.functional.softplus(-f) - gap
    known = (f > INVALID) & ~gap.isnan()
    return torch.where(known, ((log_q + 1) / 2).clamp_min(-LARGEST_INPUT), 0.0)


@triton.jit
def _history(features, scores, gaps, at, position):
    known = position > 0
    f = tl.load(features + at - 1, mask=known, other=_INVALID)
    gap = tl.load(gaps + at - 1, mask=known, other=float("nan"))
    fresh = tl.load(scores + at - 1, mask=known, other=-1.0) >= 0.0
    log_q = tl.minimum(f, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(f))) - gap
    known = fresh & (f > _INVALID) & (gap == gap)
    return tl.where(known, tl.maximum((log_q + 1.0) * 0.5, -_LARGEST_INPUT), 0.0)


@triton.jit(do_not_specialize=["positions", "first_position", "num_slots"], do_not_specialize_on_alignment=["slots"])
def correct_kernel(
    hidden, row_stride, position_stride, slots, num_slots, positions, first_position, D, row_width,
    features, scores, row_scores, gaps, strata, slopes, intercepts, offsets, gates,
    weights, mean, variance, inputs, norms, histories, corrections,
    P: tl.constexpr, STRATA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows * positions,). The scoring launch has stored features and scores; the scores are written anew."""
    item = tl.program_id(0)
    row = (item // positions).to(tl.int64)
    j = item % positions
    position = first_position + j
    slot = tl.load(slots + row).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        at = slot * P + position
        stratum = tl.load(strata + slot)
        lane = tl.arange(0, BLOCK)
        column = stratum * row_width + lane
        dot = tl.zeros([BLOCK], tl.float32)
        square = tl.zeros([BLOCK], tl.float32)
        if hidden is not None:
            start = hidden + row * row_stride + j.to(tl.int64) * position_stride
            for i in tl.range(0, D, BLOCK):
                inside = i + lane < D
                h = tl.load(start + i + lane, mask=inside, other=0.0).to(tl.float32)
                centre = tl.load(mean + column + i, mask=inside, other=0.0)
                z = (h - centre) / tl.sqrt(tl.load(variance + column + i, mask=inside, other=1.0))
                z = tl.where(z == z, tl.minimum(tl.maximum(z, -_LARGEST_INPUT), _LARGEST_INPUT), 0.0)
                z = tl.where(inside, z, 0.0).to(tl.float16)
                tl.store(inputs + at * D + i + lane, z, mask=inside)
                z = z.to(tl.float32)
                dot += z * tl.load(weights + column + i, mask=inside, other=0.0)
                square += z * z
        length = tl.sum(square, 0)
        norm = tl.where(length > 0.0, 1.0 / tl.sqrt(tl.where(length > 0.0, length, 1.0)), 0.0)
        history = _history(features, scores, gaps, at, position)
        c = tl.sum(dot, 0) * norm + history * tl.load(weights + stratum * row_width + D)
        c = tl.minimum(tl.maximum(c, -_LARGEST_CORRECTION), _LARGEST_CORRECTION)
        tl.store(norms + at, norm)
        tl.store(histories + at, history)
        tl.store(corrections + at, c)
        intercept = tl.load(intercepts + stratum * P + position)
        intercept += tl.where(tl.load(gates + stratum) > 0, tl.load(offsets + slot), 0.0)
        intercept += tl.where(tl.load(gates + STRATA + stratum) > 0, c, 0.0)
        p = sigmoid_score(tl.load(features + at), tl.load(slopes + stratum), intercept)
        tl.store(scores + at, p)
        tl.store(row_scores + row * P + position, p)


@triton.jit(do_not_specialize=["rows", "num_slots"], do_not_specialize_on_alignment=["slots"])
def learn_kernel(
    slots, rows, num_slots, strata, D, row_width, weights, curvature, mean, variance, sums, counts,
    inputs, norms, histories, omegas, residuals,
    P: tl.constexpr, COLUMNS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows * P / ITEMS), ceil((D + 1) / COLUMNS), S). The last program of a stratum and its columns takes
    the step when a minibatch is full."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.program_id(2)
    inside = column <= D
    slot, real = gather_slots(slots, item // P, item < rows * P, num_slots)
    real = real & (tl.load(strata + slot, mask=real, other=-1) == s)
    at = slot * P + item % P
    omega = tl.load(omegas + at, mask=real, other=0.0)
    labels = (omega * _Q30).to(tl.int64)
    at_sums = sums + s * 3 * (D + 1) + column
    own = counts + (s * tl.num_programs(1) + tl.program_id(1)) * 4
    if tl.max(omega, 0) > 0.0:
        real = real & (omega > 0.0)
        norm = tl.load(norms + at, mask=real, other=0.0)
        residual = tl.load(residuals + at, mask=real, other=0.0)
        history = tl.load(histories + at, mask=real, other=0.0)
        known = real & (norm > 0.0)
        mask = known[:, None] & (column < D)[None, :]
        z = tl.load(inputs + at[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.where((column == D)[None, :], history[:, None], z * norm[:, None])
        _add(at_sums, residual[:, None] * x, inside)
        _add(at_sums + D + 1, omega[:, None] * z, inside)
        _add(at_sums + 2 * (D + 1), omega[:, None] * z * z, inside)
        tl.atomic_add(own, tl.sum(labels, 0), sem="relaxed")
        tl.atomic_add(own + 1, tl.sum(tl.where(known, labels, 0), 0), sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(own + 3, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(own + 3, 0)
        pending = tl.load(own, cache_modifier=".cg")
        if pending >= _MINIBATCH:
            at_column = s * row_width + column
            with_hidden = tl.load(own + 1, cache_modifier=".cg")
            behind = tl.minimum(tl.load(own + 2) + with_hidden, _HORIZON)
            _step(weights, curvature, at_sums, pending, at_column, inside)
            if with_hidden > 0:
                _move(mean, variance, at_sums + D + 1, D, with_hidden, behind, at_column, column < D)
            tl.debug_barrier()  # every thread has read what is cleared now
            for i in tl.static_range(3):
                tl.store(at_sums + i * (D + 1), tl.zeros([COLUMNS], tl.int64), mask=inside)
            tl.store(own, 0)
            tl.store(own + 1, 0)
            tl.store(own + 2, behind)


@triton.jit
def _add(sums, entries, mask):
    tl.atomic_add(sums, tl.sum((entries * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")


@triton.jit
def _mean_of(sums, labels, mask):
    return tl.load(sums, mask=mask, other=0, cache_modifier=".cg").to(tl.float32) / labels.to(tl.float32)


@triton.jit
def _step(weights, curvature, gradient, labels, at, mask):
    g = _mean_of(gradient, labels, mask)
    u = _KEEP * tl.load(curvature + at, mask=mask, other=0.0) + g * g
    v = tl.load(weights + at, mask=mask, other=0.0) + tl.where(u > 0.0, _RATE * g / tl.sqrt(u + 1e-30), 0.0)
    tl.store(curvature + at, u, mask=mask)
    tl.store(weights + at, tl.minimum(tl.maximum(v, -_LARGEST_WEIGHT), _LARGEST_WEIGHT), mask=mask)


@triton.jit
def _move(mean, variance, moments, D, labels, behind, at, mask):
    m = _mean_of(moments, labels, mask)
    q = _mean_of(moments + D + 1, labels, mask)
    r = labels.to(tl.float32) / behind.to(tl.float32)
    v = tl.load(variance + at, mask=mask, other=1.0)
    centre = tl.load(mean + at, mask=mask, other=0.0) + r * m * tl.sqrt(v)
    v = v * (1.0 + r * (q - 1.0))  # about the mean as it was: of clipped inputs, so that any scale is found
    tl.store(mean + at, tl.minimum(tl.maximum(centre, -_LARGEST_VARIANCE), _LARGEST_VARIANCE), mask=mask)
    tl.store(variance + at, tl.minimum(tl.maximum(v, _LEAST_VARIANCE), _LARGEST_VARIANCE), mask=mask)


def correct(
    state: HeadState,
    hidden: torch.Tensor | None,
    slots: torch.Tensor,
    num_slots: int,
    first: int,
    count: int,
    drafts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    coefficients: tuple[torch.Tensor, ...],
) -> None:
    """Correct the scores of `count` positions from `first` on, which the scoring launch has just stored.

    hidden: [rows, count, d] of any strides (0 where the positions share one), vectors contiguous; None: unknown.
    drafts: (features, scores, row_scores, gaps). coefficients: (strata, slopes, intercepts, offsets, gates), see
    `EstimatorState`.
    """
    rows = slots.shape[0]
    features, scores, row_scores, gaps = drafts
    if not use_triton(slots.device):
        _correct_torch(state, hidden, slots, num_slots, slice(first, first + count), drafts, coefficients)
    elif rows:
        d = state.inputs.shape[-1]
        strides = (0, 0) if hidden is None else hidden.stride()[:2]
        block = min(1024, triton.next_power_of_2(d))
        correct_kernel[(rows * count,)](
            hidden, *strides, slots, num_slots, count, first, d, state.weights.stride(0), features, scores, row_scores,
            gaps, *coefficients, state.weights, state.mean, state.variance, state.inputs, state.norms, state.histories,
            state.corrections,
            P=features.shape[1], STRATA=state.weights.shape[0], BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip


def _correct_torch(
    state: HeadState,
    hidden: torch.Tensor | None,
    slots: torch.Tensor,
    num_slots: int,
    at_positions: slice,
    drafts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    coefficients: tuple[torch.Tensor, ...],
) -> None:
    features, scores, row_scores, gaps = drafts
    strata, slopes, intercepts, offsets, gates = coefficients
    real = (slots >= 0) & (slots < num_slots)
    at = slots[real].long()
    s = strata[at].long()
    before = slice(max(at_positions.start - 1, 0), at_positions.stop)
    known = torch.where(scores[at, before] >= 0, features[at, before], INVALID)
    history = history_reference(known, gaps[at, before])
    if at_positions.start == 0:
        history = torch.cat([torch.zeros_like(known[:, :1]), history], 1)
    norm, dot = torch.zeros_like(history), torch.zeros_like(history)
    if hidden is not None:
        z = inputs_reference(hidden[real], state.mean[s, None, :-1], state.variance[s, None, :-1])
        state.inputs[at, at_positions] = z
        length = z.float().square().sum(-1)
        norm = torch.where(length > 0, length.rsqrt(), 0.0)
        dot = (z.float() * state.weights[s, None, :-1]).sum(-1)
    c = (dot * norm + history * state.weights[s, None, -1]).clamp(-LARGEST_CORRECTION, LARGEST_CORRECTION)
    state.norms[at, at_positions], state.histories[at, at_positions] = norm, history
    state.corrections[at, at_positions] = c
    intercept = intercepts[s, at_positions] + torch.where(gates[OFFSET, s] > 0, offsets[at], 0.0)[:, None]
    intercept = intercept + torch.where((gates[HEAD, s] > 0)[:, None], c, 0.0)
    p = acceptance_score_reference(features[at, at_positions], slopes[s][:, None], intercept)
    scores[at, at_positions] = p
    row_scores[: len(slots), at_positions][real] = p


def learn(state: HeadState, slots: torch.Tensor, strata: torch.Tensor) -> None:
    """Learn from the labels that `observe` has left in `omegas` and `residuals`."""
    num_slots, P = state.norms.shape
    if not use_triton(slots.device):
        _learn_torch(state, slots, strata)
        return
    S, blocks = state.counts.shape[:2]
    if rows := slots.shape[0]:
        learn_kernel[(triton.cdiv(rows * P, _ITEMS), blocks, S)](
            slots, rows, num_slots, strata, state.inputs.shape[-1], state.weights.stride(0), state.weights,
            state.curvature, state.mean, state.variance, state.sums, state.counts, state.inputs, state.norms,
            state.histories, state.omegas, state.residuals, P=P, COLUMNS=_COLUMNS, ITEMS=_ITEMS, **register_ceiling(),
        )  # fmt: skip


def _learn_torch(state: HeadState, slots: torch.Tensor, strata: torch.Tensor) -> None:
    at = slots[(slots >= 0) & (slots < strata.shape[0])].long()
    omega, residual, norm = state.omegas[at], state.residuals[at], state.norms[at]
    row, k = (omega > 0).nonzero().unbind(1)
    omega, residual, norm, slot = omega[row, k], residual[row, k], norm[row, k], at[row]
    z = torch.where((norm > 0)[:, None], state.inputs[slot, k].float(), 0.0)
    x = torch.cat([z * norm[:, None], state.histories[slot, k][:, None]], 1)
    z = torch.nn.functional.pad(z, (0, 1))
    entries = torch.stack([residual[:, None] * x, omega[:, None] * z, omega[:, None] * z * z], 1)
    group = strata[slot].long()
    state.sums.index_add_(0, group, (entries * Q30).to(torch.int64))
    labels = (omega * Q30).to(torch.int64)
    counts = torch.stack([labels, torch.where(norm > 0, labels, 0)], 1)
    state.counts[..., :BEHIND].index_add_(0, group, counts[:, None].expand(-1, state.counts.shape[1], -1))
    for s in range(len(state.weights)):
        pending, known, behind, _ = state.counts[s, 0].tolist()
        if pending < MINIBATCH * Q30:
            continue
        gradient, first, second = state.sums[s].float()
        g = gradient / float(pending)
        u = state.curvature[s] = (1 - FORGET) * state.curvature[s] + g * g
        step = torch.where(u > 0, RATE * g / (u + 1e-30).sqrt(), 0.0)
        state.weights[s] = (state.weights[s] + step).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT)
        behind = min(behind + known, HORIZON * Q30)
        if known:
            m, q, r = first[:-1] / float(known), second[:-1] / float(known), known / behind
            variance = state.variance[s, :-1]
            mean = state.mean[s, :-1] + r * m * variance.sqrt()
            state.mean[s, :-1] = mean.clamp(-LARGEST_VARIANCE, LARGEST_VARIANCE)
            moved = variance * (1.0 + r * (q - 1.0))
            state.variance[s, :-1] = moved.clamp(LEAST_VARIANCE, LARGEST_VARIANCE)
        state.sums[s] = 0
        state.counts[s] = torch.tensor([0, 0, behind, 0], device=state.counts.device)
