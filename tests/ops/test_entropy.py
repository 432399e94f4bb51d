"""Entropy, its partials and their merge against - sum of q log q in float64, written out here."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from av_triton import (
    entropy_from_partial,
    entropy_partial,
    logit_from_partial,
    logit_max,
    logit_max_and_entropy,
    logit_max_partial,
    merge_entropy,
    merge_logit_max,
)
from av_triton.ops.entropy import entropy_reference
from av_triton.ops.logit_max import launch_shape
from tests.ops.test_logit_max import bad_rows, row_with_log_odds, scaled

TOLERANCE = 1e-5  # of the entropy; documented: 1e-4, for a GPU's logarithm is not the interpreter's

properties = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entropy(x, temperature=None):
    return logit_max_and_entropy(x, temperature)[1]


def reference(logits, temperature=None):
    """Entropy per row in nats, float64."""
    x = scaled(logits, temperature)
    out = np.empty(x.shape[:-1])
    for at in np.ndindex(out.shape):
        row = x[at][x[at] > -np.inf]
        best = int(row.argmax())
        d = row - row[best]
        log_q = d - np.log1p(np.exp(np.delete(d, best)).sum())
        out[at] = -(np.exp(log_q) * log_q).sum()
    return out


def assert_close(found, wanted, tolerance=TOLERANCE):
    assert found.dtype == torch.float32
    error = np.abs(found.double().numpy() - wanted) / np.maximum(wanted, 1e-30)
    assert error.max(initial=0.0) <= tolerance, error.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 2, 33, 4097])
def test_every_dtype_meets_float64_at_odd_vocabularies(backend, rng, dtype, vocab):
    x = (torch.randn(3, vocab, generator=rng) * 4).to(dtype)
    assert_close(entropy(x), reference(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_several_splits(backend, rng, dtype):
    vocab = 49152 + 7
    assert launch_shape(vocab, dtype.itemsize)[0] > 1
    x = (torch.randn(2, vocab, generator=rng) * 3).to(dtype)
    assert_close(entropy(x), reference(x))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_the_largest_vocabularies(backend, rng, dtype, vocab):
    x = (torch.randn(3, vocab, generator=rng) * 3).to(dtype)
    x[1] += torch.nn.functional.one_hot(torch.tensor(vocab - 1), vocab).to(dtype) * 40
    assert_close(entropy(x), reference(x))


@pytest.mark.parametrize("vocab", [2, 1000, 20_000])
def test_confident_rows_keep_their_precision_below_1e_11(backend, rng, vocab):
    x = torch.stack([row_with_log_odds(odds, vocab, rng) for odds in np.linspace(0, 30, 16)])
    wanted = reference(x)
    assert wanted.min() < 1e-11
    assert_close(entropy(x), wanted)


@pytest.mark.parametrize("odds, off_by", [(15.0, 0.1), (20.0, 0.99)])
def test_the_subtracting_form_would_fail_the_tolerance(rng, odds, off_by):
    """The check above can fail: logsumexp less the mean logit, in float32."""
    x = row_with_log_odds(odds, 1000, rng)
    found = torch.logsumexp(x, 0) - (torch.softmax(x, 0) * x).sum()
    assert abs(float(found) / reference(x[None])[0] - 1) > off_by


def test_a_certain_row_has_none(backend):
    x = torch.full((2, 700), -torch.inf)
    x[0, 3], x[1] = 7.0, torch.nn.functional.one_hot(torch.tensor(99), 700) * 3e3
    assert entropy(x).tolist() == [0, 0]
    assert entropy(torch.randn(3, 1)).tolist() == [0, 0, 0]


def test_the_feature_beside_it_is_that_of_logit_max(backend, rng):
    x = torch.cat([torch.randn(3, 700, generator=rng) * 5, bad_rows(700)])
    for temperature in (None, 0.3):
        assert torch.equal(logit_max_and_entropy(x, temperature)[0], logit_max(x, temperature))


@pytest.mark.parametrize("temperature", [None, 0.0, 0.3, 0.7, 1.0, 2.0, 100.0])
def test_the_law_is_that_of_the_drafter_s_temperature(backend, rng, temperature):
    x = torch.randn(4, 321, generator=rng) * 2
    assert_close(entropy(x, temperature), reference(x, temperature))


def test_temperatures_row_by_row(backend, rng):
    x = torch.randn(2, 3, 65, generator=rng)
    t = torch.tensor([[0.0, 0.3, 0.7], [2.0, 1e-2, 5.0]])
    assert_close(entropy(x, t), reference(x, t.double().numpy()))
    assert_close(entropy(x, t.t().contiguous().t()), reference(x, t.double().numpy()))
    assert torch.equal(entropy(x, 1e-30), entropy(x, 1e-4))


@pytest.mark.parametrize("shape", [(33,), (0, 33), (2, 0, 33), (2, 3, 33), (2, 1, 2, 33)])
def test_leading_dimensions_and_zero_rows(backend, rng, shape):
    x = torch.randn(*shape, generator=rng)
    assert entropy(x).shape == shape[:-1]
    assert_close(entropy(x), reference(x))
    assert {part.shape for part in entropy_partial(x)} == {torch.Size(shape[:-1])}


def test_any_row_stride(backend, rng):
    pool = torch.randn(5, 4, 50, generator=rng)
    for x in (pool[::2], pool[:, ::3], pool[:, :, 3:40], pool.transpose(0, 1), pool[2].expand(3, 4, 50)):
        assert torch.equal(entropy(x), entropy(x.contiguous()))
        assert_close(entropy(x), reference(x))


@pytest.mark.parametrize("temperature", [None, 0.3, 2.0])
@pytest.mark.parametrize("vocab", [33, 20_000])
def test_invalid_rows_have_none_and_disturb_no_neighbour(backend, temperature, vocab):
    """All -inf, a NaN, and a +inf, which is certain."""
    rows = bad_rows(vocab)
    found = entropy(rows, temperature)
    assert found[1:4].tolist() == [0, 0, 0]
    assert torch.equal(found[[0, 4]], entropy(rows[:1].contiguous(), temperature).repeat(2))


@pytest.mark.parametrize("temperature", [None, 0.3, 2.0])
@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min, -1e38])
@pytest.mark.parametrize("vocab,kept", [(1000, 700), (33_000, 900)])
def test_tokens_that_are_masked_change_nothing(backend, rng, temperature, fill, vocab, kept):
    """At 33,000 in whole splits, once before and once after the others."""
    x = torch.full((2, vocab), fill)
    x[0, :kept], x[1, -kept:] = torch.randn(2, kept, generator=rng) * 3
    wanted = reference(torch.stack([x[0, :kept], x[1, -kept:]]), temperature)
    assert_close(entropy(x, temperature), wanted)
    assert all(part.isfinite().all() for part in entropy_partial(x, temperature))


@pytest.mark.parametrize("temperature", [None, 0.3, 2.0])
def test_vocabulary_shards_in_any_order_merge_to_the_full_row(backend, rng, temperature):
    x = torch.randn(3, 4 * 250, generator=rng) * 4
    x[1, 500:750] = -torch.inf
    x[2, :250] = -1e38
    parts = [entropy_partial(shard, temperature) for shard in x.chunk(4, dim=1)]
    for order in ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)):
        shards = [torch.stack([parts[i][n] for i in order]) for n in range(3)]
        merged = merge_entropy(*shards)
        assert_close(entropy_from_partial(*merged[1:]), reference(x, temperature))
        other = merge_entropy(*(part.t() for part in shards), dim=1)
        assert all(torch.equal(a, b) for a, b in zip(merged, other, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(merged, merge_logit_max(*shards[:2]), strict=False))


def test_partials_are_those_of_logit_max_and_the_moment(backend, rng):
    x = torch.randn(4, 77, generator=rng)
    x[3] = -torch.inf
    for temperature in (None, 0.7):
        maximum, complement, moment = entropy_partial(x, temperature)
        pair = logit_max_partial(x, temperature)
        assert torch.equal(maximum, pair[0])
        assert torch.equal(complement, pair[1])
        d = x[:3].double() / (temperature or 1.0)
        d -= d.max(1, keepdim=True).values
        torch.testing.assert_close(moment[:3].double(), (d.exp() * -d).sum(1), rtol=1e-5, atol=0)
        assert moment[3] == 0


def test_a_shard_with_a_nan_invalidates_its_row_only(backend, rng):
    x = torch.randn(3, 60, generator=rng)
    x[1, 45] = torch.nan
    parts = zip(*(entropy_partial(shard.contiguous()) for shard in x.chunk(4, dim=1)), strict=True)
    maximum, complement, moment = merge_entropy(*(torch.stack(part) for part in parts))
    found = entropy_from_partial(complement, moment)
    assert found[1] == 0
    assert logit_from_partial(maximum, complement)[1] == -40
    assert_close(found[[0, 2]], reference(x[[0, 2]]))


def test_equal_logits_have_the_most(backend):
    x = torch.zeros(1, 24)
    assert_close(entropy(x), np.array([math.log(24)]))
    parts = zip(*(entropy_partial(shard.contiguous()) for shard in x.chunk(3, dim=1)), strict=True)
    assert_close(
        entropy_from_partial(*merge_entropy(*(torch.stack(part) for part in parts))[1:]), np.array([math.log(24)])
    )


def test_merging_in_any_grouping_agrees(backend, rng):
    x = torch.randn(2, 96, generator=rng) * 5
    parts = [torch.stack(t) for t in zip(*(entropy_partial(s.contiguous()) for s in x.chunk(6, 1)), strict=True)]
    left, right = (merge_entropy(*(part[at] for part in parts)) for at in (slice(4), slice(4, 6)))
    found = merge_entropy(*(torch.stack(pair) for pair in zip(left, right, strict=True)))
    torch.testing.assert_close(entropy_from_partial(*found[1:]), entropy(x), rtol=TOLERANCE, atol=0)


def test_large_logits_neither_overflow_nor_lose_precision(backend, rng):
    x = torch.randn(2, 50, generator=rng) + torch.tensor([[3e4], [-3e4]])
    assert_close(entropy(x), reference(x))


# Multiples of 1/64, so that a shift is exact.
logits_on_a_grid = st.lists(st.integers(-2000, 2000), min_size=1, max_size=40)


@properties
@given(row=logits_on_a_grid, shift=st.integers(-4000, 4000), seed=st.integers(0, 2**31))
def test_neither_order_nor_shift_matters_and_log_v_is_the_most(backend, row, shift, seed):
    x = torch.tensor([row]) / 64
    found = entropy(x)
    assert 0 <= float(found) <= math.log(len(row)) * (1 + TOLERANCE)
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(seed))
    for other in (x[:, order], x + shift / 64):
        torch.testing.assert_close(entropy(other), found, rtol=TOLERANCE, atol=1e-37)


@properties
@given(row=st.lists(st.floats(width=32), min_size=1, max_size=20), temperature=st.sampled_from([0.0, 1e-4, 1.0, 1e6]))
def test_any_numbers_at_all_have_an_entropy(backend, row, temperature):
    found = float(entropy(torch.tensor([row]), temperature))
    assert 0 <= found <= math.log(len(row)) * (1 + TOLERANCE)


def test_the_reference_is_float64_where_the_logits_are(rng):
    x = torch.randn(3, 50, generator=rng, dtype=torch.float64) * 6
    np.testing.assert_allclose(entropy_reference(x, 0.7).numpy(), reference(x, 0.7), rtol=1e-12)
