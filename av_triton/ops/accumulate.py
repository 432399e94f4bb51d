"""labelled drafts -> sums of the log-loss's Hessian and gradient, and, when a cycle is full, the Newton step.

Draft k of a request with a accepted of v admitted drafts is labelled where k <= a and k < v: y = 1 if k < a, else 0
(the first rejection); what was trimmed or comes after a rejection has no label. With p recomputed from the stored
feature f and the coefficients in force, each labelled draft adds, per stratum and position,

    p(1-p) f²    p(1-p) f    p(1-p)    (y-p) f    y-p    1

Each contribution is quantised once to int64 Q30 and then only added. Integer addition is associative: any grid, order
of rows, replay or split over ranks gives the same bits. |f| <= 40 and p(1-p) <= 1/4 bound an entry by 400 * 2^30.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from av_triton.backend import register_ceiling, use_triton
from av_triton.ops._checks import INTEGERS, check_vector
from av_triton.ops.logit_max import INVALID
from av_triton.ops.refit import SUMS, N, refit_reference, solve
from av_triton.ops.segmented_topk import UNSCORED
from av_triton.ops.select import Q30, gather_slots
from av_triton.settings import MAX_DRAFT_POSITIONS

LARGEST_ENTRY = 400  # 40² / 4

# Rows of EstimatorState.counters, per position; EXPECTED in Q30.
DRAFTED, ADMITTED, ACCEPTED, LABELLED, HITS, EXPECTED = range(6)
# Places in EstimatorState.clock.
TICKET, OBSERVED, CYCLE, REFITS = range(4)

_Q30 = tl.constexpr(float(Q30))
_INVALID = tl.constexpr(INVALID)
_BLOCK = 64


def _block(positions: int) -> int:
    """Rows of a program's tile: with 16 positions, 64 rows spill."""
    return _BLOCK if positions <= 8 else _BLOCK // 2


class EstimatorState(NamedTuple):
    """Device state of an estimator. P: K rounded up to a power of two; S: strata."""

    features: torch.Tensor  # float32 [slots, P], logit(q_max)
    scores: torch.Tensor  # float32 [slots, P], as served; UNSCORED where no logits were seen since the last observation
    strata: torch.Tensor  # int32 [slots]
    slopes: torch.Tensor  # float32 [S]
    intercepts: torch.Tensor  # float32 [S, P]
    sums: torch.Tensor  # int64 [S, 6, P]
    labels: torch.Tensor  # int64 [S, P], of the cycles before this one
    counters: torch.Tensor  # int64 [6, P]
    clock: torch.Tensor  # int64 [4]
    # Of the draft distribution, known where the score at the same place is; None: not kept.
    entropies: torch.Tensor | None = None  # float32 [slots, P], nats
    gaps: torch.Tensor | None = None  # float32 [slots, P], log q_max - log q of the drawn token; NaN: token not known


def accumulate_reference(
    features: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    strata: torch.Tensor | None = None,
    teach: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `accumulate`; contributions in the dtype of `features`."""
    positions = features.shape[1]
    group = torch.zeros_like(accepted).long() if strata is None else strata.long()
    k = torch.arange(positions, device=features.device)
    a = accepted[:, None]
    labelled = (a >= 0) & (k <= a) & (k < admitted[:, None]) & (features > INVALID)
    if teach is not None:
        labelled &= teach[:, None].bool()
    w, b = slope.to(features.dtype)[group][:, None], intercepts.to(features.dtype)[group]
    p = 1.0 / (1.0 + torch.exp(-(w * features + b)))
    v = p * (1.0 - p)
    r = (k < a).to(p.dtype) - p
    entries = torch.stack([v * features * features, v * features, v, r * features, r, torch.ones_like(p)], 1)
    scale = torch.tensor([Q30] * 5 + [1], dtype=p.dtype, device=p.device)[:, None]
    quantised = (torch.where(labelled[:, None], entries, 0.0) * scale).to(torch.int64)
    sums = torch.zeros(slope.shape[0], SUMS, positions, dtype=torch.int64, device=features.device)
    return sums.index_add_(0, group, quantised)


@triton.jit
def _labelled_sums(f, y, p, labelled, out, k, mask):
    """Add the six Q30 sums of a tile [rows, P] to out[6, P]."""
    P: tl.constexpr = k.shape[0]
    v = tl.where(labelled, p * (1.0 - p), 0.0)
    r = tl.where(labelled, y - p, 0.0)
    tl.atomic_add(out + k, tl.sum((v * f * f * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + P + k, tl.sum((v * f * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + 2 * P + k, tl.sum((v * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + 3 * P + k, tl.sum((r * f * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + 4 * P + k, tl.sum((r * _Q30).to(tl.int64), 0), mask=mask, sem="relaxed")
    tl.atomic_add(out + 5 * P + k, tl.sum(labelled.to(tl.int64), 0), mask=mask, sem="relaxed")


@triton.jit
def _count(counters, row: tl.constexpr, what, k, mask):
    P: tl.constexpr = k.shape[0]
    tl.atomic_add(counters + row * P + k, tl.sum(what.to(tl.int64), 0), mask=mask, sem="relaxed")


@triton.jit(
    do_not_specialize=["rows", "num_slots", "K", "interval"],
    do_not_specialize_on_alignment=["slots", "accepted", "admitted", "teach"],
)
def observe_kernel(
    features, scores, strata, slopes, intercepts, sums, labels, counters, clock, slot_admitted, slot_drafts,
    slots, accepted, admitted, teach, rows, num_slots, K, interval,
    RIDGE: tl.constexpr, DAMPING: tl.constexpr, MEMORY: tl.constexpr, MAX_DW: tl.constexpr, MAX_DB: tl.constexpr,
    STRATA: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
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
    labelled = verified & taught[:, None] & (k[None, :] <= a[:, None]) & (f > _INVALID) & (served >= 0.0)
    f = tl.where(labelled, f, 0.0)
    y = tl.where(k[None, :] < a[:, None], 1.0, 0.0)
    w = tl.load(slopes + stratum, mask=real, other=0.0)
    b = tl.load(intercepts + stratum[:, None] * P + k[None, :], mask=labelled, other=0.0)
    p = 1.0 / (1.0 + tl.exp(-(w[:, None] * f + b)))
    for s in tl.static_range(STRATA):
        _labelled_sums(f, y, p, labelled & (stratum == s)[:, None], sums + s * 6 * P, k, mask)

    _count(counters, 0, real[:, None] & (k[None, :] < drafted[:, None]), k, mask)
    _count(counters, 1, verified, k, mask)
    _count(counters, 2, verified & (k[None, :] < a[:, None]), k, mask)
    _count(counters, 3, labelled, k, mask)
    _count(counters, 4, labelled & (y > 0.0), k, mask)
    _count(counters, 5, tl.where(labelled, served, 0.0) * _Q30, k, mask)

    tl.store(scores + at, -1.0, mask=real[:, None] & mask[None, :])
    if slot_admitted is not None:
        tl.store(slot_admitted + slot, 0, mask=real)
        tl.store(slot_drafts + slot, 0, mask=real)

    tl.debug_barrier()
    if tl.atomic_add(clock, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(clock, 0)
        tl.store(clock + 1, tl.load(clock + 1) + 1)
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
    positions: int,
    interval: int,
    ridge: float,
    damping: float,
    memory: float,
    max_slope_step: float,
    max_intercept_step: float,
) -> None:
    """Learn from one verified step: one launch that accumulates, counts, and refits every `interval` calls.

    Args:
        slot_admitted, slot_drafts: int32 [slots], what the last plan recorded; cleared, so that a verdict counts once.
        slots: int32 or int64 [rows]. accepted: integers [rows], -1 for a row without a verdict.
        admitted: integers [rows], or None for `slot_admitted`. teach: bool [rows] or None for all.
    """
    if not use_triton(slots.device):
        _observe_torch(
            state, slot_admitted, slot_drafts, slots, accepted, admitted, teach, positions, interval,
            (ridge, damping, max_slope_step, max_intercept_step), memory,
        )  # fmt: skip
        return
    block = _block(state.features.shape[1])
    observe_kernel[(max(1, triton.cdiv(slots.shape[0], block)),)](
        state.features, state.scores, state.strata, state.slopes, state.intercepts, state.sums, state.labels,
        state.counters, state.clock, slot_admitted, slot_drafts, slots, accepted, admitted, teach, slots.shape[0],
        state.features.shape[0], positions, interval, RIDGE=ridge, DAMPING=damping, MEMORY=memory,
        MAX_DW=max_slope_step, MAX_DB=max_intercept_step, STRATA=state.slopes.shape[0], P=state.features.shape[1],
        BLOCK=block,
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
    positions: int,
    interval: int,
    newton: tuple[float, float, float, float],
    memory: float,
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

    k = torch.arange(positions, device=slots.device)
    served = state.scores[at, :positions]
    f = torch.where(served >= 0, state.features[at, :positions], INVALID)
    strata = state.strata[at]
    state.sums[:, :, :positions] += accumulate_reference(
        f, a, v, state.slopes, state.intercepts[:, :positions], strata, taught
    )
    verified = k < v[:, None]
    hit = k < a[:, None]
    labelled = verified & (k <= a[:, None]) & (a >= 0)[:, None] & (f > INVALID)
    if taught is not None:
        labelled &= taught[:, None].bool()
    expected = (torch.where(labelled, served, 0.0) * float(Q30)).to(torch.int64)
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
        labels += sums[:, N]
        state.slopes.copy_(w)
        state.intercepts[:, :positions] = b
        state.sums.zero_()
        state.clock[CYCLE] = 0
        state.clock[REFITS] += 1


@triton.jit(do_not_specialize=["n", "num_slots"], do_not_specialize_on_alignment=["slots", "new_strata"])
def reset_kernel(
    slots, new_strata, features, scores, strata, entropies, gaps, survival, slot_admitted, slot_drafts, n, num_slots, S,
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
                slots, strata, state.features, state.scores, state.strata, state.entropies, state.gaps, survival,
                slot_admitted, slot_drafts, slots.shape[0], num_slots, state.slopes.shape[0], P=P, BLOCK=_BLOCK,
            )  # fmt: skip
        return
    real = (slots >= 0) & (slots < num_slots)
    at = slots[real].long()
    state.strata[at] = 0 if strata is None else strata[real].to(torch.int32).clamp(0, state.slopes.shape[0] - 1)
    state.features[at] = INVALID
    state.scores[at] = UNSCORED
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
    features, accepted, admitted, slope, intercepts, strata, teach, sums, rows, K,
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
    inside = taught[:, None] & (k[None, :] < v[:, None]) & (k[None, :] <= a[:, None]) & (k < K)[None, :]
    f = tl.load(features + r[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=_INVALID)
    labelled = inside & (f > _INVALID)
    f = tl.where(labelled, f, 0.0)
    y = tl.where(k[None, :] < a[:, None], 1.0, 0.0)
    w = tl.load(slope + stratum, mask=live, other=0.0)
    b = tl.load(intercepts + stratum[:, None] * K + k[None, :], mask=labelled, other=0.0)
    p = 1.0 / (1.0 + tl.exp(-(w[:, None] * f + b)))
    for s in tl.static_range(STRATA):
        _labelled_sums(f, y, p, labelled & (stratum == s)[:, None], sums + s * 6 * P, k, k < K)


@torch.library.custom_op("av_triton::accumulate", mutates_args=())
def _accumulate(
    features: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    strata: torch.Tensor | None,
    teach: torch.Tensor | None,
) -> torch.Tensor:
    if not use_triton(features.device):
        return accumulate_reference(features, accepted, admitted, slope, intercepts, strata, teach)
    rows, positions = features.shape
    P = triton.next_power_of_2(positions)
    sums = torch.zeros(slope.shape[0], SUMS, P, dtype=torch.int64, device=features.device)
    if rows:
        accumulate_kernel[(triton.cdiv(rows, _block(P)),)](
            features.contiguous(), accepted, admitted, slope.contiguous(), intercepts.contiguous(), strata, teach,
            sums, rows, positions, STRATA=slope.shape[0], P=P, BLOCK=_block(P),
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
) -> torch.Tensor:
    """Hessian and gradient sums of the labelled drafts of one step (see the module's formulas). Sums of several steps
    or ranks are added as they are: integers, so in any order.

    Args:
        features: float32 [rows, K]; -40 (invalid) teaches nothing.
        accepted: int32 or int64 [rows], accepted drafts without the bonus; -1: no verdict.
        admitted: int32 or int64 [rows], drafts that were verified.
        slope: float32 [strata]. intercepts: float32 [strata, K].
        strata: int32 [rows], in range; None: stratum 0. teach: bool [rows]; False rows are left out.

    Returns:
        int64 [strata, 6, K]: Q30 sums of p(1-p)f², p(1-p)f, p(1-p), (y-p)f, y-p, and the number of labels.
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
    return _accumulate(features, accepted, admitted, slope, intercepts, strata, teach)
