"""One damped Newton step of the logistic regression, in float64, on the arrowhead system of its normal equations.

With theta = (w, b_0 .. b_{K-1}) the Hessian has one full row and a diagonal:

    ⎡ Σ a_k   B_0  B_1  ..  ⎤ ⎡ dw   ⎤   ⎡ Σ h_k ⎤        a_k = Σ p(1-p) f²    h_k = Σ (y - p) f
    ⎢ B_0     C_0           ⎥ ⎢ db_0 ⎥ = ⎢ g_0   ⎥        B_k = Σ p(1-p) f     g_k = Σ (y - p)
    ⎣ B_1          C_1      ⎦ ⎣ db_1 ⎦   ⎣ g_1   ⎦        C_k = Σ p(1-p)       weighted sums over labelled drafts

    dw   = (Σ h_k - Σ B_k g_k / C_k) / (Σ a_k - Σ B_k² / C_k)        the ridge is added to Σ a_k and to every C_k
    db_k = (g_k - B_k dw) / C_k

A coefficient with n labels (the sum of their weights) takes n / (m + damping) of its step: m = n the first time, later
the labels of all cycles so far, but no more than memory * n. So the first fit is made at once, later ones are averaged
over about `memory` cycles. A step of more than three standard errors is no noise but a change: there m = n.
Steps are clipped, the slope is kept at 0 or more, and the intercepts are solved for the slope step actually taken. What
is not finite moves by 0.
"""

import torch
import triton
import triton.language as tl

from av_triton.backend import use_triton
from av_triton.ops.select import Q30

# Rows of the sums int64 [..., 6, P], Q30.
SUMS = 6
A, B, C, H, G, N = range(SUMS)

CHANGE = 9.0  # squared standard errors of a step, beyond which it is taken whole
MOST_LABELS = 1 << 62  # Q30, of earlier cycles: by then `memory` decides; another cycle, below 2^55, still fits

_Q30 = tl.constexpr(float(Q30))
_CHANGE = tl.constexpr(CHANGE)
_MOST_LABELS = tl.constexpr(MOST_LABELS)


def count_labels(labels: torch.Tensor, sums: torch.Tensor) -> None:
    """Add a cycle's labels, sums [strata, 6, K], to those of earlier cycles, int64 Q30 [strata, K], in place."""
    labels.add_(sums[:, N]).clamp_(max=MOST_LABELS)


def refit_reference(
    sums: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    ridge: float = 1e-3,
    damping: float = 50.0,
    max_slope_step: float = 0.1,
    max_intercept_step: float = 2.0,
    before: torch.Tensor | None = None,
    memory: float = 8.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `refit`, for any leading dimensions: sums [..., 6, K], slope [...], intercepts and before [..., K]."""
    a, b, c, h, g, n = (sums[..., i, :].double() / Q30 for i in range(SUMS))
    past = torch.zeros_like(n) if before is None else before.double() / Q30

    def damped(step: torch.Tensor, information: torch.Tensor, n: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        m = torch.where(step * step * information > CHANGE, n, torch.minimum(past + n, memory * n))
        return step * (n / (m + damping))

    c = c + ridge
    information = a.sum(-1) + ridge - (b * b / c).sum(-1)
    dw = damped((h.sum(-1) - (b * g / c).sum(-1)) / information, information, n.sum(-1), past.sum(-1))
    dw = torch.where(n.sum(-1) > 0, torch.nan_to_num(dw, nan=0.0, posinf=0.0, neginf=0.0), 0.0)
    dw = torch.maximum(dw.clamp(-max_slope_step, max_slope_step), -slope.double())
    db = damped((g - b * dw[..., None]) / c, c, n, past)
    db = torch.where(n > 0, torch.nan_to_num(db, nan=0.0, posinf=0.0, neginf=0.0), 0.0)
    db = db.clamp(-max_intercept_step, max_intercept_step)
    return (slope.double() + dw).float(), (intercepts.double() + db).float()


@triton.jit
def _damped(step, information, n, past, DAMPING, MEMORY):
    m = tl.where(step * step * information > _CHANGE, n, tl.minimum(past + n, MEMORY * n))
    return step * (n / (m + DAMPING))


@triton.jit
def solve(sums, labels, slope, intercepts, K, RIDGE, DAMPING, MEMORY, MAX_DW, MAX_DB, P: tl.constexpr):
    """Newton step in place on one stratum's coefficients, from its sums [6, P] in memory: they are cleared, and their
    labels added to those of earlier cycles [P]."""
    k = tl.arange(0, P)
    mask = k < K
    a = tl.load(sums + k, mask=mask, other=0, cache_modifier=".cg").to(tl.float64) / _Q30
    b = tl.load(sums + P + k, mask=mask, other=0, cache_modifier=".cg").to(tl.float64) / _Q30
    c = tl.load(sums + 2 * P + k, mask=mask, other=0, cache_modifier=".cg").to(tl.float64) / _Q30 + RIDGE
    h = tl.load(sums + 3 * P + k, mask=mask, other=0, cache_modifier=".cg").to(tl.float64) / _Q30
    g = tl.load(sums + 4 * P + k, mask=mask, other=0, cache_modifier=".cg").to(tl.float64) / _Q30
    new = tl.load(sums + 5 * P + k, mask=mask, other=0, cache_modifier=".cg")
    before = tl.load(labels + k, mask=mask, other=0)
    n, past = new.to(tl.float64) / _Q30, before.to(tl.float64) / _Q30
    total = tl.sum(n, 0)
    w = tl.load(slope).to(tl.float64)
    information = tl.sum(a, 0) + RIDGE - tl.sum(b * b / c, 0)
    dw = (tl.sum(h, 0) - tl.sum(b * g / c, 0)) / information
    dw = _damped(dw, information, total, tl.sum(past, 0), DAMPING, MEMORY)
    dw = tl.where((total > 0) & (tl.abs(dw) < float("inf")), dw, 0.0)  # false for a NaN
    dw = tl.maximum(tl.minimum(tl.maximum(dw, -MAX_DW), MAX_DW), -w)
    db = _damped((g - b * dw) / c, c, n, past, DAMPING, MEMORY)
    db = tl.where((n > 0) & (tl.abs(db) < float("inf")), db, 0.0)
    db = tl.minimum(tl.maximum(db, -MAX_DB), MAX_DB)
    tl.store(slope, (w + dw).to(tl.float32))
    old = tl.load(intercepts + k, mask=mask, other=0.0).to(tl.float64)
    tl.store(intercepts + k, (old + db).to(tl.float32), mask=mask)
    tl.store(labels + k, tl.minimum(before + new, _MOST_LABELS), mask=mask)
    for i in tl.static_range(6):
        tl.store(sums + i * P + k, tl.zeros([P], tl.int64))


@triton.jit
def refit_kernel(
    sums, labels, slope, intercepts, K,
    RIDGE: tl.constexpr, DAMPING: tl.constexpr, MEMORY: tl.constexpr, MAX_DW: tl.constexpr, MAX_DB: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    at = s * P
    solve(sums + 6 * at, labels + at, slope + s, intercepts + at, K, RIDGE, DAMPING, MEMORY, MAX_DW, MAX_DB, P)


@torch.library.custom_op("av_triton::refit", mutates_args=())
def _refit(
    sums: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    ridge: float,
    damping: float,
    max_slope_step: float,
    max_intercept_step: float,
    before: torch.Tensor | None,
    memory: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not use_triton(sums.device):
        return refit_reference(
            sums, slope, intercepts, ridge, damping, max_slope_step, max_intercept_step, before, memory
        )
    strata, _, positions = sums.shape
    P = triton.next_power_of_2(positions)
    past = sums.new_zeros(strata, positions) if before is None else before
    # Copies: the kernel works in place.
    padded, labels, b = (torch.nn.functional.pad(x, (0, P - positions)).clone() for x in (sums, past, intercepts))
    w = slope.clone()
    refit_kernel[(strata,)](
        padded, labels, w, b, positions, RIDGE=ridge, DAMPING=damping, MEMORY=memory, MAX_DW=max_slope_step,
        MAX_DB=max_intercept_step, P=P,
    )  # fmt: skip
    return w, b[:, :positions].clone()


@_refit.register_fake
def _(
    sums: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    ridge: float,
    damping: float,
    max_slope_step: float,
    max_intercept_step: float,
    before: torch.Tensor | None,
    memory: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(slope), torch.empty_like(intercepts)


def refit(
    sums: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    ridge: float = 1e-3,
    damping: float = 50.0,
    max_slope_step: float = 0.1,
    max_intercept_step: float = 2.0,
    before: torch.Tensor | None = None,
    memory: float = 8.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slope, intercepts) after one damped Newton step of every stratum.

    Args:
        sums: int64 [strata, 6, K] as `accumulate` gives them.
        slope: float32 [strata]. intercepts: float32 [strata, K].
        before: int64 [strata, K], labels of earlier refits in Q30; None: none.
        ridge, damping, max_slope_step, max_intercept_step, memory: see `Settings`.

    Returns:
        float32 [strata] and [strata, K]. A position without labels stays where it is.
    """
    if sums.dtype != torch.int64 or sums.dim() != 3 or sums.shape[1] != SUMS:
        raise ValueError(f"sums are {sums.dtype} {tuple(sums.shape)}: give int64 [strata, {SUMS}, K]")
    strata, _, positions = sums.shape
    if slope.shape != (strata,) or intercepts.shape != (strata, positions):
        raise ValueError(
            f"slope {tuple(slope.shape)} and intercepts {tuple(intercepts.shape)} do not fit sums {tuple(sums.shape)}: "
            f"give ({strata},) and ({strata}, {positions})"
        )
    if not (slope.dtype == intercepts.dtype == torch.float32 and slope.device == intercepts.device == sums.device):
        raise ValueError(f"slope and intercepts must be float32 on {sums.device}, as the sums")
    if before is not None and (
        before.shape != intercepts.shape or before.dtype != torch.int64 or before.device != sums.device
    ):
        raise ValueError(
            f"before is {before.dtype} {tuple(before.shape)} on {before.device}: give int64 {tuple(intercepts.shape)} "
            f"on {sums.device}"
        )
    return _refit(sums, slope, intercepts, ridge, damping, max_slope_step, max_intercept_step, before, memory)
