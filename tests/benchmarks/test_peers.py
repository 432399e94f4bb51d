"""The peers compute what they are compared for."""

import numpy as np
import pytest
import torch
import triton

import av_triton as av
from av_triton.ops.logit_max import logit_max_reference
from benchmarks.kernels.device import topk_torch
from benchmarks.peers import confidence
from benchmarks.peers.budget import budget


@pytest.mark.parametrize("form", ["score_blocks", "score_torch"])
@pytest.mark.parametrize("vocab", [50, 4096, 9000])
def test_the_published_form_scores_as_ours(form, vocab, rng):
    if form == "score_blocks" and not triton.knobs.runtime.interpret:
        pytest.skip("kernels on CPU tensors need TRITON_INTERPRET=1")
    logits = torch.randn(3, 4, vocab, generator=rng)
    slope, intercepts, temperature = (
        torch.tensor([0.5]),
        torch.tensor([0.1, 0.0, -0.3, -0.4]),
        torch.tensor([1, 0, 2.0]),
    )
    f, p = getattr(confidence, form)(logits, slope, intercepts, temperature)
    expected = logit_max_reference(logits.double(), temperature[:, None].expand(3, 4).double())
    torch.testing.assert_close(f.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(p, torch.sigmoid(slope * f + intercepts))


def test_the_published_form_cancels_for_a_confident_row():
    logits = torch.zeros(1, 1, 100)
    logits[..., 3] = 25
    f, _ = confidence.score_torch(logits, torch.ones(1), torch.zeros(1), torch.ones(1))
    assert abs(float(f) - float(av.logit_max(logits))) > 1


@pytest.mark.parametrize("seed", range(5))
def test_the_numpy_budget_is_the_argmax(seed):
    generator = np.random.default_rng(seed)
    p = generator.random((6, 3), dtype=np.float32)
    cost = np.maximum.accumulate(generator.random(19)) + 0.5
    s = np.sort(np.cumprod(p, 1).ravel())[::-1]
    assert budget(p, cost) == max(range(19), key=lambda n: (6 + s[:n].sum(dtype=np.float64)) / cost[n])


def test_the_top_k_of_torch_admits_as_ours(rng):
    survival = av.survival(torch.rand(9, 5, generator=rng))
    drafts = torch.full((9,), 5, dtype=torch.int32)
    ours = av.segmented_topk(survival, drafts, torch.tensor([17], dtype=torch.int32))
    assert torch.equal(topk_torch(survival, 17), ours)
