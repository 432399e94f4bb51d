"""segmented_topk against a plain sort of all drafts."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from av_triton import segmented_topk, survival

properties = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


def brute(s, drafts, budgets, segments=None):
    """Sort all drafts of a segment by (survival, position, row); the first `budget` of them are admitted."""
    rows = len(s)
    offsets = [0, rows] if segments is None else segments
    admitted = [0] * rows
    for (first, last), budget in zip(itertools.pairwise(offsets), budgets, strict=True):
        order = sorted((-s[r][k], k, r) for r in range(first, last) for k in range(min(max(drafts[r], 0), len(s[r]))))
        for _, _k, r in order[: max(budget, 0)]:
            admitted[r] += 1
    return admitted


def run(s, drafts, budgets, segments=None):
    segments = None if segments is None else torch.tensor(segments, dtype=torch.int32)
    return segmented_topk(
        torch.as_tensor(s, dtype=torch.float32),
        torch.tensor(drafts, dtype=torch.int32),
        torch.tensor(budgets, dtype=torch.int32),
        segments,
    )


@st.composite
def cases(draw):
    rows, positions = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    # Few distinct values, so that ties are the rule.
    value = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
    s = [sorted(draw(st.lists(value, min_size=positions, max_size=positions)), reverse=True) for _ in range(rows)]
    drafts = draw(st.lists(st.integers(0, positions), min_size=rows, max_size=rows))
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    segments = [0, *cuts, rows]
    budgets = draw(st.lists(st.integers(-2, rows * positions + 3), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    return s, drafts, budgets, segments


@properties
@given(case=cases())
def test_is_a_sort_of_all_drafts(backend, case):
    s, drafts, budgets, segments = case
    admitted = run(s, drafts, budgets, segments)
    assert admitted.dtype == torch.int32
    assert admitted.tolist() == brute(s, drafts, budgets, segments)
    for seg, (first, last) in enumerate(itertools.pairwise(segments)):
        there = sum(drafts[first:last])
        assert int(admitted[first:last].sum()) == min(max(budgets[seg], 0), there)


@pytest.mark.parametrize("rows,positions", [(200, 7), pytest.param(1024, 16, marks=pytest.mark.full)])
def test_larger_batches(backend, rng, rows, positions):
    s = survival(torch.rand(rows, positions, generator=rng))
    s[::3] = s[0]  # ties over rows
    drafts = torch.randint(0, positions + 1, (rows,), generator=rng).tolist()
    for budget in (0, 1, rows, rows * positions // 3, sum(drafts) - 1, sum(drafts), 1 << 30, -5):
        assert run(s, drafts, [budget]).tolist() == brute(s.tolist(), drafts, [budget])


def test_ties_go_by_position_then_row(backend):
    """Deepest position first among equals would bias the output."""
    s = [[0.5] * 3] * 3
    lengths = [run(s, [3, 3, 3], [budget]).tolist() for budget in range(10)]
    assert lengths == [
        [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2], [3, 2, 2], [3, 3, 2], [3, 3, 3]
    ]  # fmt: skip
    # Where depths differ, the order shows in the lengths.
    assert [run(s, [3, 1, 3], [budget]).tolist() for budget in (1, 2, 3, 5, 6)] == [
        [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 2], [3, 1, 2]
    ]  # fmt: skip


def test_the_worked_example(backend):
    assert run([[0.9, 0.7, 0.3], [0.6, 0.2, 0.1], [0.8, 0.5, 0.4]], [3, 3, 3], [4]).tolist() == [2, 1, 1]


def test_empty_segments_and_zero_rows(backend):
    assert run([[0.9], [0.8], [0.7]], [1, 1, 1], [5, 1, 5, 1, 9], [0, 0, 2, 2, 3, 3]).tolist() == [1, 0, 1]
    assert run(torch.zeros(0, 4), [], [3]).tolist() == []
    assert run(torch.zeros(0, 4), [], [3, 1], [0, 0, 0]).tolist() == []
    assert run([[0.9, 0.8]] * 4, [0, 0, 0, 0], [3]).tolist() == [0, 0, 0, 0]


def test_rows_outside_every_segment_admit_nothing(backend):
    assert run([[0.9, 0.8]] * 5, [2] * 5, [9, 9], [1, 2, 4]).tolist() == [0, 2, 2, 2, 0]


def test_offsets_beyond_the_rows_are_kept_within_them(backend):
    """Values on the device cannot be checked: they may not reach past the batch."""
    assert run([[0.9, 0.8]] * 3, [2] * 3, [1, 9], [-2, 1, 50]).tolist() == [1, 2, 2]


def test_zero_and_subnormal_survivals_and_ones(backend):
    s = [[1.0, 1.0, 0.0], [1.0, 1e-40, 0.0], [1.0, 0.5, 1e-44]]
    for budget in range(10):
        assert run(s, [3, 3, 3], [budget]).tolist() == brute(s, [3, 3, 3], [budget])


def test_neighbouring_floats_are_told_apart(backend):
    base = torch.tensor(0.7)
    s = torch.stack([base, torch.nextafter(base, torch.tensor(1.0)), torch.nextafter(base, torch.tensor(0.0))])[:, None]
    assert [run(s, [1] * 3, [budget]).tolist() for budget in (1, 2)] == [[0, 1, 0], [1, 1, 0]]


def test_survivals_that_rise_or_are_no_numbers(backend):
    """Made non-increasing first, so that what is admitted stays a prefix; NaN ranks last."""
    s = [[0.3, 0.9, 0.2], [torch.nan, 1.0, 1.0], [0.25, 0.25, 7.0], [5.0, 0.0, 0.0]]
    assert [run(s, [3] * 4, [budget]).tolist() for budget in (1, 3, 4, 6, 7)] == [
        [0, 0, 0, 1], [2, 0, 0, 1], [2, 0, 1, 1], [2, 0, 3, 1], [3, 0, 3, 1]
    ]  # fmt: skip


@settings(properties, max_examples=8)
@given(seed=st.integers(0, 10**6), row=st.integers(0, 5), factor=st.floats(1, 3), budget=st.integers(0, 20))
def test_sglang_36136_raising_a_row_never_lowers_its_allocation(backend, seed, row, factor, budget):
    p = torch.rand(6, 4, generator=torch.Generator().manual_seed(seed))
    raised = p.clone()
    raised[row] = (raised[row] * factor).clamp_max(1)
    before, after = (run(survival(each), [4] * 6, [budget]) for each in (p, raised))
    assert after[row] >= before[row]


def test_int64_drafts_and_strided_survivals(backend, rng):
    s = survival(torch.rand(6, 5, generator=rng))
    wide = torch.zeros(6, 10)
    wide[:, ::2] = s
    drafts = torch.tensor([5, 4, 3, 2, 1, 0])
    budgets = torch.tensor([7], dtype=torch.int32)
    assert torch.equal(segmented_topk(wide[:, ::2], drafts, budgets), segmented_topk(s, drafts.int(), budgets))
