"""Sampling fused with the feature: the reference's token, the right law, and rows that are out of the ordinary."""

import numpy as np
import pytest
import scipy.stats
import torch

import av_triton as av
from av_triton.ops.logit_max import logit_max_reference
from av_triton.ops.sample import BLOCK, philox_reference, sample_and_score_reference


def test_philox_has_the_published_words():
    # Random123's known answers for counter 0 and key 0: token 0 is word 0, token BLOCK word 1, and so on.
    words = philox_reference(torch.zeros((), dtype=torch.int64), 4 * BLOCK)[::BLOCK]
    assert words.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 5, 2047, 8193, 33_000])
def test_the_token_is_the_reference_s(backend, dtype, vocab, rng):
    x = (2 * torch.randn(3, 2, vocab, generator=rng)).to(dtype)
    seeds = torch.randint(-(2**62), 2**62, (3, 2), generator=rng)
    t = torch.tensor([[1.0, 0.0], [0.3, 2.5], [5.0, 1e-6]])
    token, f, z = av.sample_and_score(x, seeds, t)
    expected = sample_and_score_reference(x, seeds, t)
    assert token.dtype == torch.int64
    assert torch.equal(token, expected[0])
    torch.testing.assert_close(f.double(), logit_max_reference(x.double(), t.double()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z.double(), expected[2], rtol=1e-5, atol=1e-5)
    assert int(token[0, 1]) == int(x[0, 1].float().argmax())


def test_the_log_normaliser_gives_probabilities(backend, rng):
    x, seeds = torch.randn(4, 700, generator=rng), torch.arange(4)
    for t in (None, 0.4):
        token, _, z = av.sample_and_score(x, seeds, t)
        at = torch.arange(4)
        expected = torch.log_softmax(x / (t or 1.0), -1)[at, token]
        torch.testing.assert_close(x[at, token] / (t or 1.0) - z, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies(temperature):
    draws = 4000  # of the reference: the kernel takes the same tokens, and the interpreter runs row by row
    x = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf, 0.5])
    seeds = torch.arange(draws) * 7919
    token = av.sample_and_score(x.expand(draws, -1).contiguous(), seeds, temperature)[0]
    p = torch.softmax(x / temperature, -1)
    counts = np.bincount(token, minlength=6)
    assert counts[4] == 0
    live = p > 0
    assert (
        scipy.stats.chisquare(counts[live], (draws * p[live].double() / p[live].double().sum()).numpy()).pvalue > 1e-4
    )


def test_tokens_far_apart_in_the_vocabulary_are_independent():
    # Equal logits at the places of one lane, of one Philox block, and of two splits.
    places = torch.tensor([3, 3 + BLOCK, 3 + 2 * BLOCK, 3 + 4 * BLOCK, 20_000])
    x = torch.full((20_480,), -torch.inf)
    x[places] = 0
    draws = 300
    token = av.sample_and_score(x.expand(draws, -1), torch.arange(draws) - 100)[0]
    counts = np.array([int((token == place).sum()) for place in places])
    assert counts.sum() == draws
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


def test_rows_out_of_the_ordinary(backend, rng):
    x = torch.randn(6, 2000, generator=rng)
    x[0] = -torch.inf
    x[1] = torch.nan
    x[2, 5] = torch.nan
    x[3, 10:] = -torch.inf
    seeds, t = torch.arange(6), torch.tensor([1.0, 1, 1, 1, 0, 1])
    x[4, [40, 1500]] = 9.0
    token, f, z = av.sample_and_score(x, seeds, t)
    assert token[:2].tolist() == [0, 0]
    assert 0 <= int(token[2]) < 2000
    assert int(token[2]) != 5
    assert int(token[3]) < 10
    assert int(token[4]) == 40
    assert f[:3].tolist() == [-40.0] * 3
    assert float(z[0]) == -torch.inf
    assert z[1:3].isnan().all()
    alone = av.sample_and_score(x[5:], seeds[5:], t[5:])
    assert all(torch.equal(a, b[5:]) for a, b in zip(alone, (token, f, z), strict=True))


def test_no_rows_and_strided_rows(backend, rng):
    assert av.sample_and_score(torch.empty(0, 9), torch.empty(0, dtype=torch.int64))[0].shape == (0,)
    wide = torch.randn(3, 64, generator=rng)
    seeds = torch.arange(3)
    found = av.sample_and_score(wide[:, :50], seeds)
    assert all(torch.equal(a, b) for a, b in zip(found, av.sample_and_score(wide[:, :50].clone(), seeds), strict=True))


@pytest.mark.parametrize("vocab", [1, 700, 33_000])
def test_without_seeds_the_first_maximum(backend, vocab, rng):
    x = torch.randn(4, vocab, generator=rng).bfloat16()
    x[0, -1] = x[0, vocab // 3] = 9.0  # a tie, far apart
    t = torch.tensor([1.0, 0.0, 0.3, 7.0])
    token, f, z = av.sample_and_score(x, None, t)
    assert torch.equal(token, x.float().argmax(-1))
    assert int(token[0]) == vocab // 3
    torch.testing.assert_close(f, av.logit_max(x, t), rtol=1e-6, atol=1e-6)
    scaled = x.double() / torch.where(t > 0, t, 1.0)[:, None]
    torch.testing.assert_close(z.double(), scaled.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_a_greedy_row_with_a_seed_takes_the_larger_of_two_neighbours(backend):
    x = torch.full((40, 8), -1.0)
    x[:, 2] = torch.linspace(1, 2, 40)
    x[:, 5] = torch.nextafter(x[:, 2], torch.tensor(9.0))
    assert av.sample_and_score(x, torch.arange(40), 0.0)[0].tolist() == [5] * 40


def test_seeds_of_any_strides(backend, rng):
    x, seeds = torch.randn(3, 4, 500, generator=rng), torch.randint(1 << 62, (4, 3), generator=rng).T
    found, expected = av.sample_and_score(x, seeds), av.sample_and_score(x, seeds.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_seeds_rows_out_of_the_ordinary(backend):
    x = torch.zeros(4, 20_000)
    x[0] = -torch.inf
    x[1] = torch.nan
    x[2, 5], x[2, 17_000] = torch.nan, 3.0
    x[3, :18_000] = -torch.inf
    token, f, z = av.sample_and_score(x, None)
    assert token.tolist() == [0, 0, 17_000, 18_000]
    assert f[:3].tolist() == [-40.0] * 3
    assert float(z[0]) == -torch.inf
    assert z[1:3].isnan().all()


@pytest.mark.parametrize(
    "seeds, says",
    [(3, "seeds are 3"), (torch.zeros(2), "give int64"), (torch.zeros(3, dtype=torch.int64), r"one per draft, \(2,\)")],
)
def test_bad_seeds(seeds, says):
    with pytest.raises(ValueError, match=says):
        av.sample_and_score(torch.zeros(2, 9), seeds)
