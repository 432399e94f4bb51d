"""survival + a budget per segment -> how many drafts of each request are admitted to verification.

A segment's `budget` drafts with the largest survival, ties by (position, row):

            row 0   row 1   row 2                         admitted, budget 4
    k = 0    .9      .6      .8         order:  .9 .8 .7 .6     2  1  1
    k = 1    .7      .2      .5
    k = 2    .3      .1      .4

Survival does not increase along k and ties favour the earlier position, so what is admitted is a prefix of each
request. Both rules look at prefixes only, never at a drawn token, which is what keeps the output law exact.

The smallest admitted key is found by a binary search over the bits of the survival (positive floats order as
integers); a radix histogram or a scan of the whole tile spills registers.
"""

import torch
import triton
import triton.language as tl

from av_triton.backend import register_ceiling, use_triton
from av_triton.ops._checks import INTEGERS, check_vector
from av_triton.settings import MAX_DRAFT_POSITIONS, MAX_ROWS

UNSCORED = -1.0  # score of a draft whose logits were not seen since the last observation
PPM = 1_000_000
ENOUGH = 64  # requests: the labels that a refit needs do not grow with the batch

FORCED = 0x3F800001  # key of a row that goes first: just above the bits of 1.0
_ENOUGH = tl.constexpr(ENOUGH)
_PPM = tl.constexpr(PPM)
_FORCED = tl.constexpr(FORCED)


def segmented_topk_reference(
    survival: torch.Tensor, drafts: torch.Tensor, budgets: torch.Tensor, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """As `segmented_topk`, by a stable sort; keys in the dtype of `survival`."""
    key = torch.where(survival > 0, survival, torch.zeros_like(survival)).clamp_max(1.0).cummin(1).values
    offsets = segment_offsets(segments, survival.shape[0])
    admitted = torch.zeros(survival.shape[0], dtype=torch.int32, device=survival.device)
    for first, last, budget in zip(offsets[:-1], offsets[1:], budgets.tolist(), strict=True):
        admitted[first:last] = admit_reference(key[first:last], drafts[first:last], budget)
    return admitted


def segment_offsets(segments: torch.Tensor | None, rows: int) -> list[int]:
    """`segment_bounds` on the host: offsets kept within the rows."""
    return [0, rows] if segments is None else [min(max(offset, 0), rows) for offset in segments.tolist()]


def admit_reference(key: torch.Tensor, drafts: torch.Tensor, budget: int) -> torch.Tensor:
    """Admitted drafts per row of one segment: its `budget` largest keys [rows, K], ties by (position, row)."""
    rows, positions = key.shape
    flat = torch.where(torch.arange(positions, device=key.device) < drafts[:, None], key, -1.0).t().reshape(-1)
    best = flat.sort(descending=True, stable=True).indices[: max(budget, 0)]
    best = best[flat[best] >= 0]
    return torch.bincount(best % max(rows, 1), minlength=rows).to(torch.int32)


@triton.jit
def count_below(x, limit):
    """How many entries of a tile are < limit, by the sign bit of the difference: sums of comparisons spill."""
    return -tl.sum(tl.sum((x - limit) >> 31, 0), 0)


@triton.jit
def admit(key, budget, total, P: tl.constexpr, R: tl.constexpr):
    """Per row, how many of its keys are among the `budget` <= total largest of the tile [P, R]; -1: a place without
    a draft, and `total` counts the others.

    Two binary searches over bits: for the smallest admitted key, and for the first of its equals in (position, row)
    order that does not fit. Always the same number of rounds: in a loop that depends on data, shuffles become calls."""
    threshold = 0
    above, reached = 0, total  # keys > threshold (the count at the last candidate refused: threshold + 1), keys >= it
    bit = 1 << 29
    for _ in range(30):
        candidate = threshold | bit
        count = P * R - count_below(key, candidate)
        enough = count >= budget
        threshold = tl.where(enough, candidate, threshold)
        reached = tl.where(enough, count, reached)
        above = tl.where(enough, above, count)
        bit = bit >> 1
    length = -tl.sum((threshold - key) >> 31, 0)
    NOWHERE: tl.constexpr = 1 << 14  # >= P * R
    place = tl.where(key == threshold, tl.arange(0, P)[:, None] * R + tl.arange(0, R)[None, :], NOWHERE)
    end = 0
    bit = NOWHERE >> 1
    for _ in range(14):
        candidate = end | bit
        end = tl.where(above + count_below(place, candidate) <= budget, candidate, end)
        bit = bit >> 1
    end = tl.where(reached > budget, end, NOWHERE)
    return length - tl.sum((place - end) >> 31, 0)


@triton.jit
def segment_bounds(segments, seg, rows):
    first = 0
    last = rows
    if segments is not None:
        first = tl.minimum(tl.maximum(tl.load(segments + seg).to(tl.int32), 0), rows)
        last = tl.minimum(tl.maximum(tl.load(segments + seg + 1).to(tl.int32), first), rows)
    return first, last


@triton.jit
def explored_rows(step, requests, ppm, EVERY: tl.constexpr):
    """(how many, from which) requests go to full depth at this step: `ppm` millionths of them, or of ENOUGH if they are
    more, spread over the steps that are multiples of EVERY without a remainder lost and starting at a place that
    depends on the step number alone: its golden-ratio hash scaled to [0, requests), not the remainder, for at 2, 10 or
    50 requests and 1 % that would leave out every second one."""
    n = requests.to(tl.int64)
    share = tl.minimum(n, _ENOUGH) * ppm * EVERY
    turn = step // EVERY
    count = tl.where(step % EVERY == 0, (turn + 1) * share // _PPM - turn * share // _PPM, 0)
    return tl.minimum(count, n), (step * 2654435761 % 4294967296) * n >> 32


@triton.jit(do_not_specialize=["rows", "K"])
def segmented_topk_kernel(survival, drafts, budgets, segments, admitted, rows, K, P: tl.constexpr, R: tl.constexpr):
    seg = tl.program_id(0)
    first, last = segment_bounds(segments, seg, rows)
    lane = tl.arange(0, R)
    position = tl.arange(0, P)
    r = first + lane
    live = r < last
    s = tl.full([P, R], 1.0, tl.float32)
    for k in tl.static_range(P):
        column = tl.load(survival + r.to(tl.int64) * K + k, mask=live & (k < K), other=0.0)
        s = tl.where(position[:, None] >= k, tl.minimum(s, tl.where(column > 0.0, column, 0.0)[None, :]), s)
    depth = tl.minimum(tl.load(drafts + r, mask=live, other=0).to(tl.int32), K)
    drafted = position[:, None] < depth[None, :]
    total = tl.sum(tl.maximum(depth, 0), 0)
    budget = tl.minimum(tl.maximum(tl.load(budgets + seg).to(tl.int32), 0), total)
    length = admit(tl.where(drafted, s.to(tl.int32, bitcast=True), -1), budget, total, P, R)
    tl.store(admitted + r, length, mask=live)


def tile(max_rows: int, positions: int) -> tuple[int, int, int]:
    """(P, R, warps) of the [positions, rows] register tile."""
    P, R = triton.next_power_of_2(positions), max(16, triton.next_power_of_2(max_rows))
    return P, R, min(16, max(2, P * R // 256))


@torch.library.custom_op("av_triton::segmented_topk", mutates_args=())
def _segmented_topk(
    survival: torch.Tensor, drafts: torch.Tensor, budgets: torch.Tensor, segments: torch.Tensor | None
) -> torch.Tensor:
    if not use_triton(survival.device):
        return segmented_topk_reference(survival, drafts, budgets, segments)
    rows, positions = survival.shape
    admitted = torch.zeros(rows, dtype=torch.int32, device=survival.device)
    if rows and budgets.numel():
        P, R, warps = tile(rows, positions)
        segmented_topk_kernel[(budgets.numel(),)](
            survival.contiguous(), drafts, budgets, segments, admitted, rows, positions, P=P, R=R, num_warps=warps,
            **register_ceiling(),
        )  # fmt: skip
    return admitted


@_segmented_topk.register_fake
def _(
    survival: torch.Tensor, drafts: torch.Tensor, budgets: torch.Tensor, segments: torch.Tensor | None
) -> torch.Tensor:
    return drafts.new_empty(drafts.shape, dtype=torch.int32)


def check_segments(segments: torch.Tensor | None, device: torch.device) -> int:
    """The number of segments that int32 offsets [S + 1] describe (1 for None)."""
    if segments is None:
        return 1
    count = max(segments.numel() - 1, 1) if isinstance(segments, torch.Tensor) else 1
    check_vector("segments", segments, count + 1, (torch.int32,), device)
    return count


def segmented_topk(
    survival: torch.Tensor, drafts: torch.Tensor, budgets: torch.Tensor, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """Admitted drafts per row: in each segment the `budget` drafts with the largest survival.

    Args:
        survival: float32 [rows, K], rows <= 1024, K <= 16; made non-increasing along K if it is not; NaN counts as 0.
        drafts: int32 or int64 [rows], drafts that each row has (0 to K).
        budgets: int32 [S], drafts to admit per segment; a negative one counts as 0, a larger one admits all there are.
        segments: int32 [S + 1], ascending offsets of the segments over the rows; None: one segment of all rows.
            Rows outside every segment admit nothing.

    Returns:
        int32 [rows].
    """
    if survival.dtype != torch.float32 or survival.dim() != 2:
        raise ValueError(f"survival is {survival.dtype} {tuple(survival.shape)}: give float32 [rows, K]")
    rows, positions = survival.shape
    if not 1 <= positions <= MAX_DRAFT_POSITIONS or rows > MAX_ROWS:
        raise ValueError(
            f"survival has shape {tuple(survival.shape)}: at most {MAX_ROWS} rows x {MAX_DRAFT_POSITIONS} positions; "
            "call once per group of rows"
        )
    check_vector("drafts", drafts, rows, INTEGERS, survival.device)
    check_vector("budgets", budgets, check_segments(segments, survival.device), (torch.int32,), survival.device)
    return _segmented_topk(survival, drafts, budgets, segments)
