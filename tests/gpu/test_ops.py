"""Every op on the device against float64, with fresh random inputs and outputs that held poison before."""

import pytest
import torch

import av_triton as av
from av_triton.ops.accumulate import accumulate_reference
from av_triton.ops.entropy import entropy_reference, gap_reference
from av_triton.ops.logit_max import logit_max_reference
from av_triton.ops.refit import refit_reference
from av_triton.ops.sample import sample_and_score_reference
from av_triton.ops.segmented_topk import segmented_topk_reference
from av_triton.ops.survival import survival_reference
from tests.gpu.conftest import DRY

pytestmark = pytest.mark.gpu


@pytest.fixture(params=range(1 if DRY else 3))
def generator(request, device):
    return torch.Generator(device).manual_seed(torch.seed() % 2**31 + request.param)


@pytest.fixture(autouse=True)
def poison(device):
    """What the allocator hands out next is full of NaN."""
    sizes = [1 << n for n in range(6, 18)]
    blocks = [torch.full((size,), float("nan"), device=device) for size in sizes]
    del blocks


def vocabularies(full):
    return (129_280, 50_257, 32_000, 7) if full else (300, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logit_max(device, full, generator, dtype):
    for vocab in vocabularies(full):
        x = (3 * torch.randn(6, 3, vocab, generator=generator, device=device)).to(dtype)
        x[0, 0], x[1, 1, -1], x[2, 2, 3:] = -torch.inf, torch.nan, -torch.inf
        t = torch.rand(6, 3, generator=generator, device=device) * 2
        found = av.logit_max(x, t).double()
        expected = logit_max_reference(x.double(), t.double())
        assert bool(((found - expected).abs() <= 1e-4 * expected.abs().clamp_min(1)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_entropy(device, full, generator, dtype):
    for vocab in vocabularies(full):
        x = (3 * torch.randn(6, 3, vocab, generator=generator, device=device)).to(dtype)
        x[0, 0], x[1, 1, -1], x[2, 2, 3:], x[3, 0, 1] = -torch.inf, torch.nan, -torch.inf, 30
        t = torch.rand(6, 3, generator=generator, device=device) * 2
        found = av.logit_max_and_entropy(x, t)
        assert torch.equal(found[0], av.logit_max(x, t))
        expected = entropy_reference(x.double(), t.double())
        torch.testing.assert_close(found[1].double(), expected, rtol=1e-4, atol=1e-37)
        shards = zip(*(av.entropy_partial(shard, t) for shard in x.tensor_split(3, -1)), strict=True)
        merged = av.merge_entropy(*(torch.stack(part) for part in shards))
        torch.testing.assert_close(av.entropy_from_partial(*merged[1:]).double(), expected, rtol=1e-4, atol=1e-37)


def test_what_a_scoring_launch_leaves_behind(device, full, generator):
    for vocab in vocabularies(full):
        x = (3 * torch.randn(6, 3, vocab, generator=generator, device=device)).bfloat16()
        x[1, 1, -1] = torch.nan
        slots, t = torch.arange(6, device=device), torch.rand(6, generator=generator, device=device) * 2
        each, per_draft = t[:, None].expand(-1, 3).double(), torch.zeros(6, 3, dtype=torch.int64, device=device)
        estimator = av.AcceptanceEstimator(6, 3, device, settings=av.Settings(entropy=True, history=True))
        seeds = torch.randint(-(2**62), 2**62, (6, 3), generator=generator, device=device)
        for how in ("drawn", "argmax", "given"):
            if how == "given":
                per_draft.random_(0, vocab, generator=generator)
                estimator.score(x, slots, None, t, per_draft)
            else:
                per_draft.copy_(estimator.sample(x, slots, seeds if how == "drawn" else None, None, t).tokens)
            entropies, gaps = (part[:, :3].double() for part in (estimator.state.entropies, estimator.state.gaps))
            torch.testing.assert_close(entropies, entropy_reference(x.double(), each), rtol=1e-4, atol=1e-37)
            expected = gap_reference(x.double(), per_draft, each)
            torch.testing.assert_close(gaps, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_score_logits(device, full, generator):
    x = torch.randn(5, 4, vocabularies(full)[0], generator=generator, device=device).bfloat16()
    w, b = torch.full((1,), 0.6, device=device), torch.randn(4, generator=generator, device=device)
    f, p = av.score_logits(x, w, b)
    torch.testing.assert_close(p.double(), torch.sigmoid(w.double() * f.double() + b.double()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(f.double(), logit_max_reference(x.double()), rtol=1e-4, atol=1e-4)


def test_sample_and_score(device, full, generator):
    for vocab in vocabularies(full):
        x = (3 * torch.randn(6, 3, vocab, generator=generator, device=device)).bfloat16()
        seeds = torch.randint(-(2**62), 2**62, (6, 3), generator=generator, device=device)
        t = torch.rand(6, 3, generator=generator, device=device) * 2
        for given in (seeds, None):
            token, f, z = av.sample_and_score(x, given, t)
            expected = sample_and_score_reference(x.cpu(), None if given is None else given.cpu(), t.cpu())
            assert torch.equal(token.cpu(), expected[0])
            torch.testing.assert_close(f.cpu().double(), expected[1].double(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(z.cpu().double(), expected[2].double(), rtol=1e-4, atol=1e-4)


def test_plan(device, full, generator):
    for rows, positions in ((1, 1), (64, 7), (1024, 16)) if full else ((1, 1), (6, 3)):
        p = torch.rand(rows, positions, generator=generator, device=device)
        drafts = torch.randint(0, positions + 1, (rows,), generator=generator, device=device, dtype=torch.int32)
        s = av.survival(p, drafts)
        torch.testing.assert_close(s, survival_reference(p, drafts), rtol=1e-6, atol=0)
        budget = torch.full((1,), int(drafts.sum()) // 2, dtype=torch.int32, device=device)
        found = av.segmented_topk(s, drafts, budget)
        assert torch.equal(found.cpu(), segmented_topk_reference(s.cpu(), drafts.cpu(), budget.cpu()))
        cost = (
            torch.rand(rows * positions + 1, generator=generator, device=device, dtype=torch.float64).cummax(0)[0] + 1
        )
        on_cpu = av.choose_budget(s.cpu(), drafts.cpu(), cost.cpu()) if full else None
        assert on_cpu is None or torch.equal(av.choose_budget(s, drafts, cost).cpu(), on_cpu)


def test_learning(device, full, generator):
    rows, positions = (500, 7) if full else (9, 3)
    f = 3 * torch.randn(rows, positions, generator=generator, device=device)
    accepted = torch.randint(-1, positions + 1, (rows,), generator=generator, device=device, dtype=torch.int32)
    admitted = torch.randint(0, positions + 1, (rows,), generator=generator, device=device, dtype=torch.int32)
    w, b = torch.full((1,), 0.5, device=device), torch.zeros(1, positions, device=device)
    alpha = 1.4 * torch.rand(rows, positions, generator=generator, device=device) - 0.2
    alpha[::7, 1] = torch.nan
    for acceptance in (alpha, None):
        sums = av.accumulate(f, accepted, admitted, w, b, acceptance=acceptance)
        expected = accumulate_reference(f.double(), accepted, admitted, w.double(), b.double(), acceptance=acceptance)
        torch.testing.assert_close(sums.double(), expected.double(), rtol=1e-4, atol=2e3 * rows)
    certain = (torch.arange(positions, device=device) < accepted[:, None]).float()
    within = torch.minimum(accepted, admitted)
    exact = av.accumulate(f, within, admitted, w, b, acceptance=certain)
    assert torch.equal(exact, av.accumulate(f, within, admitted, w, b)), "0 and 1 are the verdicts, bit for bit"
    for found, want in zip(av.refit(sums, w, b), refit_reference(sums, w, b), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)


def test_equal_bits_over_100_runs(device, full, generator):
    rows, positions = (512, 7) if full else (5, 3)
    x = torch.randn(rows, positions, 20_000 if full else 200, generator=generator, device=device).bfloat16()
    w, b = torch.full((1,), 0.5, device=device), torch.zeros(positions, device=device)
    drafts = torch.full((rows,), positions, dtype=torch.int32, device=device)

    def run():
        f, p = av.score_logits(x, w, b)
        return f, p, av.accumulate(f, drafts, drafts, w, b[None]), av.survival(p)

    first = run()
    for _ in range(100 if full else 3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))
