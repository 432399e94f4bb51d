"""One launch of a plan: survival, exploration and segmented top-k over the batch, state kept by slot.

For every real row (slot in range) with d drafts:

    s[k]  = product of the scores up to k            an unscored draft counts as certain
    first: rows chosen by the exploration schedule, and rows with an unscored draft, at full depth
    then:  the largest s, ties by (position, row), until the segment's budget is used up
    stored[slot] = s                                 for the budgets of later steps
    cu_verify    = prefix sums of (admitted + 1) over real rows, of 0 over padding rows

Beyond d the stored survival goes on with the last conditional score, so that a depth that was cut can grow again. A row
with an unscored draft stores "unknown" (-1) and later counts at the mean survival of the rows planned last.
"""

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from av_triton.backend import register_ceiling, use_triton
from av_triton.ops.segmented_topk import (
    _FORCED,
    ENOUGH,
    admit,
    admit_reference,
    explored_rows,
    segment_bounds,
    segment_offsets,
)

Q30 = 1 << 30
VERIFY_ALL = 1 << 30  # a budget that no batch exhausts
UNKNOWN = -1.0

# Places in PlanState.counters.
TICKET, STEPS, EXPLORED, BYPASSED = range(4)

_Q30 = tl.constexpr(float(Q30))


class PlanState(NamedTuple):
    """Device state of a planner. P: K rounded up to a power of two."""

    survival: torch.Tensor  # float32 [slots, P]; UNKNOWN in column 0 where nothing is stored
    admitted: torch.Tensor  # int32 [slots], of the last plan, until it is observed
    drafts: torch.Tensor  # int32 [slots], of the last plan, until it is observed
    mean: torch.Tensor  # float32 [P], mean survival of the rows planned last; UNKNOWN before the first
    sums: torch.Tensor  # int64 [P + 1], Q30 survivals and rows of the running plan
    counters: torch.Tensor  # int64 [4]


class PlanOutput(NamedTuple):
    """Persistent outputs of a planner; S segments at most as many as rows."""

    admitted: torch.Tensor  # int32 [rows]
    cu_verify: torch.Tensor  # int32 [rows + 1]
    budget: torch.Tensor  # int32 [S]
    proposal: torch.Tensor  # int32 [S]
    depth: torch.Tensor  # int32 [S]
    bypass: torch.Tensor  # int32 [S]


@triton.jit
def gather_slots(slots, r, live, num_slots):
    slot = tl.load(slots + r, mask=live, other=-1).to(tl.int64)
    return slot, live & (slot >= 0) & (slot < num_slots)


@triton.jit
def gather_depth(drafts, r, real, K):
    depth = tl.where(real, K, 0)
    if drafts is not None:
        depth = tl.minimum(tl.maximum(tl.load(drafts + r, mask=real, other=0).to(tl.int32), 0), K)
    return depth


@triton.jit(
    do_not_specialize=["rows", "num_slots", "K", "budget_value", "non_draft_value", "cap", "ppm"],
    do_not_specialize_on_alignment=["slots", "drafts", "segments", "budgets", "non_draft"],
)
def select_kernel(
    scores,
    slots,
    drafts,
    segments,
    budgets,
    budget_value,
    non_draft,
    non_draft_value,
    cap,
    rows,
    num_slots,
    K,
    ppm,
    survival,
    slot_admitted,
    slot_drafts,
    mean,
    sums,
    counters,
    admitted,
    cu_verify,
    budget_out,
    P: tl.constexpr,
    R: tl.constexpr,
    EVERY: tl.constexpr,
    OWN: tl.constexpr,
):
    """Grid (segments,). The last program to finish turns the rows' lengths into prefix sums and closes the step."""
    seg = tl.program_id(0)
    first, last = segment_bounds(segments, seg, rows)
    lane = tl.arange(0, R)
    position = tl.arange(0, P)
    r = first + lane
    live = r < last
    slot, real = gather_slots(slots, r, live, num_slots)
    depth = gather_depth(drafts, r, real, K)

    lowest = tl.full([R], 1.0, tl.float32)
    for k in tl.static_range(P):
        lowest = tl.minimum(lowest, tl.load(scores + slot * P + k, mask=k < depth, other=1.0))
    unscored = lowest < 0.0

    step = tl.load(counters + 1)
    requests = tl.sum(real.to(tl.int32), 0)
    count, start = explored_rows(step, requests, ppm, EVERY)
    ahead = tl.cumsum(real.to(tl.int32), 0).to(tl.int64) - 1 - start
    explored = real & (tl.where(ahead < 0, ahead + requests, ahead) < count)

    # Column by column: a tile of survivals and its addresses kept over the search below would spill.
    stored = real & (depth > 0)
    known = stored & (unscored == 0)
    forced = explored | unscored
    s = tl.full([R], 1.0, tl.float32)
    previous = s
    key = tl.full([P, R], -1, tl.int32)
    share = tl.zeros([P], tl.int64)
    for k in range(K):
        drafted = k < depth
        p = tl.load(scores + slot * P + k, mask=drafted, other=1.0)
        p = tl.where(p < 0.0, 1.0, tl.minimum(tl.where(p >= 0.0, p, 0.0), 1.0))
        previous = tl.where(drafted, p, previous)
        s = s * previous
        tl.store(survival + slot * P + k, tl.where(unscored, -1.0, s), mask=stored)
        share = tl.where(position == k, tl.sum(tl.where(known, (s * _Q30).to(tl.int64), 0), 0), share)
        column = tl.where(drafted, tl.where(forced, _FORCED, s.to(tl.int32, bitcast=True)), -1)
        key = tl.where(position[:, None] == k, column[None, :], key)

    total = tl.sum(depth, 0)
    budget = budget_value
    if budgets is not None:
        budget = tl.load(budgets + seg).to(tl.int32)
    scored = tl.sum(known.to(tl.int64), 0)
    if OWN:
        budget = tl.where(scored == 0, total, budget)
    tokens = requests
    if non_draft is not None:
        tokens = tl.maximum(tl.load(non_draft + seg).to(tl.int32), 0)
    elif non_draft_value >= 0:
        tokens = non_draft_value
    budget = tl.minimum(tl.maximum(budget, 0), tl.minimum(total, tl.maximum(cap - tokens, 0)))
    tl.store(budget_out + seg, budget)
    tl.store(slot_drafts + slot, depth, mask=real)
    tl.atomic_add(sums + position, share, mask=position < K, sem="relaxed")
    tl.atomic_add(sums + P, scored, sem="relaxed")
    length = admit(key, budget, total, P, R)

    slot, real = gather_slots(slots, r, live, num_slots)  # again: kept over the search they would spill
    tl.store(admitted + r, length, mask=live)
    tl.store(slot_admitted + slot, length, mask=real)
    tl.atomic_add(counters + 2, tl.sum((explored & (length > 0)).to(tl.int64), 0), sem="relaxed")

    tl.debug_barrier()
    if tl.atomic_add(counters, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        covered_from, covered_to = 0, rows
        if segments is not None:
            covered_from, _end = segment_bounds(segments, 0, rows)
            _begin, covered_to = segment_bounds(segments, tl.num_programs(0) - 1, rows)
        covered = (lane >= covered_from) & (lane < covered_to)
        _slot, present = gather_slots(slots, lane, covered, num_slots)
        a = tl.load(admitted + lane, mask=covered, other=0, cache_modifier=".cg")
        tl.store(admitted + lane, 0, mask=(lane < rows) & (covered == 0))
        tl.store(cu_verify + 1 + lane, tl.cumsum(tl.where(present, a + 1, 0), 0), mask=lane < rows)
        tl.store(cu_verify, 0)
        n = tl.load(sums + P, cache_modifier=".cg")
        total_s = tl.load(sums + position, mask=position < K, other=0, cache_modifier=".cg")
        average = (total_s.to(tl.float64) / tl.maximum(n, 1).to(tl.float64) / _Q30).to(tl.float32)
        tl.store(mean + position, average, mask=(position < K) & (n > 0))
        tl.debug_barrier()  # every thread has read the sums
        tl.store(sums + position, 0)
        tl.store(sums + P, 0)
        tl.store(counters + 1, tl.load(counters + 1) + 1)
        tl.store(counters, 0)


def select(
    state: PlanState,
    out: PlanOutput,
    scores: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    segments: torch.Tensor | None,
    num_segments: int,
    budget: torch.Tensor | int,
    own: bool,
    non_draft: torch.Tensor | int | None,
    cap: int,
    positions: int,
    ppm: int,
    every: int,
    tile: tuple[int, int, int],
) -> None:
    """Writes `out.admitted`, `out.cu_verify` and `out.budget` and updates `state` (see the module's formulas).

    Args:
        scores: float32 [slots, P] by slot, UNSCORED where no logits were seen.
        slots: int32 or int64 [rows]; out of range: padding. drafts: integers [rows] or None for K.
        budget: one number for every segment, or int32 [S].
        own: the budget is the planner's own, so a segment without a scored row is verified in full.
        non_draft: tokens of the step that are not drafts: one number, int32 [S], or None for one per real row.
        cap: most drafts and non-draft tokens of a segment, whatever the budget.
        ppm, every: explored share of the drafts in millionths, taken at the steps that are multiples of `every`.
        tile: (P, R, warps) as `segmented_topk.tile` gives it.
    """
    if not use_triton(scores.device):
        _select_torch(state, out, scores, slots, drafts, segments, budget, own, non_draft, cap, positions, ppm, every)
        return
    P, R, warps = tile
    on_device, tokens_on_device = isinstance(budget, torch.Tensor), isinstance(non_draft, torch.Tensor)
    select_kernel[(num_segments,)](
        scores, slots, drafts, segments, budget if on_device else None, 0 if on_device else budget,
        non_draft if tokens_on_device else None, -1 if tokens_on_device or non_draft is None else non_draft, cap,
        slots.shape[0], scores.shape[0], positions, ppm,
        state.survival, state.admitted, state.drafts, state.mean, state.sums, state.counters,
        out.admitted, out.cu_verify, out.budget, P=P, R=R, EVERY=every, OWN=own,
        num_warps=warps, **register_ceiling(),
    )  # fmt: skip


def explored_rows_reference(step: int, requests: int, ppm: int, every: int = 1) -> tuple[int, int]:
    """`explored_rows` on the host: (how many, from which)."""
    share, turn = min(requests, ENOUGH) * ppm * every, step // every
    count = 0 if step % every else (turn + 1) * share // 1_000_000 - turn * share // 1_000_000
    return min(count, requests), step * 2654435761 % 4294967296 * requests >> 32


def _select_torch(
    state: PlanState,
    out: PlanOutput,
    scores: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    segments: torch.Tensor | None,
    budget: torch.Tensor | int,
    own: bool,
    non_draft: torch.Tensor | int | None,
    cap: int,
    positions: int,
    ppm: int,
    every: int,
) -> None:
    rows, device = slots.shape[0], scores.device
    offsets = segment_offsets(segments, rows)
    budgets = budget.tolist() if isinstance(budget, torch.Tensor) else [budget] * (len(offsets) - 1)
    slot = slots.long()
    real = (slot >= 0) & (slot < scores.shape[0])
    covered = torch.zeros_like(real)
    covered[offsets[0] : max(offsets[-1], offsets[0])] = True
    real &= covered
    at = slot[real]
    depth = torch.zeros(rows, dtype=torch.int32, device=device)
    depth[real] = positions if drafts is None else drafts[real].clamp(0, positions).to(torch.int32)

    p = torch.ones(rows, positions, dtype=torch.float32, device=device)
    p[real] = scores[at, :positions]
    drafted = torch.arange(positions, device=device) < depth[:, None]
    unscored = (drafted & (p < 0)).any(1)
    p = torch.where(p < 0, 1.0, p.nan_to_num(0.0).clamp_max(1.0))
    running, columns = torch.ones(rows, dtype=torch.float32, device=device), []
    previous = running
    for k in range(positions):
        previous = torch.where(drafted[:, k], p[:, k], previous)
        running = running * previous
        columns.append(running)
    s = torch.stack(columns, 1)

    stored = real & (depth > 0)
    known = stored & ~unscored
    step = int(state.counters[STEPS])
    admitted = torch.zeros(rows, dtype=torch.int32, device=device)
    for seg, (first, last) in enumerate(itertools.pairwise(offsets)):
        rank = torch.cumsum(real[first:last].long(), 0) - 1
        requests = int(real[first:last].sum())
        count, start = explored_rows_reference(step, requests, ppm, every)
        explored = real[first:last] & ((rank - start) % max(requests, 1) < count)
        key = torch.where((explored | unscored[first:last])[:, None], 2.0, s[first:last])
        part = depth[first:last]
        if isinstance(non_draft, torch.Tensor):
            tokens = max(int(non_draft[seg]), 0)
        else:
            tokens = requests if non_draft is None else non_draft
        wanted = VERIFY_ALL if own and not bool(known[first:last].any()) else int(budgets[seg])
        out.budget[seg] = granted = min(max(wanted, 0), int(part.sum()), max(cap - tokens, 0))
        admitted[first:last] = admit_reference(key, part, granted)
        state.counters[EXPLORED] += int((explored & (admitted[first:last] > 0)).sum())
    out.admitted[:rows] = admitted
    out.cu_verify[0] = 0
    out.cu_verify[1 : rows + 1] = torch.cumsum(torch.where(real, admitted + 1, 0), 0).to(torch.int32)

    state.survival[slot[stored], :positions] = torch.where(unscored[stored, None], UNKNOWN, s[stored])
    state.admitted[at], state.drafts[at] = admitted[real], depth[real]
    if bool(known.any()):
        total = (s[known] * float(Q30)).to(torch.int64).sum(0)
        state.mean[:positions] = (total.double() / int(known.sum()) / Q30).float()
    state.counters[STEPS] += 1
