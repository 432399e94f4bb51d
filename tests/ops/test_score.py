"""acceptance_score, score_logits and survival against float64."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from av_triton import acceptance_score, score_logits, survival
from tests.ops.test_logit_max import assert_close, bad_rows, reference

properties = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 5), (2, 3, 7), (300, 5)])
def test_score_is_the_sigmoid_of_a_line(backend, rng, shape):
    f = torch.randn(*shape, generator=rng) * 6
    w, b = torch.tensor([0.7]), torch.linspace(-2, 2, shape[-1])
    p = acceptance_score(f, w, b)
    assert p.shape == shape
    wanted = sigmoid(0.7 * f.double().numpy() + b.double().numpy())
    assert np.abs(p.double().numpy() - wanted).max(initial=0) < 1e-6


def test_score_at_the_ends(backend):
    f = torch.tensor([[-40.0, 40.0, 0.0, -39.9]])
    for slope, intercept in ((1.0, 0.0), (0.0, 100.0), (1e6, -1e6)):
        p = acceptance_score(f, torch.tensor([slope]), torch.full((4,), intercept))
        assert p.isfinite().all()
        assert bool(((p >= 0) & (p <= 1)).all())
        assert p[0, 0] == 0, "an invalid row is never accepted, whatever the intercept"


def test_coefficients_and_features_of_any_stride(backend, rng):
    f = torch.randn(4, 10, generator=rng)
    w, b = torch.tensor([0.5]), torch.randn(10, generator=rng)
    dense = acceptance_score(f[:, ::2].contiguous(), w, b[::2].contiguous())
    assert torch.equal(acceptance_score(f[:, ::2], w, b[::2]), dense)
    x = torch.randn(2, 5, 40, generator=rng)
    assert torch.equal(score_logits(x, w, b[::2])[1], score_logits(x, w, b[::2].contiguous())[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 33), (0, 3, 33), (2, 5, 65), (2, 2, 3, 40), (1, 2, 17_000)])
def test_logits_to_feature_and_score(backend, rng, dtype, shape):
    x = (torch.randn(*shape, generator=rng) * 3).to(dtype)
    w, b = torch.tensor([0.6]), torch.linspace(-1, 1, shape[-2])
    t = torch.rand(shape[:-2], generator=rng) + 0.3
    f, p = score_logits(x, w, b, t if t.dim() else float(t))
    wanted = reference(x, np.asarray(t)[..., None])
    assert f.shape == p.shape == shape[:-1]
    assert_close(f, wanted)
    assert np.abs(p.double().numpy() - sigmoid(0.6 * wanted + b.double().numpy())).max(initial=0) < 2e-6


def test_strided_batches(backend, rng):
    x = torch.randn(4, 6, 50, generator=rng)
    w, b = torch.tensor([0.6]), torch.zeros(3)
    for view in (x[::2, ::2], x[:, 1:4], x[:3].transpose(0, 1)[::2]):
        assert torch.equal(score_logits(view, w, b[: view.shape[1]])[0], score_logits(view.contiguous(), w, b)[0])


@pytest.mark.parametrize("temperature", [None, 0.3, 2.0])
def test_vllm_53029_bad_rows_rank_last_and_a_certain_one_first(backend, temperature):
    x = bad_rows(60)[None]
    _, p = score_logits(x, torch.tensor([0.5]), torch.full((5,), 3.0), temperature)
    assert p[0, 1:3].tolist() == [0, 0]
    assert p[0, 3] == p.max()
    assert torch.equal(p[0, 0], p[0, 4])


def test_survival_is_the_running_product(backend, rng):
    for rows, positions in ((0, 3), (1, 1), (5, 7), (130, 16)):
        p = torch.rand(rows, positions, generator=rng)
        s = survival(p)
        assert s.shape == p.shape
        assert np.allclose(s.double().numpy(), np.cumprod(p.double().numpy(), 1), rtol=1e-5)
        drafts = torch.randint(-1, positions + 2, (rows,), generator=rng)
        cut = survival(p, drafts)
        inside = torch.arange(positions) < drafts[:, None]
        assert torch.equal(cut, torch.where(inside, s, 0.0))
        assert torch.equal(survival(p, drafts.int()), cut)


def test_llama_cpp_22673_thresholds_act_on_the_cumulative_product(backend):
    """Three drafts at .6 are each likely, the third is not: .6 * .6 * .6 = .216."""
    s = survival(torch.tensor([[0.6, 0.6, 0.6], [0.3, 0.9, 0.9]]))
    assert torch.allclose(s, torch.tensor([[0.6, 0.36, 0.216], [0.3, 0.27, 0.243]]))


def test_survival_of_values_that_are_no_probabilities(backend):
    p = torch.tensor([[1.5, torch.nan, 0.5], [-0.5, 1.0, 1.0], [1.0, torch.inf, 0.5]])
    assert survival(p).tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 0.5]]


@properties
@given(seed=st.integers(0, 10**6), positions=st.integers(1, 16))
def test_survival_never_rises(backend, seed, positions):
    p = torch.rand(40, positions, generator=torch.Generator().manual_seed(seed)) ** 0.1
    s = survival(p)
    assert bool((s[:, 1:] <= s[:, :-1]).all())
    assert bool((s <= 1).all() & (s >= 0).all())


def test_survival_rows_of_any_stride(backend, rng):
    p = torch.rand(6, 9, generator=rng)
    assert torch.equal(survival(p[::2, 2:7]), survival(p[::2, 2:7].contiguous()))


def test_a_parallel_scan_rises_in_some_rows(rng):
    """Why the product is sequential: pairwise products, each correctly rounded, are not monotone along the row."""
    p = torch.rand(2000, 16, generator=rng)
    p[:, 2:] = torch.where(torch.rand(2000, 14, generator=rng) < 0.5, 1.0, p[:, 2:])
    scan, step = p.clone(), 1
    while step < 16:
        scan[:, step:] = scan[:, step:] * scan[:, :-step].clone()
        step *= 2
    assert bool((scan[:, 1:] > scan[:, :-1]).any())
    sequential = survival(p)
    assert not bool((sequential[:, 1:] > sequential[:, :-1]).any())
