"""logit_max, its partials and their merge against log q - log(1 - q) in float64, written out here."""

import math

import numpy as np
import pytest
import torch

from av_triton import logit_from_partial, logit_max, logit_max_partial, merge_logit_max
from av_triton.ops.logit_max import EMPTY, launch_shape

TOLERANCE = 2e-6


def scaled(logits, temperature=None):
    """Logits over temperature in float64; 0 and None count as temperature 1."""
    x = logits.double().numpy()
    t = np.broadcast_to(np.asarray(1.0 if temperature is None else temperature, np.float64), x.shape[:-1])
    return x / np.where(t > 0, np.maximum(t, 1e-4), 1.0)[..., None]


def reference(logits, temperature=None):
    """log-odds of the most likely token, per row, in float64."""
    x = scaled(logits, temperature)
    out = np.empty(x.shape[:-1])
    for at in np.ndindex(out.shape):
        row = x[at]
        best = int(row.argmax())
        others = np.delete(row, best) - row[best]
        rest = np.exp(others[others > -np.inf]).sum()
        out[at] = 40.0 if rest == 0 else min(-math.log(rest), 40.0)
    return out


def assert_close(feature, wanted, tolerance=TOLERANCE):
    assert feature.dtype == torch.float32
    error = np.abs(feature.double().numpy() - wanted) / np.maximum(1.0, np.abs(wanted))
    assert error.max(initial=0.0) <= tolerance, error.max()


def row_with_log_odds(odds, vocab, generator):
    """float32 logits whose true log-odds are `odds` but for rounding: q_max against a random rest."""
    rest = torch.randn(vocab, generator=generator, dtype=torch.float64) * 2
    rest[vocab // 3] = -torch.inf
    top = torch.logsumexp(rest, 0) + odds
    rest[vocab // 3] = top
    return rest.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 2, 33, 4097])
def test_vllm_52816_sglang_35534_every_dtype_meets_float64_at_odd_vocabularies(backend, rng, dtype, vocab):
    x = (torch.randn(3, vocab, generator=rng) * 4).to(dtype)
    assert_close(logit_max(x), reference(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vocabulary_of_several_splits(backend, rng, dtype):
    vocab = 49152 + 7
    assert launch_shape(vocab, dtype.itemsize)[0] > 1
    x = (torch.randn(2, vocab, generator=rng) * 3).to(dtype)
    assert_close(logit_max(x), reference(x))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_the_largest_vocabularies(backend, rng, dtype, vocab):
    x = (torch.randn(3, vocab, generator=rng) * 3).to(dtype)
    x[1] += torch.nn.functional.one_hot(torch.tensor(vocab - 1), vocab).to(dtype) * 40
    assert_close(logit_max(x), reference(x))


@pytest.mark.parametrize("vocab", [2, 1000])
def test_confident_rows_keep_their_precision_up_to_log_odds_30(backend, rng, vocab):
    x = torch.stack([row_with_log_odds(odds, vocab, rng) for odds in np.linspace(0, 30, 31)])
    wanted = reference(x)
    assert abs(wanted - np.linspace(0, 30, 31)).max() < 1e-4
    assert_close(logit_max(x), wanted)


@pytest.mark.full
def test_confident_rows_keep_their_precision_in_a_large_vocabulary(backend, rng):
    x = torch.stack([row_with_log_odds(odds, 151_936, rng) for odds in np.linspace(0, 30, 16)])
    assert_close(logit_max(x), reference(x))


def test_the_subtracting_form_would_fail_the_tolerance(rng):
    """The check above can fail: log(sumexp - 1) in float32 is off by more than .1 at log-odds 15."""
    x = row_with_log_odds(15.0, 1000, rng)
    sumexp = torch.exp(x - x.max()).sum()
    assert abs(float(-torch.log(sumexp - 1)) - 15.0) > 0.1


@pytest.mark.parametrize("temperature", [None, 0.0, 0.3, 0.7, 1.0, 2.0])
def test_deepspec_30_31_hf_47932_dflash_74_the_scored_law_is_the_sampled_one(backend, rng, temperature):
    """f(z/T) equals the reference on the scaled row; T = 0 (argmax drafts) counts as 1."""
    x = torch.randn(4, 321, generator=rng) * 2
    assert_close(logit_max(x, temperature), reference(x, temperature))
    if temperature:
        scaled = (x.double() / temperature).float()
        assert_close(logit_max(scaled), reference(x, temperature), 4e-6)


def test_temperatures_row_by_row(backend, rng):
    x = torch.randn(2, 3, 65, generator=rng)
    t = torch.tensor([[0.0, 0.3, 0.7], [2.0, 1e-9, 5.0]])
    assert_close(logit_max(x, t), reference(x, t.double().numpy()))
    assert_close(logit_max(x, t.t().contiguous().t()), reference(x, t.double().numpy()))


def test_a_tiny_temperature_counts_as_1e_4(backend, rng):
    x = torch.randn(3, 65, generator=rng) * 1e-3
    assert torch.equal(logit_max(x, 1e-30), logit_max(x, 1e-4))
    assert_close(logit_max(x, 1e-30), reference(x, 1e-4), 1e-5)


@pytest.mark.parametrize("shape", [(33,), (0, 33), (2, 0, 33), (2, 3, 33), (2, 1, 2, 33)])
def test_leading_dimensions_and_zero_rows(backend, rng, shape):
    x = torch.randn(*shape, generator=rng)
    feature = logit_max(x)
    assert feature.shape == shape[:-1]
    assert_close(feature, reference(x))
    maximum, complement = logit_max_partial(x)
    assert maximum.shape == complement.shape == shape[:-1]


def test_any_row_stride(backend, rng):
    pool = torch.randn(5, 4, 50, generator=rng)
    for x in (pool[::2], pool[:, ::3], pool[:, :, 3:40], pool.transpose(0, 1), pool[2].expand(3, 4, 50)):
        assert torch.equal(logit_max(x), logit_max(x.contiguous()))
        assert_close(logit_max(x), reference(x))


def bad_rows(vocab):
    good = torch.linspace(-2, 3, vocab)
    rows = good.repeat(5, 1)
    rows[1] = -torch.inf
    rows[2, vocab // 2] = torch.nan
    rows[3, vocab // 4] = torch.inf
    return rows


@pytest.mark.parametrize("temperature", [None, 0.3, 0.7, 2.0])
@pytest.mark.parametrize("vocab", [33, 20_000])
def test_vllm_53029_rows_of_nan_and_infinities_disturb_no_neighbour(backend, temperature, vocab):
    rows = bad_rows(vocab)
    alone = logit_max(rows[:1].contiguous(), temperature)
    feature = logit_max(rows, temperature)
    assert feature.isfinite().all()
    assert feature[1:4].tolist() == [-40.0, -40.0, 40.0]
    assert torch.equal(feature[[0, 4]], alone.repeat(2))


def test_vllm_53029_all_nan_and_all_minus_inf(backend):
    x = torch.stack([torch.full((40,), torch.nan), torch.full((40,), -torch.inf), torch.zeros(40)])
    assert_close(logit_max(x)[2:], np.array([-math.log(39)]))
    assert logit_max(x)[:2].tolist() == [-40.0, -40.0]


@pytest.mark.parametrize("temperature", [None, 0.3, 0.7, 2.0])
@pytest.mark.parametrize("vocab,kept", [(1000, 700), (33_000, 900)])
def test_vllm_ascend_9795_llama_cpp_26275_sglang_35496_a_tail_of_minus_inf_changes_nothing(
    backend, rng, temperature, vocab, kept
):
    """At 33,000 whole splits of the row are -inf."""
    x = torch.full((2, vocab), -torch.inf)
    x[:, :kept] = torch.randn(2, kept, generator=rng) * 3
    wanted = reference(x[:, :kept], temperature)
    assert_close(logit_max(x, temperature), wanted)
    maximum, complement = logit_max_partial(x, temperature)
    assert maximum.isfinite().all()
    assert complement.isfinite().all()


def test_mask_values_of_the_lowest_finite_number_count_as_absent(backend, rng):
    x = torch.full((2, 33_000), torch.finfo(torch.float32).min)
    x[:, -500:] = torch.randn(2, 500, generator=rng)
    for temperature in (None, 0.3, 2.0):
        assert_close(logit_max(x, temperature), reference(x[:, -500:], temperature))


@pytest.mark.parametrize("temperature", [None, 0.3, 0.7, 2.0])
def test_vllm_51561_sglang_37106_four_vocabulary_shards_merge_to_the_full_row(backend, rng, temperature):
    x = torch.randn(3, 4 * 250, generator=rng) * 4
    x[1, 500:750] = -torch.inf  # an all -inf shard
    x[2, :250] = -torch.inf
    parts = [logit_max_partial(shard, temperature) for shard in x.chunk(4, dim=1)]
    merged = merge_logit_max(torch.stack([m for m, _ in parts]), torch.stack([c for _, c in parts]))
    assert_close(logit_from_partial(*merged), reference(x, temperature))
    other = merge_logit_max(torch.stack([m for m, _ in parts], 1), torch.stack([c for _, c in parts], 1), dim=1)
    assert torch.equal(merged[0], other[0])
    assert torch.equal(merged[1], other[1])


def test_a_shard_with_a_nan_invalidates_its_row_only(backend, rng):
    x = torch.randn(3, 60, generator=rng)
    x[1, 45] = torch.nan
    parts = [logit_max_partial(shard.contiguous()) for shard in x.chunk(4, dim=1)]
    merged = merge_logit_max(torch.stack([m for m, _ in parts]), torch.stack([c for _, c in parts]))
    feature = logit_from_partial(*merged)
    assert feature[1] == -40
    assert_close(feature[[0, 2]], reference(x[[0, 2]]))


def test_partials_are_the_maximum_and_the_rest(backend, rng):
    x = torch.randn(4, 77, generator=rng)
    x[3] = -torch.inf
    for temperature in (None, 0.7):
        maximum, complement = logit_max_partial(x, temperature)
        scaled = x.double() / (temperature or 1.0)
        assert torch.allclose(maximum[:3].double(), scaled[:3].max(1).values, rtol=1e-6)
        rest = torch.exp(scaled[:3] - scaled[:3].max(1, keepdim=True).values).sum(1) - 1
        assert torch.allclose(complement[:3].double(), rest, rtol=1e-5)
        assert maximum[3] == EMPTY
        assert complement[3] == 0


def test_equal_maxima_in_one_row_and_across_shards(backend):
    x = torch.zeros(1, 24)
    assert_close(logit_max(x), np.array([-math.log(23)]))
    parts = [logit_max_partial(shard.contiguous()) for shard in x.chunk(3, dim=1)]
    merged = merge_logit_max(torch.stack([m for m, _ in parts]), torch.stack([c for _, c in parts]))
    assert_close(logit_from_partial(*merged), np.array([-math.log(23)]))


def test_merging_in_any_grouping_agrees(backend, rng):
    x = torch.randn(2, 96, generator=rng) * 5
    m, c = (torch.stack(t) for t in zip(*(logit_max_partial(s.contiguous()) for s in x.chunk(6, 1)), strict=True))
    left = merge_logit_max(m[:4], c[:4])
    pair = [torch.stack([a, b]) for a, b in zip(left, merge_logit_max(m[4:], c[4:]), strict=True)]
    assert torch.allclose(logit_from_partial(*merge_logit_max(*pair)), logit_from_partial(*merge_logit_max(m, c)))


def test_large_logits_neither_overflow_nor_lose_precision(backend, rng):
    x = torch.randn(2, 50, generator=rng) + torch.tensor([[3e4], [-3e4]])
    assert_close(logit_max(x), reference(x))
