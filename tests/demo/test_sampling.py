"""Rejection sampling: the law of the output by chi-square, and greedy acceptance by hand."""

import pytest
import torch

from av_triton.demo.sampling import Sampler, nucleus


def test_greedy_acceptance():
    sampler = Sampler(0.0, 1.0, 0)
    # Two requests, two and one admitted drafts; target argmaxes 3, 1, 4 and 2, 0.
    logits = torch.eye(5)[torch.tensor([3, 1, 4, 2, 0])]
    drafts = torch.tensor([[3, 0, 4], [2, 0, 1]])
    accepted, following, acceptance = sampler.verify(
        logits, torch.tensor([0, 3, 5]), drafts, torch.tensor([2, 1]), torch.zeros(2, 0, 1), torch.zeros(2, 0)
    )
    assert accepted.tolist() == [1, 1]
    assert following.tolist() == [1, 0]
    assert acceptance is None


@pytest.mark.parametrize("admitted", [0, 1, 2])
def test_law_of_the_first_token(admitted):
    """p = [.7, .2, .1], q = [.1, .2, .7] at every position; the drafter's vocabulary lacks the last token or has it."""
    stats = pytest.importorskip("scipy.stats")
    n, p = 20000, torch.tensor([0.7, 0.2, 0.1])
    for q in (torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.4, 0.6])):
        sampler = Sampler(1.0, 1.0, 11)
        draft_logits = q.log().expand(n, 2, -1)
        drafts, log_normalisers = sampler.draw(draft_logits)
        offsets = torch.arange(n + 1) * (admitted + 1)
        accepted, following, acceptance = sampler.verify(
            p.log().expand(n * (admitted + 1), 3),
            offsets,
            drafts,
            torch.full((n,), admitted),
            draft_logits,
            log_normalisers,
        )
        first = torch.where(accepted > 0, drafts[:, 0], following)
        assert int(accepted.max()) <= admitted
        exact = (p[: len(q)] / q).clamp(max=1)[drafts]
        torch.testing.assert_close(acceptance[:, :admitted], exact[:, :admitted])
        assert (
            stats.chisquare(torch.bincount(first, minlength=3).numpy(), (p * n).numpy(), sum_check=False).pvalue > 1e-3
        )
        if admitted:
            shared = torch.minimum(p[: len(q)], q).sum()
            assert abs(float((accepted > 0).float().mean()) - float(shared)) < 0.015


def test_nucleus_keeps_the_smallest_set():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]]).log()
    torch.testing.assert_close(nucleus(logits[:1], 0.6), torch.tensor([[0.625, 0.375, 0, 0]]))
    assert (nucleus(logits, 0.95) > 0).sum(1).tolist() == [3, 4]
    wide = torch.zeros(1, 1000)
    assert int((nucleus(wide, 0.9) > 0).sum()) in (900, 901)


def test_nucleus_of_a_row_does_not_depend_on_the_others(rng):
    logits = torch.randn(4, 6000, generator=rng) * torch.tensor([[12.0], [3.0], [1.0], [0.1]])
    together = nucleus(logits, 0.95)
    sizes = (together > 0).sum(1).tolist()
    assert 0 < sizes[0] < 256 < sizes[1] < 4096 < sizes[3]
    p = torch.softmax(logits.double(), -1)
    for row, size in enumerate(sizes):
        torch.testing.assert_close(together[row : row + 1], nucleus(logits[row : row + 1], 0.95))
        kept = p[row].topk(size).values
        assert kept[:-1].sum() < 0.95 + 1e-5
        assert kept.sum() > 0.95 - 1e-5
        torch.testing.assert_close(together[row].topk(size).values.double(), kept / kept.sum(), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("temperature, top_p", [(-1.0, 0.9), (1e-3, 0.9), (1.0, 0.0), (1.0, 1.5)])
def test_bad_settings_are_refused(temperature, top_p):
    with pytest.raises(ValueError, match=r"give temperature 0 \(greedy\) or at least 0.01, and 0 < top-p <= 1"):
        Sampler(temperature, top_p, 0)
