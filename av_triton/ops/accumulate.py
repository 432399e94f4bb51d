"""labelled drafts -> sums of the log-loss's Hessian and gradient, and, when a cycle is full, the Newton step.

Draft k of a request with a accepted of v admitted drafts is labelled where k <= a and k < v: y = 1 if k < a, else 0
(the first rejection), with weight omega = 1; what was trimmed or comes after a rejection has no label. Where the
acceptance probabilities alpha[k] = min(1, p(x_k) / q(x_k)) of the verified drafts are known, every k < v is labelled by

    y[k] = alpha[k]        omega[k] = alpha[0] alpha[1] .. alpha[k-1]

which is the mean of what verdicts teach over the rejection sampler's random numbers; where alpha is 0 or 1 it is the
verdicts. alpha is clamped to [0, 1], and a NaN ends the row's labels. With p recomputed from the stored feature f and
the coefficients in force, each labelled draft adds, per stratum and position,

    omega p(1-p) f²    omega p(1-p) f    omega p(1-p)    omega (y-p) f    omega (y-p)    omega

The offset that a request adds to its log-odds is one Newton step from 0 on its own labels since the slot's reset,
under a Gaussian prior of inverse variance `prior`; p and the sums above are without it:

    o = R / (V + prior), at most 4 either way        R = sum of omega (y-p), V = sum of omega p(1-p)

An addition to the log-odds, the offset or the correction of `head.py`, is served where it has proved itself: while its
gate, a CUSUM in nats over the stratum's labels, is above 0. Losses are by what was known when the draft was scored, the
correction's on top of the offset where that is served:

    S = min(max(S + sum of omega (loss without it - loss with it), -B), B)

S is -B until the stratum has been refitted on 4096 labels: to be ahead of coefficients that still move proves little,
and by then the nats that a gate can lose are few per label. Were the law without the addition true, e^-B would bound
the chance that a run of labels opens the gate; B is 4 for the offset, which has no coefficients, and 8 for the head,
which has hundreds.

Each contribution is quantised once to int64 Q30 and then only added. Integer addition is associative: any grid, order
of rows, replay or split over ranks gives the same bits. |f| <= 40, p(1-p) <= 1/4 and omega <= 1 bound an entry by
400 * 2^30.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from av_triton.backend import register_ceiling, use_triton
from av_triton.ops._checks import INTEGERS, check_acceptance, check_vector
from av_triton.ops.head import HEAD, OFFSET, HeadState
from av_triton.ops.logit_max import INVALID
from av_triton.ops.refit import SUMS, C, G, count_labels, refit_reference, solve
from av_triton.ops.segmented_topk import UNSCORED
from av_triton.ops.select import Q30, gather_slots
from av_triton.settings import MAX_DRAFT_POSITIONS

LARGEST_ENTRY = 400  # 40² / 4
MAX_OFFSET = 4.0
GATES = (4 * Q30, 8 * Q30)  # bounds of EstimatorState.gates, nats
SETTLED = 4096  # labels behind a stratum's coefficients from which on its gates move
# Of a request's two sums, Q30, at which they stay: after 2^32 drafts at the least. One step adds 2^34 at most.
LARGEST_RESIDUAL = 1 << 62

# Rows of EstimatorState.counters, per position; EXPECTED in Q20, which holds 2^43 labels.
DRAFTED, ADMITTED, ACCEPTED, LABELLED, HITS, EXPECTED = range(6)
Q20 = 1 << 20
# Places in EstimatorState.clock.
TICKET, OBSERVED, CYCLE, REFITS = range(4)

_Q30 = tl.constexpr(float(Q30))
_Q20 = tl.constexpr(float(Q20))
_INVALID = tl.constexpr(INVALID)
_MAX_OFFSET = tl.constexpr(MAX_OFFSET)
_LARGEST_RESIDUAL = tl.constexpr(LARGEST_RESIDUAL)
_OFFSET_GATE, _HEAD_GATE = tl.constexpr(GATES[OFFSET]), tl.constexpr(GATES[HEAD])
_SETTLED = tl.constexpr(SETTLED * Q30)
_BLOCK = 64


def _block(positions: int) -> int:
    """Rows of a program's tile: with 16 positions, 64 rows spill."""
    return _BLOCK if positions <= 8 else _BLOCK // 2


class EstimatorState(NamedTuple):
    """Device state of an estimator. P: K rounded up to a power of two; S: strata."""

    features: torch.Tensor  # float32 [slots, P], logit(q_max)
    scores: torch.Tensor  # float32 [slots, P], as served; UNSCORED where no logits were seen since the last observation
    strata: torch.Tensor  # int32 [slots]
    offsets: torch.Tensor  # float32 [slots], added to the log-odds
    residuals: torch.Tensor  # int64 [slots, 2], Q30: sums of omega (y-p) and of omega p(1-p) since the slot's reset
    gates: torch.Tensor  # int64 [2, S], Q30 nats: offset and head; above 0: open
    gains: torch.Tensor  # int64 [2, S], of the running step
    slopes: torch.Tensor  # float32 [S]
    intercepts: torch.Tensor  # float32 [S, P]
    sums: torch.Tensor  # int64 [S, 6, P]
    labels: torch.Tensor  # int64 [S, P], Q30, of the cycles before this one
    counters: torch.Tensor  # int64 [6, P]
    clock: torch.Tensor  # int64 [4]
    # Of the draft distribution, known where the score at the same place is; None: not kept.
    entropies: torch.Tensor | None = None  # float32 [slots, P], nats
    gaps: torch.Tensor | None = None  # float32 [slots, P], log q_max - log q of the drawn token; NaN: token not known
    head: HeadState | None = None


def exact_labels_reference(acceptance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, omega) of acceptance probabilities [rows, K]; omega is 0 from a NaN on."""
    known = ~acceptance.isnan()
    y = torch.where(known, acceptance, 0.0).clamp(0.0, 1.0)
    before = torch.cat([torch.ones_like(y[:, :1]), y[:, :-1]], 1)
    return y, torch.where(known, before.cumprod(1), 0.0)


def labels_reference(
    features: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor,
    teach: torch.Tensor | None,
    acceptance: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, omega) of every draft, [rows, K] in the dtype of `features`; omega is 0 where it has no label."""
    k = torch.arange(features.shape[1], device=features.device)
    a = accepted[:, None]
    inside = (a >= 0) & (k < admitted[:, None]) & (features > INVALID)
    if teach is not None:
        inside &= teach[:, None].bool()
    if acceptance is None:
        y, omega = (k < a).to(features.dtype), (k <= a).to(features.dtype)
    else:
        y, omega = exact_labels_reference(acceptance.to(features.dtype))
    return y, torch.where(inside, omega, 0.0)


def entries_reference(
    features: torch.Tensor,
    y: torch.Tensor,
    omega: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    strata: torch.Tensor,
) -> torch.Tensor:
    """What each draft adds to the sums, int64 Q30 [rows, 6, K]; computed in the dtype of `features`."""
    w, b = slope.to(features.dtype)[strata][:, None], intercepts.to(features.dtype)[strata]
    p = 1.0 / (1.0 + torch.exp(-(w * features + b)))
    v, r = omega * (p * (1.0 - p)), omega * (y - p)
    entries = torch.stack([v * features * features, v * features, v, r * features, r, omega], 1)
    return (torch.where((omega > 0)[:, None], entries, 0.0) * Q30).to(torch.int64)


def offset_reference(residuals: torch.Tensor, prior: float) -> torch.Tensor:
    """Offsets float32 [...] of the sums int64 Q30 [..., 2]."""
    residual, information = residuals.float().unbind(-1)
    return (residual / (information + prior * Q30)).clamp(-MAX_OFFSET, MAX_OFFSET)


_OBSERVED = EstimatorState._fields.index("clock") + 1  # fields that `observe_kernel` takes, in their order


def accumulate_reference(
    features: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    strata: torch.Tensor | None = None,
    teach: torch.Tensor | None = None,
    acceptance: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `accumulate`; contributions in the dtype of `features`."""
    group = torch.zeros_like(accepted).long() if strata is None else strata.long()
    labels = labels_reference(features, accepted, admitted, teach, acceptance)
    entries = entries_reference(features, *labels, slope, intercepts, group)
    sums = torch.zeros(slope.shape[0], *entries.shape[1:], dtype=torch.int64, device=features.device)
    return sums.index_add_(0, group, entries)


@triton.jit
def _probability(x):
    """x clamped to [0, 1]; 0 for a NaN."""
    return tl.where(x > 0.0, tl.minimum(x, 1.0), 0.0)


@triton.jit
def _exact_labels(acceptance, row_stride, position_stride, columns, r, k, inside):
    """(y, omega) of a tile [rows, P], from a matrix with `columns` positions; beyond them omega is 0."""
    at = acceptance + r[:, None].to(tl.int64) * row_stride + k[None, :] * position_stride
    alpha = tl.load(at, mask=inside & (k < columns)[None, :], other=float("nan"))
    before = tl.load(at - position_stride, mask=inside & ((k > 0) & (k <= columns))[None, :], other=1.0)
    return _probability(alpha), tl.where(alpha == alpha, tl.cumprod(_probability(before), 1), 0.0)


def loss_reference(log_odds: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Expected log-loss in nats under the acceptance probability y."""
    return torch.nn.functional.softplus(log_odds) - y * log_odds


@triton.jit
def _loss(z, y):
    return tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))) - y * z


@triton.jit
def _add_gain(without, with_it, y, omega, stratum, gains, STRATA: tl.constexpr):
    """What an addition to the log-odds gains over a tile [rows, P], in nats, to gains[S]."""
    gain = (omega * (_loss(without, y) - _loss(with_it, y)) * _Q30).to(tl.int64)
    for s in tl.static_range(STRATA):
        tl.atomic_add(gains + s, tl.sum(tl.sum(tl.where((stratum == s)[:, None], gain, 0), 1), 0), sem="relaxed")


@triton.jit
def _move_gate(gate, gain, BOUND: tl.constexpr, settled):
    now = tl.load(gate)
    moved = tl.minimum(tl.maximum(now + tl.load(gain, cache_modifier=".cg"), -BOUND), BOUND)
    tl.store(gate, tl.where(settled, moved, now))
    tl.store(gain, 0)


@triton.jit
def _add_to_requests(information, residual, slot, real, offsets, residuals, PRIOR: tl.constexpr):
    """Add what a tile [rows, P] says of its requests to their sums, and store the offsets that follow."""
    at = residuals + 2 * slot
    r = tl.load(at, mask=real, other=0) + tl.sum((residual * _Q30).to(tl.int64), 1)
    v = tl.load(at + 1, mask=real, other=0) + tl.sum((information * _Q30).to(tl.int64), 1)
    r = tl.minimum(tl.maximum(r, -_LARGEST_RESIDUAL), _LARGEST_RESIDUAL)
    v = tl.minimum(v, _LARGEST_RESIDUAL)
    tl.store(at, r, mask=real)
    tl.store(at + 1, v, mask=real)
    o = r.to(tl.float32) / (v.to(tl.float32) + PRIOR * _Q30)
    tl.store(offsets + slot, tl.minimum(tl.maximum(o, -_MAX_OFFSET), _MAX_OFFSET), mask=real)


@triton.jit
def _add_sums(f, v, r, omega, these, out, k, mask):
    """Add the six Q30 sums of a tile [rows, P], where `these`, to out[6, P]."""
    P: tl.constexpr = k.shape[0]
    v = tl.where(these, v, 0.0)
    r = tl.where(these, r, 0.0)
    omega = tl.where(these, omega, 0.0)
    tl.atomic_add(out + k, tl.sum((v * f * f * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + P + k, tl.sum((v * f * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + 2 * P + k, tl.sum((v * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + 3 * P + k, tl.sum((r * f * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + 4 * P + k, tl.sum((r * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + 5 * P + k, tl.sum((omega * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")


@triton.jit
def _count(counters, row: tl.constexpr, what, k, mask):
    P: tl.constexpr = k.shape[0]
    tl.atomic_add(counters + row * P + k, tl.sum(what.to(tl.int64), 0), mask=mask, sem="relaxed")


@triton.jit(
    do_not_specialize=["row_stride", "position_stride", "columns", "rows", "num_slots", "K", "interval"],
    do_not_specialize_on_alignment=["slots", "accepted", "admitted", "teach", "acceptance"],
)
def observe_kernel(
    features, scores, strata, offsets, residuals, gates, gains, slopes, intercepts, sums, labels, counters, clock,
    corrections, omegas, head_residuals, slot_admitted, slot_drafts, slots, accepted, admitted, teach,
    acceptance, row_stride, position_stride, columns, rows, num_slots, K, interval,
    RIDGE: tl.constexpr, DAMPING: tl.constexpr, MEMORY: tl.constexpr, MAX_DW: tl.constexpr, MAX_DB: tl.constexpr,
    PRIOR: tl.constexpr, STRATA: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / BLOCK),). The last program advances the cycle and, when it is full, refits every stratum."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, P)
    mask = k < K
    cycle = tl.load(clock + 2) + 1  # ahead of the ticket: every thread reads it before one of them writes it
    slot, real = gather_slots(slots, r, r < rows, num_slots)
    a = tl.load(accepted + r, mask=real, other=-1).to(tl.int32)
    drafted = tl.zeros([BLOCK], tl.int32)
    if slot_drafts is not None:
        drafted = tl.load(slot_drafts + slot, mask=real, other=0)
    if admitted is not None:
        v = tl.minimum(tl.load(admitted + r, mask=real, other=0).to(tl.int32), K)
    else:
        v = tl.load(slot_admitted + slot, mask=real, other=0)
    taught = real & (a >= 0)
    if teach is not None:
        taught = taught & (tl.load(teach + r, mask=real, other=0).to(tl.int32) != 0)
    stratum = tl.load(strata + slot, mask=real, other=0)

    verified = real[:, None] & (k[None, :] < v[:, None]) & mask[None, :]
    at = slot[:, None] * P + k[None, :]
    f = tl.load(features + at, mask=verified, other=_INVALID)
    served = tl.load(scores + at, mask=verified, other=-1.0)
    inside = verified & taught[:, None] & (f > _INVALID) & (served >= 0.0)
    hit = k[None, :] < a[:, None]
    labelled = inside & (k[None, :] <= a[:, None])
    _count(counters, 0, real[:, None] & (k[None, :] < drafted[:, None]), k, mask)
    _count(counters, 1, verified, k, mask)
    _count(counters, 2, verified & hit, k, mask)
    _count(counters, 3, labelled, k, mask)
    _count(counters, 4, labelled & hit, k, mask)
    _count(counters, 5, tl.where(labelled, served, 0.0) * _Q20, k, mask)

    f = tl.where(inside, f, 0.0)
    y, omega = tl.where(hit, 1.0, 0.0), tl.where(labelled, 1.0, 0.0)
    if acceptance is not None:
        y, omega = _exact_labels(acceptance, row_stride, position_stride, columns, r, k, verified)
    omega = tl.where(inside, omega, 0.0)
    w = tl.load(slopes + stratum, mask=real, other=0.0)
    b = tl.load(intercepts + stratum[:, None] * P + k[None, :], mask=inside, other=0.0)
    z = w[:, None] * f + b
    p = 1.0 / (1.0 + tl.exp(-z))
    information = omega * (p * (1.0 - p))
    residual = omega * (y - p)
    for s in tl.static_range(STRATA):
        _add_sums(f, information, residual, omega, (stratum == s)[:, None], sums + s * 6 * P, k, mask)
    if PRIOR is not None:
        offset = tl.load(offsets + slot, mask=real, other=0.0)
        _add_gain(z, z + offset[:, None], y, omega, stratum, gains, STRATA)
        z += tl.where(tl.load(gates + stratum, mask=real, other=0) > 0, offset, 0.0)[:, None]
        tl.debug_barrier()  # every thread has read the offsets
        _add_to_requests(information, residual, slot, real, offsets, residuals, PRIOR)
    if corrections is not None:
        below = z
        z += tl.load(corrections + at, mask=inside, other=0.0)
        _add_gain(below, z, y, omega, stratum, gains + STRATA, STRATA)
        everywhere = real[:, None] & mask[None, :]
        tl.store(omegas + at, omega, mask=everywhere)
        tl.store(head_residuals + at, omega * (y - 1.0 / (1.0 + tl.exp(-z))), mask=everywhere)

    tl.store(scores + at, -1.0, mask=real[:, None] & mask[None, :])
    if slot_admitted is not None:
        tl.store(slot_admitted + slot, 0, mask=real)
        tl.store(slot_drafts + slot, 0, mask=real)

    tl.debug_barrier()
    if tl.atomic_add(clock, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(clock, 0)
        tl.store(clock + 1, tl.load(clock + 1) + 1)
        if (PRIOR is not None) or (corrections is not None):
            for s in tl.static_range(STRATA):
                settled = tl.sum(tl.minimum(tl.load(labels + s * P + k), _SETTLED), 0) >= _SETTLED
                _move_gate(gates + s, gains + s, _OFFSET_GATE, settled)
                _move_gate(gates + STRATA + s, gains + STRATA + s, _HEAD_GATE, settled)
        if cycle >= interval:
            for s in tl.static_range(STRATA):
                at_s = s * P
                solve(
                    sums + 6 * at_s, labels + at_s, slopes + s, intercepts + at_s, K,
                    RIDGE, DAMPING, MEMORY, MAX_DW, MAX_DB, P,
                )  # fmt: skip
            tl.store(clock + 3, tl.load(clock + 3) + 1)
            cycle = tl.zeros([], tl.int64)
        tl.store(clock + 2, cycle)


def observe(
    state: EstimatorState,
    slot_admitted: torch.Tensor | None,
    slot_drafts: torch.Tensor | None,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor | None,
    teach: torch.Tensor | None,
    acceptance: torch.Tensor | None,
    positions: int,
    interval: int,
    ridge: float,
    damping: float,
    memory: float,
    max_slope_step: float,
    max_intercept_step: float,
    offset_prior: float | None,
) -> None:
    """Learn from one verified step: one launch that accumulates, counts, and refits every `interval` calls; with a
    head it leaves the labels for `head.learn`.

    Args:
        slot_admitted, slot_drafts: int32 [slots], what the last plan recorded; cleared, so that a verdict counts once.
        slots: int32 or int64 [rows]. accepted: integers [rows], -1 for a row without a verdict.
        admitted: integers [rows], or None for `slot_admitted`. teach: bool [rows] or None for all.
        acceptance: float32 [rows, k <= positions] of any strides, or None: verdicts alone.
    """
    if not use_triton(slots.device):
        _observe_torch(
            state, slot_admitted, slot_drafts, slots, accepted, admitted, teach, acceptance, positions, interval,
            (ridge, damping, max_slope_step, max_intercept_step), memory, offset_prior,
        )  # fmt: skip
        return
    block, head = _block(state.features.shape[1]), state.head
    drafts = (None, None, None) if head is None else (head.corrections, head.omegas, head.residuals)
    strides, columns = ((0, 0), 0) if acceptance is None else (acceptance.stride(), acceptance.shape[1])
    observe_kernel[(max(1, triton.cdiv(slots.shape[0], block)),)](
        *state[:_OBSERVED], *drafts, slot_admitted, slot_drafts, slots, accepted, admitted, teach, acceptance, *strides,
        columns, slots.shape[0], state.features.shape[0], positions, interval, RIDGE=ridge, DAMPING=damping,
        MEMORY=memory, MAX_DW=max_slope_step, MAX_DB=max_intercept_step, PRIOR=offset_prior,
        STRATA=state.slopes.shape[0], P=state.features.shape[1], BLOCK=block,
        **register_ceiling(),
    )  # fmt: skip


def _observe_torch(
    state: EstimatorState,
    slot_admitted: torch.Tensor | None,
    slot_drafts: torch.Tensor | None,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor | None,
    teach: torch.Tensor | None,
    acceptance: torch.Tensor | None,
    positions: int,
    interval: int,
    newton: tuple[float, float, float, float],
    memory: float,
    offset_prior: float | None,
) -> None:
    real = (slots >= 0) & (slots < state.features.shape[0])
    at = slots[real].long()
    a = accepted[real].long()
    zeros = torch.zeros_like(a)
    v = admitted[real].long().clamp_max(positions) if admitted is not None else zeros
    if admitted is None and slot_admitted is not None:
        v = slot_admitted[at].long()
    drafted = zeros if slot_drafts is None else slot_drafts[at].long()
    taught = None if teach is None else teach[real]
    alpha = None
    if acceptance is not None:
        alpha = torch.nn.functional.pad(acceptance[real], (0, positions - acceptance.shape[1]), value=torch.nan)

    k = torch.arange(positions, device=slots.device)
    served = state.scores[at, :positions]
    f = torch.where(served >= 0, state.features[at, :positions], INVALID)
    strata = state.strata[at].long()
    y, omega = labels_reference(f, a, v, taught, alpha)
    intercepts = state.intercepts[:, :positions]
    entries = entries_reference(f, y, omega, state.slopes, intercepts, strata)
    state.sums[:, :, :positions].index_add_(0, strata, entries)
    z = state.slopes[strata][:, None] * f + intercepts[strata]
    if offset_prior is not None:
        offset = state.offsets[at, None]
        served_offset = torch.where(state.gates[OFFSET, strata, None] > 0, offset, 0.0)
        _gain_torch(state, OFFSET, strata, z, z + offset, y, omega)
        z = z + served_offset
        pairs = state.residuals[at] + entries[:, [G, C]].sum(2)
        state.residuals[at] = pairs.clamp(-LARGEST_RESIDUAL, LARGEST_RESIDUAL)
        state.offsets[at] = offset_reference(state.residuals[at], offset_prior)
    if state.head is not None:
        without, z = z, z + state.head.corrections[at, :positions]
        _gain_torch(state, HEAD, strata, without, z, y, omega)
        state.head.omegas[at, :positions] = omega
        state.head.residuals[at, :positions] = omega * (y - 1.0 / (1.0 + torch.exp(-z)))
    verified = k < v[:, None]
    hit = k < a[:, None]
    labelled = verified & (k <= a[:, None]) & (a >= 0)[:, None] & (f > INVALID)
    if taught is not None:
        labelled &= taught[:, None].bool()
    expected = (torch.where(labelled, served, 0.0) * float(Q20)).to(torch.int64)
    for row, what in enumerate((k < drafted[:, None], verified, verified & hit, labelled, labelled & hit, expected)):
        state.counters[row, :positions] += what.sum(0)

    state.scores[at, :positions] = UNSCORED
    if slot_admitted is not None and slot_drafts is not None:
        slot_admitted[at] = 0
        slot_drafts[at] = 0
    state.clock[OBSERVED] += 1
    state.clock[CYCLE] += 1
    if int(state.clock[CYCLE]) >= interval:
        sums, labels = state.sums[:, :, :positions], state.labels[:, :positions]
        w, b = refit_reference(
            sums, state.slopes, state.intercepts[:, :positions], *newton, before=labels, memory=memory
        )
        count_labels(labels, sums)
        state.slopes.copy_(w)
        state.intercepts[:, :positions] = b
        state.sums.zero_()
        state.clock[CYCLE] = 0
        state.clock[REFITS] += 1


def settled(labels: torch.Tensor) -> torch.Tensor:
    """bool [S]: the strata whose gates move, by their labels int64 Q30 [S, P]."""
    return labels.clamp(max=SETTLED * Q30).sum(1) >= SETTLED * Q30


def close_unsettled(gates: torch.Tensor, labels: torch.Tensor) -> None:
    """Gates int64 [gate, S] of strata with too few labels: closed, for they could not close by themselves."""
    bounds = torch.tensor(GATES, device=gates.device)[:, None]
    gates.copy_(torch.where(settled(labels), gates, -bounds))


def _gain_torch(
    state: EstimatorState,
    gate: int,
    strata: torch.Tensor,
    without: torch.Tensor,
    with_it: torch.Tensor,
    y: torch.Tensor,
    omega: torch.Tensor,
) -> None:
    """Move a gate by what its addition to the log-odds gains."""
    gain = torch.where(omega > 0, omega * (loss_reference(without, y) - loss_reference(with_it, y)), 0.0)
    moved = state.gates[gate].index_add(0, strata, (gain * Q30).to(torch.int64).sum(1))
    moved = moved.clamp(-GATES[gate], GATES[gate])
    state.gates[gate] = torch.where(settled(state.labels), moved, state.gates[gate])


@triton.jit(do_not_specialize=["n", "num_slots"], do_not_specialize_on_alignment=["slots", "new_strata"])
def reset_kernel(
    slots, new_strata, features, scores, strata, offsets, residuals, entropies, gaps, survival, slot_admitted,
    slot_drafts, n, num_slots, S,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, real = gather_slots(slots, r, r < n, num_slots)
    stratum = tl.zeros([BLOCK], tl.int32)
    if new_strata is not None:
        stratum = tl.minimum(tl.maximum(tl.load(new_strata + r, mask=real, other=0).to(tl.int32), 0), S - 1)
    tl.store(strata + slot, stratum, mask=real)
    k = tl.arange(0, P)
    at = slot[:, None] * P + k[None, :]
    tl.store(features + at, _INVALID, mask=real[:, None] & (k < P)[None, :])
    tl.store(scores + at, -1.0, mask=real[:, None] & (k < P)[None, :])
    tl.store(offsets + slot, 0.0, mask=real)
    zero = tl.zeros([BLOCK], tl.int64)
    tl.store(residuals + 2 * slot, zero, mask=real)
    tl.store(residuals + 2 * slot + 1, zero, mask=real)
    if entropies is not None:
        tl.store(entropies + at, 0.0, mask=real[:, None] & (k < P)[None, :])
    if gaps is not None:
        tl.store(gaps + at, float("nan"), mask=real[:, None] & (k < P)[None, :])
    if survival is not None:
        tl.store(survival + slot * P, -1.0, mask=real)
        tl.store(slot_admitted + slot, 0, mask=real)
        tl.store(slot_drafts + slot, 0, mask=real)


def reset(
    state: EstimatorState,
    survival: torch.Tensor | None,
    slot_admitted: torch.Tensor | None,
    slot_drafts: torch.Tensor | None,
    slots: torch.Tensor,
    strata: torch.Tensor | None,
) -> None:
    """Forget what the slots' former requests left behind, and note the strata of the new ones (None: stratum 0)."""
    num_slots, P = state.features.shape
    if use_triton(slots.device):
        if slots.shape[0]:
            reset_kernel[(triton.cdiv(slots.shape[0], _BLOCK),)](
                slots, strata, state.features, state.scores, state.strata, state.offsets, state.residuals,
                state.entropies, state.gaps, survival,
                slot_admitted, slot_drafts, slots.shape[0], num_slots, state.slopes.shape[0], P=P, BLOCK=_BLOCK,
            )  # fmt: skip
        return
    real = (slots >= 0) & (slots < num_slots)
    at = slots[real].long()
    state.strata[at] = 0 if strata is None else strata[real].to(torch.int32).clamp(0, state.slopes.shape[0] - 1)
    state.features[at] = INVALID
    state.scores[at] = UNSCORED
    state.offsets[at] = 0.0
    state.residuals[at] = 0
    if state.entropies is not None:
        state.entropies[at] = 0.0
    if state.gaps is not None:
        state.gaps[at] = torch.nan
    if survival is not None and slot_admitted is not None and slot_drafts is not None:
        survival[at, 0] = UNSCORED
        slot_admitted[at] = 0
        slot_drafts[at] = 0


@triton.jit(do_not_specialize=["rows", "K"])
def accumulate_kernel(
    features, accepted, admitted, slope, intercepts, strata, teach, acceptance, sums, rows, K,
    STRATA: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, P)
    live = r < rows
    a = tl.load(accepted + r, mask=live, other=-1).to(tl.int32)
    v = tl.load(admitted + r, mask=live, other=0).to(tl.int32)
    taught = live & (a >= 0)
    if teach is not None:
        taught = taught & (tl.load(teach + r, mask=live, other=0).to(tl.int32) != 0)
    stratum = tl.zeros([BLOCK], tl.int32)
    if strata is not None:
        stratum = tl.load(strata + r, mask=live, other=0).to(tl.int32)
    verified = taught[:, None] & (k[None, :] < v[:, None]) & (k < K)[None, :]
    f = tl.load(features + r[:, None].to(tl.int64) * K + k[None, :], mask=verified, other=_INVALID)
    inside = verified & (f > _INVALID)
    f = tl.where(inside, f, 0.0)
    y = tl.where(k[None, :] < a[:, None], 1.0, 0.0)
    omega = tl.where(k[None, :] <= a[:, None], 1.0, 0.0)
    if acceptance is not None:
        y, omega = _exact_labels(acceptance, K, 1, K, r, k, verified)
    omega = tl.where(inside, omega, 0.0)
    w = tl.load(slope + stratum, mask=live, other=0.0)
    b = tl.load(intercepts + stratum[:, None] * K + k[None, :], mask=inside, other=0.0)
    p = 1.0 / (1.0 + tl.exp(-(w[:, None] * f + b)))
    information = omega * (p * (1.0 - p))
    residual = omega * (y - p)
    for s in tl.static_range(STRATA):
        _add_sums(f, information, residual, omega, (stratum == s)[:, None], sums + s * 6 * P, k, k < K)


@torch.library.custom_op("av_triton::accumulate", mutates_args=())
def _accumulate(
    features: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    strata: torch.Tensor | None,
    teach: torch.Tensor | None,
    acceptance: torch.Tensor | None = None,
) -> torch.Tensor:
    if not use_triton(features.device):
        return accumulate_reference(features, accepted, admitted, slope, intercepts, strata, teach, acceptance)
    rows, positions = features.shape
    P = triton.next_power_of_2(positions)
    sums = torch.zeros(slope.shape[0], SUMS, P, dtype=torch.int64, device=features.device)
    if rows:
        accumulate_kernel[(triton.cdiv(rows, _block(P)),)](
            features.contiguous(), accepted, admitted, slope.contiguous(), intercepts.contiguous(), strata, teach,
            None if acceptance is None else acceptance.contiguous(), sums, rows, positions,
            STRATA=slope.shape[0], P=P, BLOCK=_block(P),
            **register_ceiling(),
        )  # fmt: skip
    return sums[:, :, :positions].contiguous()


@_accumulate.register_fake
def _(
    features: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    strata: torch.Tensor | None,
    teach: torch.Tensor | None,
    acceptance: torch.Tensor | None = None,
) -> torch.Tensor:
    return features.new_empty(slope.shape[0], SUMS, features.shape[1], dtype=torch.int64)


def accumulate(
    features: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    strata: torch.Tensor | None = None,
    teach: torch.Tensor | None = None,
    acceptance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hessian and gradient sums of the labelled drafts of one step (see the module's formulas). Sums of several steps
    or ranks are added as they are: integers, so in any order.

    Args:
        features: float32 [rows, K]; -40 (invalid) teaches nothing.
        accepted: int32 or int64 [rows], accepted drafts without the bonus; -1: no verdict.
        admitted: int32 or int64 [rows], drafts that were verified.
        slope: float32 [strata]. intercepts: float32 [strata, K].
        strata: int32 [rows], in range; None: stratum 0. teach: bool [rows]; False rows are left out.
        acceptance: float32 [rows, K], acceptance probabilities of the verified drafts; None: verdicts are the labels.

    Returns:
        int64 [strata, 6, K]: Q30 sums of omega times p(1-p)f², p(1-p)f, p(1-p), (y-p)f, y-p and 1.
    """
    if features.dtype != torch.float32 or features.dim() != 2 or not 1 <= features.shape[1] <= MAX_DRAFT_POSITIONS:
        raise ValueError(
            f"features are {features.dtype} {tuple(features.shape)}: give float32 [rows, K], K <= {MAX_DRAFT_POSITIONS}"
        )
    rows, positions = features.shape
    check_vector("accepted", accepted, rows, INTEGERS, features.device)
    check_vector("admitted", admitted, rows, INTEGERS, features.device)
    if slope.dim() != 1 or intercepts.shape != (slope.shape[0], positions):
        raise ValueError(
            f"slope {tuple(slope.shape)} and intercepts {tuple(intercepts.shape)}: give [strata] and "
            f"[strata, {positions}]"
        )
    if {slope.dtype, intercepts.dtype} != {torch.float32} or {slope.device, intercepts.device} != {features.device}:
        raise ValueError(
            f"slope is {slope.dtype} on {slope.device}, intercepts {intercepts.dtype} on {intercepts.device}: "
            f"give float32 on {features.device}"
        )
    if strata is not None:
        check_vector("strata", strata, rows, (torch.int32,), features.device)
    if teach is not None:
        check_vector("teach", teach, rows, (torch.bool,), features.device)
    if acceptance is not None:
        check_acceptance(acceptance, rows, positions, features.device)
        if acceptance.shape[1] != positions:
            raise ValueError(
                f"acceptance has shape {tuple(acceptance.shape)}: give {(rows, positions)}, as the features"
            )
    return _accumulate(features, accepted, admitted, slope, intercepts, strata, teach, acceptance)
