"""accumulate and refit against float64 sums and numpy's solver."""

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from av_triton import accumulate, refit
from av_triton.ops.accumulate import LARGEST_ENTRY

properties = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
Q30 = 1 << 30


def batch(generator, rows=150, positions=5, strata=2):
    f = torch.randn(rows, positions, generator=generator) * 3
    f[generator.initial_seed() % rows, 1] = -40.0
    admitted = torch.randint(0, positions + 1, (rows,), generator=generator).int()
    accepted = torch.minimum(torch.randint(-1, positions + 1, (rows,), generator=generator).int(), admitted)
    return {
        "features": f,
        "accepted": accepted,
        "admitted": admitted,
        "slope": torch.linspace(0.5, 0.9, strata),
        "intercepts": torch.randn(strata, positions, generator=generator),
        "strata": torch.randint(0, strata, (rows,), generator=generator).int(),
        "teach": torch.rand(rows, generator=generator) > 0.2,
    }


def brute(features, accepted, admitted, slope, intercepts, strata=None, teach=None, acceptance=None):
    """The six sums in float64, draft by draft."""
    rows, positions = features.shape
    sums = np.zeros((len(slope), 6, positions))
    for r in range(rows):
        if teach is not None and not teach[r]:
            continue
        s, a, omega = 0 if strata is None else int(strata[r]), int(accepted[r]), 1.0
        for k in range(min(positions, int(admitted[r])) if a >= 0 else 0):
            f, y = float(features[r, k]), float(k < a)
            if acceptance is not None:
                y = min(max(float(acceptance[r, k]), 0.0), 1.0) if acceptance[r, k] == acceptance[r, k] else np.nan
            if np.isnan(y):
                break
            if f != -40.0:
                p = 1 / (1 + np.exp(-(float(slope[s]) * f + float(intercepts[s, k]))))
                v = p * (1 - p)
                sums[s, :, k] += np.array([v * f * f, v * f, v, (y - p) * f, y - p, 1]) * omega
            omega *= y
    return sums


def acceptance_for(generator, rows, positions):
    """Mostly within 0 to 1, some of it not, some of it not a number."""
    alpha = torch.rand(rows, positions, generator=generator) * 1.5 - 0.1
    odd = torch.rand(rows, positions, generator=generator)
    alpha[odd < 0.06] = torch.inf
    alpha[odd < 0.04] = -torch.inf
    alpha[odd < 0.02] = torch.nan
    return alpha


def rows_of(data, index):
    return {name: value if name in ("slope", "intercepts") else value[index] for name, value in data.items()}


def test_sums_meet_float64(backend, rng):
    data = batch(rng)
    sums, wanted = accumulate(**data), brute(**data)
    assert sums.dtype == torch.int64
    assert sums.shape == (2, 6, 5)
    assert np.array_equal(sums[:, 5].numpy(), wanted[:, 5] * Q30)
    assert np.abs(sums[:, :5].numpy() / Q30 - wanted[:, :5]).max() < 2e-4
    plain = {name: data[name] for name in ("features", "accepted", "admitted", "slope", "intercepts")}
    assert np.abs(accumulate(**plain)[:, :5].numpy() / Q30 - brute(**plain)[:, :5]).max() < 2e-4


def test_sums_of_exact_labels_meet_float64(backend, rng):
    data = batch(rng)
    data["acceptance"] = acceptance_for(rng, 150, 5)
    sums, wanted = accumulate(**data), brute(**data)
    assert np.abs(sums.numpy() / Q30 - wanted).max() < 2e-4
    verdicts = accumulate(**{**data, "acceptance": None})
    assert (sums[:, 5, 1:] != verdicts[:, 5, 1:]).any()
    wide = {**data, "acceptance": data["acceptance"].repeat_interleave(2, 1)[:, ::2]}
    assert torch.equal(accumulate(**wide), sums)


@properties
@given(seed=st.integers(0, 10**6))
def test_acceptance_of_0_and_1_gives_the_verdicts_labels_bit_for_bit(backend, seed):
    generator = torch.Generator().manual_seed(seed)
    data = batch(generator)
    alpha = (torch.rand(150, 5, generator=generator) < 0.7).float()
    hits = torch.minimum(alpha.cumprod(1).sum(1).int(), data["admitted"])
    data["accepted"] = torch.where(data["accepted"] < 0, data["accepted"], hits)
    assert torch.equal(accumulate(**data, acceptance=alpha), accumulate(**data))


def test_exact_labels_are_the_mean_of_redrawn_verdicts(backend, rng):
    data = batch(rng, rows=4)
    data["admitted"][:], data["accepted"][:] = 5, 0
    alpha = torch.rand(4, 5, generator=rng)
    exact = accumulate(**data, acceptance=alpha).double()
    draws = 2000
    many = rows_of(data, torch.arange(4).repeat(draws))
    many["accepted"] = (torch.rand(4 * draws, 5, generator=rng) < alpha.repeat(draws, 1)).int().cumprod(1).sum(1)
    mean = accumulate(**many).double() / draws
    # Five standard errors of an entry of at most 10: |f| <= 10 here.
    assert (mean - exact).abs().max() / Q30 < 5 * 10 / draws**0.5
    assert (mean - exact)[:, 4:].abs().max() / Q30 < 5 * 2 / draws**0.5


def test_a_nan_ends_the_row_s_labels_and_an_invalid_feature_only_its_own(backend):
    f = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, -40.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    alpha = torch.tensor([[0.5, 0.5, torch.nan, 0.5], [0.5, 0.5, 2.0, 0.5], [-1.0, 0.5, 0.5, 0.5]])
    four = torch.full((3,), 4)
    n = accumulate(f, four * 0, four, torch.tensor([0.5]), torch.zeros(1, 4), acceptance=alpha)[0, 5]
    assert (n / Q30).tolist() == [3, 0.5, 0.25, 0.25]


def test_what_lies_beyond_the_verified_drafts_is_not_looked_at(backend, rng):
    data = batch(rng)
    alpha = acceptance_for(rng, 150, 5)
    beyond = torch.where(torch.arange(5) < data["admitted"][:, None], alpha, torch.nan)
    assert torch.equal(accumulate(**data, acceptance=beyond), accumulate(**data, acceptance=alpha))


@pytest.mark.parametrize("positions", [1, 3, 16])
def test_any_number_of_positions_and_strata(backend, rng, positions):
    data = batch(rng, rows=70, positions=max(positions, 2), strata=3)
    if positions == 1:
        data = {n: v[:, :1] if n in ("features", "intercepts") else v for n, v in data.items()}
    data["acceptance"] = acceptance_for(rng, 70, positions)
    for labels in (data, {**data, "acceptance": None}):
        assert np.abs(accumulate(**labels)[:, :5].numpy() / Q30 - brute(**labels)[:, :5]).max() < 2e-4


@properties
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 150), max_size=5), exact=st.booleans())
def test_any_order_tiling_and_split_over_four_ranks_gives_equal_bits(backend, seed, cuts, exact):
    generator = torch.Generator().manual_seed(seed)
    data = batch(generator)
    if exact:
        data["acceptance"] = acceptance_for(generator, 150, 5)
    whole = accumulate(**data)
    order = torch.randperm(150, generator=generator)
    assert torch.equal(accumulate(**rows_of(data, order)), whole)
    edges = [0, *sorted(cuts), 150]
    tiles = [rows_of(data, slice(a, b)) for a, b in itertools.pairwise(edges)]
    assert torch.equal(sum(accumulate(**tile) for tile in tiles), whole)
    owner = torch.randint(0, 4, (150,), generator=generator)
    ranks = [accumulate(**rows_of(data, owner == rank)) for rank in (2, 0, 3, 1)]
    assert torch.equal(sum(ranks), whole)


def test_float_sums_would_depend_on_the_order(rng):
    """The check above can fail: the same contributions summed as float32 differ by the order of the rows."""
    f = (torch.randn(300, generator=rng) * 3).numpy()
    orders = [f[torch.randperm(300, generator=rng).numpy()] for _ in range(5)]
    assert len({float(functools.reduce(np.add, values)) for values in orders}) > 1


def test_vllm_54102_padding_drafts_teach_nothing(backend, rng):
    """Rows without a verdict (-1), without drafts, not taught, or invalid leave n, H and g as they are."""
    data = batch(rng, rows=20)
    whole = accumulate(**data)
    silent = rows_of(data, torch.arange(20).repeat(4))
    silent["accepted"][20:40] = -1
    silent["admitted"][40:60] = 0
    silent["features"][60:80] = -40.0
    assert torch.equal(accumulate(**silent), whole)
    untaught = rows_of(data, torch.arange(20))
    untaught["teach"] = torch.zeros(20, dtype=torch.bool)
    assert not accumulate(**untaught).any()


def test_only_drafts_up_to_the_first_rejection_are_labelled(backend):
    f = torch.zeros(5, 4)
    accepted, admitted = torch.tensor([0, 2, 4, 3, 1]), torch.tensor([4, 4, 4, 3, 1])
    n = accumulate(f, accepted, admitted, torch.tensor([0.5]), torch.zeros(1, 4))[0, 5]
    assert (n / Q30).tolist() == [5, 3, 3, 1]


def test_a_nan_feature_teaches_nothing(backend):
    f = torch.tensor([[1.0, torch.nan], [1.0, 1.0]])
    sums = accumulate(f, torch.tensor([2, 2]), torch.tensor([2, 2]), torch.tensor([0.5]), torch.zeros(1, 2))
    assert (sums[0, 5] / Q30).tolist() == [2, 1]


def test_zero_rows(backend):
    sums = accumulate(torch.zeros(0, 3), *[torch.zeros(0, dtype=torch.int32)] * 2, torch.ones(2), torch.zeros(2, 3))
    assert sums.shape == (2, 6, 3)
    assert not sums.any()


def test_no_entry_exceeds_the_bound_that_the_overflow_check_uses(backend):
    f = torch.tensor([[40.0], [-39.9], [40.0]])
    for slope, intercept in ((0.0, 0.0), (1.0, -40.0), (1.0, 40.0)):
        sums = accumulate(
            f, torch.tensor([0, 1, 1]), torch.tensor([1, 1, 1]), torch.tensor([slope]), torch.tensor([[intercept]])
        )
        assert int(sums.abs().max()) <= 3 * LARGEST_ENTRY * Q30
        alpha = torch.tensor([[torch.inf], [-torch.inf], [1.0]])
        sums = accumulate(
            *(f, torch.tensor([0, 1, 1]), torch.tensor([1, 1, 1]), torch.tensor([slope]), torch.tensor([[intercept]])),
            acceptance=alpha,
        )
        assert int(sums.abs().max()) <= 3 * LARGEST_ENTRY * Q30


def test_strided_coefficients_and_features(backend, rng):
    data = batch(rng, rows=30)
    wide = {
        "features": data["features"].repeat_interleave(2, 1)[:, ::2],
        "slope": data["slope"].repeat_interleave(2)[::2],
        "intercepts": data["intercepts"].repeat_interleave(2, 1)[:, ::2],
    }
    assert torch.equal(accumulate(**{**data, **wide}), accumulate(**data))


def quantised(values):
    return torch.from_numpy(np.round(np.asarray(values, np.float64) * Q30).astype(np.int64))


def random_sums(generator, strata=2, positions=4, labels=4000):
    """Verdicts of a logistic model, some way off the coefficients in force."""
    data = batch(generator, rows=labels, positions=positions, strata=strata)
    p = torch.sigmoid(0.8 * data["features"] + torch.linspace(1, -1, positions))
    accepted = (torch.rand(labels, positions, generator=generator) < p).int().cumprod(1).sum(1).int()
    data["accepted"] = torch.minimum(accepted, data["admitted"])
    return accumulate(**data), data["slope"], data["intercepts"]


def solved(sums, ridge):
    """(dw, db) of the full (K+1) x (K+1) system of one stratum."""
    a, b, c, h, g = sums[:5].double().numpy() / Q30
    matrix = np.diag(np.concatenate([[a.sum() + ridge], c + ridge]))
    matrix[0, 1:] = matrix[1:, 0] = b
    return np.linalg.solve(matrix, np.concatenate([[h.sum()], g]))


def test_the_arrowhead_solution_is_that_of_the_full_system(backend, rng):
    sums, slope, intercepts = random_sums(rng)
    w, b = refit(sums, slope, intercepts, ridge=1e-3, damping=0.0, max_slope_step=1e9, max_intercept_step=1e9)
    for s in range(2):
        step = solved(sums[s], 1e-3)
        assert w[s].item() == pytest.approx(max(slope[s].item() + step[0], 0), abs=1e-6)
        assert np.allclose(b[s].numpy(), intercepts[s].numpy() + step[1:], atol=1e-5)


def test_ridge_reaches_the_solution(backend, rng):
    sums, slope, intercepts = random_sums(rng, labels=150)
    free = {"damping": 0.0, "max_slope_step": 1e9, "max_intercept_step": 1e9}
    w, b = refit(sums, slope, intercepts, ridge=5.0, **free)
    step = solved(sums[0], 5.0)
    assert w[0].item() == pytest.approx(slope[0].item() + step[0], abs=1e-6)
    assert np.allclose(b[0].numpy(), intercepts[0].numpy() + step[1:], atol=1e-5)


def one_position(n, h=0.0, g=1.0, a=1.0, b=0.0, c=1.0):
    return quantised(np.array([[[a], [b], [c], [h], [g], [n]]], np.float64))


@pytest.mark.parametrize("n", [1, 50, 950])
def test_mlx_node_115_a_step_scales_with_n_over_n_plus_50(backend, n):
    _, b = refit(one_position(n), torch.tensor([0.5]), torch.zeros(1, 1), ridge=1e-9)
    assert b.item() == pytest.approx(n / (n + 50), rel=1e-6)


@pytest.mark.parametrize("past, weighs", [(0, 50), (30, 80), (100, 150), (10**6, 400)])
def test_later_refits_are_one_of_a_running_mean_over_eight_cycles(backend, past, weighs):
    before = torch.tensor([[past * Q30]])
    w, b = refit(one_position(50, a=1e9), torch.tensor([0.5]), torch.zeros(1, 1), 1e-9, before=before)
    assert b.item() == pytest.approx(50 / (weighs + 50), rel=1e-6)
    w, _ = refit(one_position(50, h=0.05, g=0.0), torch.tensor([0.5]), torch.zeros(1, 1), 1e-9, before=before)
    assert w.item() == pytest.approx(0.5 + 0.05 * 50 / (weighs + 50), rel=1e-6)
    assert int(before) == past * Q30


@pytest.mark.parametrize("errors, weighs", [(2.9, 400), (3.1, 50)])
def test_a_step_of_more_than_three_standard_errors_is_taken_whole(backend, errors, weighs):
    before = torch.tensor([[10**6 * Q30]])
    _, b = refit(one_position(50, a=1e9, g=errors * 4, c=16.0), torch.tensor([0.5]), torch.zeros(1, 1), before=before)
    assert b.item() == pytest.approx(errors / 4 * 50 / (weighs + 50), rel=1e-3)
    w, _ = refit(one_position(50, a=1e4, g=0.0, h=errors * 100), torch.tensor([0.5]), torch.zeros(1, 1), before=before)
    assert w.item() == pytest.approx(0.5 + errors / 100 * 50 / (weighs + 50), rel=1e-5)


def test_labels_of_earlier_cycles_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"before is torch.int32 \(1, 1\) on cpu: give int64 \(1, 1\) on cpu"):
        refit(one_position(5), torch.tensor([0.5]), torch.zeros(1, 1), before=torch.zeros(1, 1, dtype=torch.int32))


def test_mlx_node_115_without_labels_a_position_stays(backend, rng):
    sums, slope, intercepts = random_sums(rng)
    sums[:, :, 2] = 0
    _, b = refit(sums, slope, intercepts)
    assert torch.equal(b[:, 2], intercepts[:, 2])
    assert not torch.equal(b[:, 1], intercepts[:, 1])
    w, b = refit(torch.zeros_like(sums), slope, intercepts, damping=0.0)
    assert torch.equal(w, slope)
    assert torch.equal(b, intercepts)


def test_steps_are_clipped(backend):
    up = one_position(10**6, h=1e5, g=1e5)
    w, b = refit(up, torch.tensor([0.5]), torch.zeros(1, 1))
    assert w.item() == pytest.approx(0.6)
    assert b.item() == pytest.approx(2.0)
    down = one_position(10**6, h=-1e5, g=-1e5)
    w, b = refit(down, torch.tensor([0.5]), torch.zeros(1, 1))
    assert w.item() == pytest.approx(0.4)
    assert b.item() == pytest.approx(-2.0)


def test_the_slope_stays_at_zero_and_the_intercept_is_solved_for_the_step_taken(backend):
    """a = 4, b = 1, c = 1: with the slope held at -.05 the intercept moves by (g - b * -.05) / c."""
    sums = one_position(10**9, h=-2.0, g=0.25, a=4.0, b=1.0, c=1.0)
    w, b = refit(sums, torch.tensor([0.05]), torch.zeros(1, 1), ridge=1e-12)
    assert w.item() == 0.0
    assert b.item() == pytest.approx(0.25 + 0.05, rel=1e-5)


def test_a_component_that_is_not_finite_moves_by_zero(backend):
    """A singular system: two identical columns, no ridge."""
    sums = one_position(10**6, h=1.0, g=1.0, a=1.0, b=1.0, c=1.0)
    w, b = refit(sums, torch.tensor([0.5]), torch.zeros(1, 1), ridge=0.0)
    assert w.item() == 0.5
    assert b.isfinite().all()
    w, b = refit(one_position(5, c=0.0), torch.tensor([0.5]), torch.tensor([[0.25]]), ridge=0.0)
    assert w.isfinite().all()
    assert b.item() == 0.25


def test_refit_leaves_its_arguments_as_they_are(backend, rng):
    sums, slope, intercepts = random_sums(rng)
    before = sums.clone(), slope.clone(), intercepts.clone()
    refit(sums, slope, intercepts)
    assert all(torch.equal(x, y) for x, y in zip(before, (sums, slope, intercepts), strict=True))
