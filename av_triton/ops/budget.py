"""survival + cost -> the budget: how many drafts of a segment to verify.

With s sorted descending over the segment's drafts and R sampling requests (each gets its bonus token in any case),

    estimated accepted(n) = R + s[1] + ... + s[n]
    cost(n)               = draft_cost[R] + verify_cost[non-draft tokens + n]      milliseconds
    budget                = argmax over n of estimated accepted(n) / cost(n)       smallest n on ties

The argmax is exact and global: the cost is a staircase (a captured graph runs at its padded size), so the ratio has
many local maxima. Survivals are quantised to Q30 before they are summed and ratios are float64, so that every rank and
every backend takes the same side of a near-tie.

Lossless only for survivals of an *earlier* step. With current ones the sum over later positions, which depend on drawn
tokens, decides whether earlier drafts are verified. `lookahead` may use current ones: it goes down the ranking and
admits the next draft while some m >= 1 has (A + m s) / cost(n + m) > A / cost(n), all drafts further down taken to
survive as well as the next one, an upper bound that is known before they are drawn. The ranking has to be the order in
which drafts are admitted: rows that go first whatever their scores (explored, unscored) count as certain. Ranked by
their survivals, they would let a draft that is admitted later decide about one that is admitted earlier.

Sorting is ranking by counting, spread over programs; the last program of a segment sums, divides and chooses.
"""

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from av_triton.backend import compiler, register_ceiling, use_triton
from av_triton.ops._checks import INTEGERS, check_vector
from av_triton.ops.segmented_topk import check_segments, explored_rows, segment_bounds, segment_offsets
from av_triton.ops.select import (
    BYPASSED,
    Q30,
    STEPS,
    PlanOutput,
    PlanState,
    explored_rows_reference,
    gather_depth,
    gather_slots,
)
from av_triton.ops.survival import survival_reference
from av_triton.settings import MAX_DRAFT_POSITIONS, MAX_ROWS

HYSTERESIS = 1.5  # a segment that is bypassed starts trimming again at this multiple of the minimum gain
# Drafts that it compares them with at a time: one column per thread, or the keys of several spill. The interpreter pays
# per operation, whatever its size.
AGAINST = 512 if triton.knobs.runtime.interpret else 32
NO_CAP = 1 << 30


def ranked_per_program() -> int:
    """Drafts that one program ranks. With 128 AMD's compiler spills scalar registers, with 64 NVIDIA's vector ones."""
    return 64 if compiler() == "hip" else 128


_Q30 = tl.constexpr(float(Q30))
_NO_CAP = tl.constexpr(NO_CAP)
_PPM = tl.constexpr(1e6)
_HYSTERESIS = tl.constexpr(HYSTERESIS)


@triton.jit
def _draft_keys(
    e, rows_here, first, last, K, values, slots, num_slots, drafts, mean,
    explored_from, explored_to, wrapped_to, P: tl.constexpr, ALL_POSITIONS: tl.constexpr, FROM_SCORES: tl.constexpr,
):  # fmt: skip
    """(survival in Q30, packed value, present) of drafts e = position * rows + row; the survival is -1 where there is
    no draft; the packed value is survival << 8 | position << 1 | drafted.
    From scores: explored rows (from .. to, and up to wrapped_to) and rows with an unscored draft count as certain."""
    k = e // tl.maximum(rows_here, 1)
    r = first + e % tl.maximum(rows_here, 1)
    live = e < rows_here * K
    slot = r.to(tl.int64)
    real = live
    if slots is not None:
        slot, real = gather_slots(slots, r, live, num_slots)
    depth = gather_depth(drafts, r, real, K)
    drafted = k < depth
    present = drafted
    if ALL_POSITIONS:
        present = real
    if FROM_SCORES:
        s = tl.where(present, 1.0, 0.0)
        first_of_all = ((r >= explored_from) & (r <= explored_to)) | (r <= wrapped_to)
        for j in range(K):
            p = tl.load(values + slot * P + j, mask=present & (j < depth), other=1.0)
            first_of_all = first_of_all | (p < 0.0)
            s = tl.where(j <= k, s * tl.minimum(p, 1.0), s)
        s = tl.where(first_of_all, 1.0, s)
    else:
        s = tl.load(values + slot * P + k, mask=present, other=0.0)
        if mean is not None:
            unknown = tl.load(values + slot * P, mask=present, other=0.0) < 0.0
            s = tl.where(unknown, tl.load(mean + k, mask=present, other=0.0), s)
    q = (tl.minimum(tl.where(s > 0.0, s, 0.0), 1.0) * _Q30).to(tl.int32)
    return tl.where(present, q, -1), (q.to(tl.int64) << 8) | (k << 1) | drafted.to(tl.int32), present


@triton.jit
def _cost(draft_ms, verify_cost, tokens, num_costs):
    return draft_ms + tl.load(verify_cost + tl.minimum(tokens, num_costs - 1))


@triton.jit
def _scan(
    ranked, n, accepted, tokens, draft_ms, verify_cost, num_costs, limit, depth, DRAFTED: tl.constexpr, C: tl.constexpr
):
    """(argmax n, its ratio, the ratio at `limit`) over the ranked drafts at positions < depth."""
    lane = tl.arange(0, C)
    best = accepted.to(tl.float64) / _Q30 / _cost(draft_ms, verify_cost, tokens, num_costs)
    at_limit = best
    best_n = 0
    count = 0
    for j in range(0, n, C):
        v = tl.load(ranked + j + lane, mask=j + lane < n, other=255, cache_modifier=".cg")
        take = (j + lane < n) & (((v >> 1) & 127) < depth)
        if DRAFTED:
            take = take & ((v & 1) == 1)
        q = tl.where(take, v >> 8, 0)
        m = count + tl.cumsum(take.to(tl.int32), 0)
        a = accepted + tl.cumsum(q, 0)
        ratio = a.to(tl.float64) / _Q30 / _cost(draft_ms, verify_cost, tokens + m, num_costs)
        ratio = tl.where(take & (m <= limit), ratio, -1.0)
        top = tl.max(ratio, 0)
        best_n = tl.where(top > best, tl.min(tl.where(ratio == top, m, _NO_CAP), 0), best_n)
        best = tl.maximum(best, top)
        end = tl.max(tl.where(m == limit, ratio, -1.0), 0)
        at_limit = tl.where(end > 0.0, end, at_limit)
        count += tl.sum(take.to(tl.int32), 0)
        accepted += tl.sum(q, 0)
    return best_n, best, at_limit


@triton.jit
def _look_ahead(ranked, accepted, tokens, draft_ms, verify_cost, num_costs, limit, C: tl.constexpr):
    lane = tl.arange(0, C)
    n = 0
    go = limit > 0
    while go:
        s = tl.load(ranked + n, cache_modifier=".cg") >> 8
        now = accepted.to(tl.float64) / _Q30 / _cost(draft_ms, verify_cost, tokens + n, num_costs)
        better = 0
        for j in range(0, limit - n, C):
            m = j + 1 + lane
            a = (accepted + m.to(tl.int64) * s).to(tl.float64) / _Q30
            ratio = a / _cost(draft_ms, verify_cost, tokens + n + m, num_costs)
            better = tl.maximum(better, tl.max(((ratio > now) & (m <= limit - n)).to(tl.int32), 0))
        accepted += tl.where(better == 1, s, 0)
        n += better
        go = (better == 1) & (n < limit)
    return n


@triton.jit(
    do_not_specialize=[
        "rows", "num_slots", "K", "non_draft_value", "num_costs", "cost_stride", "cap", "ppm", "shift", "gain_ppm",
    ],
    do_not_specialize_on_alignment=["slots", "drafts", "segments", "sampling", "non_draft"],
)  # fmt: skip
def budget_kernel(
    values, slots, drafts, segments, mean, sampling, non_draft, non_draft_value,
    draft_cost, verify_cost, cost_stride, padded, num_costs, cap, rows, num_slots, K, ppm, shift, gain_ppm,
    counters, ranked, tickets, proposal, bypass, depth_out,
    P: tl.constexpr, R: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr, AGAINST: tl.constexpr,
    AUTOREGRESSIVE: tl.constexpr, LOOKAHEAD: tl.constexpr, NEXT: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Grid (segments, ceil(rows * K / RANK)). `values` are survivals by slot (or by row, slots None); with LOOKAHEAD
    scores by slot. NEXT: the proposal is for a later step, so an autoregressive drafter is not bound by today's depth.
    """
    seg = tl.program_id(0)
    first, last = segment_bounds(segments, seg, rows)
    here = last - first
    ALL: tl.constexpr = AUTOREGRESSIVE and not LOOKAHEAD
    SCORES: tl.constexpr = LOOKAHEAD and slots is not None
    explored_from = 0
    explored_to = -1
    wrapped_to = -1
    if SCORES:
        at = first + tl.arange(0, R)
        _slot, counted = gather_slots(slots, at, at < last, num_slots)
        place = tl.cumsum(counted.to(tl.int32), 0).to(tl.int64) - 1
        now = tl.load(counters + 1)
        if NEXT:
            now += shift
        size = tl.sum(counted.to(tl.int32), 0)
        number, start = explored_rows(now, size, ppm, EVERY)
        window = counted & (place >= start) & (place < start + number)
        explored_from = tl.min(tl.where(window, at, _NO_CAP), 0)
        explored_to = tl.max(tl.where(window, at, -1), 0)
        wrapped_to = tl.max(tl.where(counted & (place < start + number - size), at, -1), 0)

    e = tl.program_id(1) * RANK + tl.arange(0, RANK)
    q, value, present = _draft_keys(
        e, here, first, last, K, values, slots, num_slots, drafts, mean,
        explored_from, explored_to, wrapped_to, P, ALL, SCORES,
    )  # fmt: skip
    rank = tl.zeros([RANK], tl.int32)
    for j in range(0, here * K, AGAINST):
        against = j + tl.arange(0, AGAINST)
        other, _v, _p = _draft_keys(
            against, here, first, last, K, values, slots, num_slots, drafts, mean,
            explored_from, explored_to, wrapped_to, P, ALL, SCORES,
        )  # fmt: skip
        # Ahead of a draft: a larger survival, or an equal one and a smaller e. By sign bits: comparisons spill.
        behind = q[:, None] + ((against[None, :] - e[:, None]) >> 31) - other[None, :]
        rank -= tl.sum(behind >> 31, 1)
    base = ranked + first.to(tl.int64) * K
    tl.store(base + rank, value, mask=present)

    tl.debug_barrier()
    if tl.atomic_add(tickets + seg, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(tickets + seg, 0)
        r = first + tl.arange(0, R)
        live = r < last
        real = live
        if slots is not None:
            _slot, real = gather_slots(slots, r, live, num_slots)
        depth = gather_depth(drafts, r, real, K)
        total = tl.sum(depth, 0)
        requests = tl.sum(real.to(tl.int32), 0)
        n = total
        if ALL:
            n = requests * K
        tokens = requests
        if non_draft is not None:
            tokens = tl.maximum(tl.load(non_draft + seg).to(tl.int32), 0)
        elif non_draft_value >= 0:
            tokens = non_draft_value
        accepting = requests
        if sampling is not None:
            accepting = tl.maximum(tl.load(sampling + seg).to(tl.int32), 0)
        accepted = accepting.to(tl.int64) << 30
        draft_ms = tl.zeros([], tl.float64)
        if draft_cost is not None:
            draft_ms += tl.load(draft_cost + requests)
        verify = verify_cost + seg.to(tl.int64) * cost_stride
        room = tl.maximum(cap - tokens, 0)
        limit = tl.minimum(total, room)

        deepest = K
        if AUTOREGRESSIVE:
            deepest = tl.max(depth, 0)
        now_ms = draft_ms * deepest / K if AUTOREGRESSIVE else draft_ms
        state = 0
        best_depth = K
        unknown = False
        if mean is not None:
            unknown = tl.load(mean) < 0.0
        if LOOKAHEAD:
            choice = _look_ahead(base, accepted, tokens, now_ms, verify, num_costs, limit, C)
        else:
            choice, best, at_limit = _scan(
                base, n, accepted, tokens, now_ms, verify, num_costs, limit, K, AUTOREGRESSIVE, C
            )
            if AUTOREGRESSIVE:
                best_depth = 0
                deep_choice = 0
                deep_best = tl.full([], -1.0, tl.float64)
                for d in range(K + 1):
                    most = tl.minimum(requests * d, room)
                    at, ratio, _end = _scan(
                        base, n, accepted, tokens, draft_ms * d / K, verify, num_costs, most, d, False, C
                    )
                    best_depth = tl.where(ratio > deep_best, d, best_depth)
                    deep_choice = tl.where(ratio > deep_best, at, deep_choice)
                    deep_best = tl.maximum(ratio, deep_best)
                best_depth = tl.where(unknown, K, best_depth)
                if NEXT:
                    choice = deep_choice
                    limit = tl.minimum(requests * best_depth, room)
            if bypass is not None:
                was = tl.load(bypass + seg)
                threshold = tl.cast(gain_ppm, tl.float64) / _PPM * tl.where(was > 0, _HYSTERESIS, 1.0)
                state = (best / at_limit - 1.0 < threshold).to(tl.int32)
                choice = tl.where(state > 0, limit, choice)
        choice = tl.where(unknown, limit, choice)
        if counters is not None:
            step = tl.load(counters + 1)
            count, _start = explored_rows(step + shift, requests, ppm, EVERY)
            choice = tl.maximum(choice, tl.minimum(count * K, limit.to(tl.int64)).to(tl.int32))
            # The depth is for the next drafting, the proposal for its own step. NEXT: this step has been counted.
            if not NEXT:
                step += 1
            count, _start = explored_rows(step, requests, ppm, EVERY)
            best_depth = tl.where(count > 0, K, best_depth)
            tl.atomic_add(counters + 3, tl.cast(state, tl.int64), sem="relaxed")
        if padded is not None:
            size = tl.load(padded + tl.minimum(tokens + choice, num_costs - 1))
            choice = tl.minimum(tl.maximum(size - tokens, choice), limit)
        tl.store(proposal + seg, choice)
        if bypass is not None:
            tl.store(bypass + seg, state)
        if depth_out is not None:
            tl.store(depth_out + seg, best_depth)


class BudgetOptions(NamedTuple):
    """What a planner fixes for all its budgets; shares and gains in millionths."""

    cap: int = NO_CAP
    ppm: int = 0
    every: int = 1
    gain_ppm: int = 0
    autoregressive: bool = False
    lookahead: bool = False


class CostArrays(NamedTuple):
    """Cost in milliseconds on the device, indexed by count."""

    draft: torch.Tensor  # float64 [max_requests + 1]
    verify: torch.Tensor  # float64 [max_tokens + 1]
    padded: torch.Tensor  # int32 [max_tokens + 1], tokens that really run


def _ranked(s: torch.Tensor, present: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(survivals in Q30, flat places position * rows + row) of the present drafts [rows, K], best first."""
    q = (torch.where(s > 0, s, torch.zeros_like(s)).clamp_max(1.0) * float(Q30)).to(torch.int64)
    flat = torch.where(present, q, -1).t().reshape(-1)
    order = flat.sort(descending=True, stable=True).indices[: int(present.sum())]
    return flat[order], order


def _best(q: torch.Tensor, accepted: int, cost: torch.Tensor, limit: int) -> tuple[int, float, float]:
    """(argmax n, its ratio, the ratio at the limit) for ranked survivals q; `cost` is that of n = 0 ..."""
    q = q[:limit]
    total = accepted + torch.cat([q.new_zeros(1), q.cumsum(0)])
    ratio = total.double() / Q30 / cost[torch.arange(len(total), device=cost.device).clamp_max(len(cost) - 1)]
    best = int((ratio == ratio.max()).nonzero()[0, 0])
    return best, float(ratio[best]), float(ratio[-1])


def _look_ahead_reference(q: torch.Tensor, accepted: int, cost: torch.Tensor, limit: int) -> int:
    last = len(cost) - 1
    for n in range(limit):
        m = torch.arange(1, limit - n + 1, device=cost.device)
        ahead = (accepted + m * q[n]).double() / Q30 / cost[(n + m).clamp_max(last)]
        if not bool((ahead > accepted / Q30 / float(cost[min(n, last)])).any()):
            return n
        accepted += int(q[n])
    return limit


def choose_budget_reference(
    survival: torch.Tensor,
    drafts: torch.Tensor,
    cost: torch.Tensor,
    sampling_requests: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    limit: int | None = None,
    policy: str = "argmax",
) -> torch.Tensor:
    """As `choose_budget`, segment by segment."""
    rows, positions = survival.shape
    offsets = segment_offsets(segments, rows)
    budgets = []
    for seg, (first, last) in enumerate(itertools.pairwise(offsets)):
        inside = torch.arange(positions, device=survival.device) < drafts[first:last, None]
        q, _ = _ranked(survival[first:last], inside)
        requests = last - first if sampling_requests is None else max(int(sampling_requests[seg]), 0)
        row = cost if cost.dim() == 1 else cost[seg]
        most = len(q) if limit is None else min(limit, len(q))
        if policy == "lookahead":
            budgets.append(_look_ahead_reference(q, requests << 30, row, most))
        else:
            budgets.append(_best(q, requests << 30, row, most)[0])
    return torch.tensor(budgets, dtype=torch.int32, device=survival.device)


def propose(
    state: PlanState,
    out: PlanOutput,
    costs: CostArrays,
    options: BudgetOptions,
    ranked: torch.Tensor,
    tickets: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    segments: torch.Tensor | None,
    num_segments: int,
    non_draft: torch.Tensor | int | None,
    positions: int,
    shift: int,
    later: bool,
    tile: tuple[int, int, int],
    scores: torch.Tensor,
) -> None:
    """Writes `out.proposal`, `out.depth` and `out.bypass` from the survivals stored by slot (look-ahead: the scores).

    Args:
        ranked: int64 [max_rows * K], scratch. tickets: int32 [max segments], zeros.
        non_draft: tokens of the step that are not drafts: one number, int32 [S], or None for one per real row.
        shift: plans between the counter's step and the step that will use the proposal.
        later: the proposal is not for the plan that is being made.
    """
    if not use_triton(scores.device):
        _propose_torch(state, out, costs, options, slots, drafts, segments, non_draft, positions, shift, later, scores)
        return
    P, R, _ = tile
    rows = slots.shape[0]
    on_device = isinstance(non_draft, torch.Tensor)
    ranked_here = ranked_per_program()
    budget_kernel[(num_segments, max(1, triton.cdiv(rows * positions, ranked_here)))](
        scores if options.lookahead else state.survival, slots, drafts, segments, state.mean, None,
        non_draft if on_device else None, -1 if on_device or non_draft is None else non_draft,
        costs.draft, costs.verify, 0, costs.padded, costs.verify.shape[0], options.cap, rows, scores.shape[0],
        positions, options.ppm, shift, options.gain_ppm, state.counters, ranked, tickets,
        out.proposal, out.bypass, out.depth, P=P, R=R, C=512, RANK=ranked_here, AGAINST=AGAINST,
        AUTOREGRESSIVE=options.autoregressive, LOOKAHEAD=options.lookahead, NEXT=later,
        EVERY=options.every, num_warps=8, **register_ceiling(),
    )  # fmt: skip


def _propose_torch(
    state: PlanState,
    out: PlanOutput,
    costs: CostArrays,
    options: BudgetOptions,
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    segments: torch.Tensor | None,
    non_draft: torch.Tensor | int | None,
    positions: int,
    shift: int,
    later: bool,
    scores: torch.Tensor,
) -> None:
    rows, last_token = slots.shape[0], len(costs.verify) - 1
    offsets = segment_offsets(segments, rows)
    now = int(state.counters[STEPS])
    column = torch.arange(positions, device=slots.device)
    for seg, (first, last) in enumerate(itertools.pairwise(offsets)):
        slot = slots[first:last].long()
        real = (slot >= 0) & (slot < scores.shape[0])
        at = slot[real]
        requests = len(at)
        if drafts is None:
            depth = torch.full((requests,), positions, device=slots.device)
        else:
            depth = drafts[first:last][real].clamp(0, positions).long()
        drafted = column < depth[:, None]
        if options.lookahead:
            p = scores[at, :positions]
            number, start = explored_rows_reference(now + shift if later else now, requests, options.ppm, options.every)
            place = torch.arange(requests, device=slots.device)
            first_of_all = ((place - start) % max(requests, 1) < number) | (drafted & (p < 0)).any(1)
            s = torch.where(first_of_all[:, None], 1.0, survival_reference(p))
        else:
            s = torch.where(state.survival[at, :1] < 0, state.mean[:positions], state.survival[at, :positions])
        if isinstance(non_draft, torch.Tensor):
            tokens = max(int(non_draft[seg]), 0)
        else:
            tokens = requests if non_draft is None else non_draft
        room = max(options.cap - tokens, 0)
        limit = min(int(depth.sum()), room)
        verify = costs.verify[min(tokens, last_token) :]
        draft_ms = float(costs.draft[requests])
        accepted = requests << 30

        every = options.autoregressive and not options.lookahead
        q, order = _ranked(s, torch.ones_like(drafted) if every else drafted)
        position, row = order // max(requests, 1), order % max(requests, 1)
        now_ms = draft_ms
        if options.autoregressive:
            now_ms = draft_ms * float(depth.max() if requests else 0) / positions
        own = q[drafted[row, position]] if requests else q
        best_depth, bypassed = positions, 0
        if options.lookahead:
            choice = _look_ahead_reference(own, accepted, now_ms + verify, limit)
        else:
            choice, best, at_limit = _best(own, accepted, now_ms + verify, limit)
            if options.autoregressive:
                found = []
                for d in range(positions + 1):
                    cost = draft_ms * d / positions + verify
                    found.append(_best(q[position < d], accepted, cost, min(requests * d, room)))
                ratios = [ratio for _, ratio, _ in found]
                best_depth = positions if float(state.mean[0]) < 0 else ratios.index(max(ratios))
                if later:
                    choice, limit = found[best_depth][0], min(requests * best_depth, room)
            threshold = options.gain_ppm / 1e6 * (HYSTERESIS if int(out.bypass[seg]) else 1.0)
            bypassed = int(at_limit > 0 and best / at_limit - 1.0 < threshold)
            choice = limit if bypassed else choice
        if float(state.mean[0]) < 0:
            choice = limit
        count, _ = explored_rows_reference(now + shift, requests, options.ppm, options.every)
        choice = max(choice, min(count * positions, limit))
        # The depth is for the next drafting, the proposal for its own step. Later: this step has been counted.
        upcoming, _ = explored_rows_reference(now if later else now + 1, requests, options.ppm, options.every)
        best_depth = positions if upcoming else best_depth
        size = int(costs.padded[min(tokens + choice, last_token)])
        out.proposal[seg] = min(max(size - tokens, choice), limit)
        out.depth[seg], out.bypass[seg] = best_depth, bypassed
        state.counters[BYPASSED] += bypassed


@torch.library.custom_op("av_triton::choose_budget", mutates_args=())
def _choose_budget(
    survival: torch.Tensor,
    drafts: torch.Tensor,
    cost: torch.Tensor,
    sampling_requests: torch.Tensor | None,
    segments: torch.Tensor | None,
    limit: int | None,
    policy: str,
) -> torch.Tensor:
    if not use_triton(survival.device):
        return choose_budget_reference(survival, drafts, cost, sampling_requests, segments, limit, policy)
    rows, positions = survival.shape
    count = check_segments(segments, survival.device)
    device = survival.device
    budget = torch.empty(count, dtype=torch.int32, device=device)
    P = triton.next_power_of_2(positions)
    R = max(16, triton.next_power_of_2(max(rows, 1)))
    ranked_here = ranked_per_program()
    budget_kernel[(count, max(1, triton.cdiv(rows * positions, ranked_here)))](
        torch.nn.functional.pad(survival, (0, P - positions)), None, drafts, segments, None, sampling_requests, None, 0,
        None, cost, cost.shape[-1] if cost.dim() == 2 else 0, None, cost.shape[-1], NO_CAP if limit is None else limit,
        rows, rows, positions, 0, 0, 0, None,
        torch.empty(max(rows * positions, 1), dtype=torch.int64, device=device),
        torch.zeros(count, dtype=torch.int32, device=device), budget, None, None, P=P, R=R, C=512,
        RANK=ranked_here, AGAINST=AGAINST, AUTOREGRESSIVE=False, LOOKAHEAD=policy == "lookahead", NEXT=False,
        EVERY=1, num_warps=8, **register_ceiling(),
    )  # fmt: skip
    return budget


@_choose_budget.register_fake
def _(
    survival: torch.Tensor,
    drafts: torch.Tensor,
    cost: torch.Tensor,
    sampling_requests: torch.Tensor | None,
    segments: torch.Tensor | None,
    limit: int | None,
    policy: str,
) -> torch.Tensor:
    return survival.new_empty(1 if segments is None else segments.shape[0] - 1, dtype=torch.int32)


def choose_budget(
    survival: torch.Tensor,
    drafts: torch.Tensor,
    cost: torch.Tensor,
    sampling_requests: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    limit: int | None = None,
    policy: str = "argmax",
) -> torch.Tensor:
    """The budget of every segment: argmax over n of (sampling requests + the n best survivals) / cost[n].

    Args:
        survival: float32 [rows, K], rows <= 1024, K <= 16, of an **earlier** step (see the module's docstring).
        drafts: int32 or int64 [rows].
        cost: float64 [N + 1] or [S, N + 1], milliseconds of the step with n = 0, 1, ... admitted drafts; positive.
            Beyond N the last value holds.
        sampling_requests: int32 [S], requests that get a token in any case; None: the rows of the segment.
        segments: int32 [S + 1] offsets over the rows; None: one segment.
        limit: largest budget allowed; None: all drafts.
        policy: "argmax", or "lookahead" (the rule that may be fed current survivals).

    Returns:
        int32 [S]; the smallest n among equals.
    """
    if survival.dtype != torch.float32 or survival.dim() != 2:
        raise ValueError(f"survival is {survival.dtype} {tuple(survival.shape)}: give float32 [rows, K]")
    rows, positions = survival.shape
    if not 1 <= positions <= MAX_DRAFT_POSITIONS or rows > MAX_ROWS:
        raise ValueError(
            f"survival has shape {tuple(survival.shape)}: at most {MAX_ROWS} rows x {MAX_DRAFT_POSITIONS} positions"
        )
    check_vector("drafts", drafts, rows, INTEGERS, survival.device)
    count = check_segments(segments, survival.device)
    if cost.dtype != torch.float64 or cost.device != survival.device or cost.dim() not in (1, 2) or not cost.numel():
        raise ValueError(
            f"cost is {cost.dtype} {tuple(cost.shape)} on {cost.device}: give float64 [N + 1] or [S, N + 1]"
        )
    if cost.dim() == 2 and cost.shape[0] != count:
        raise ValueError(f"cost has {cost.shape[0]} rows: give one for each of {count} segments")
    if sampling_requests is not None:
        check_vector("sampling_requests", sampling_requests, count, (torch.int32,), survival.device)
    if limit is not None and limit < 0:
        raise ValueError(f"limit = {limit}: give 0 or more, or None")
    if policy not in ("argmax", "lookahead"):
        raise ValueError(f"policy = {policy!r}: choose argmax or lookahead")
    return _choose_budget(survival, drafts, cost.contiguous(), sampling_requests, segments, limit, policy)
