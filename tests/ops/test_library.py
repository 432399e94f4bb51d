"""Every op as a torch.library op: its fake implementation agrees with it, and torch.compile traces through it."""

import pytest
import torch

import av_triton
from av_triton.ops.score import _score_logits  # noqa: F401  (registers the ops)

INTS = {"dtype": torch.int32}


def calls():
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 20, generator=g)
    w, b = torch.tensor([0.5]), torch.zeros(3)
    s = av_triton.survival(torch.rand(4, 3, generator=g))
    drafts, verdict = torch.tensor([3, 2, 0, 1], **INTS), torch.tensor([1, 2, 0, -1], **INTS)
    segments, two = torch.tensor([0, 1, 4], **INTS), torch.tensor([2, 3], **INTS)
    t = torch.tensor([[0.5, 0.7, 0.0], [1.0, 2.0, 3.0]])
    seeds = torch.arange(6).view(2, 3)
    cost = torch.linspace(1, 3, 13, dtype=torch.float64)
    sums = av_triton.accumulate(torch.randn(4, 3, generator=g), verdict, drafts, w, b[None])
    ops = torch.ops.av_triton
    return {
        "logit_max": (av_triton.logit_max, (x,), ops.logit_max, (x, t, 0.0)),
        "logit_max_partial": (av_triton.logit_max_partial, (x, 0.7), ops.logit_max_partial, (x, None, 0.7)),
        "logit_max_and_entropy": (
            av_triton.logit_max_and_entropy, (x, t), ops.logit_max_and_entropy, (x, None, 0.7),
        ),
        "entropy_partial": (av_triton.entropy_partial, (x, 0.7), ops.entropy_partial, (x, t, 0.0)),
        "merge_entropy": (
            av_triton.merge_entropy, (x, x.abs(), x.abs(), 1), ops.merge_entropy, (x, x.abs(), x.abs(), -1),
        ),
        "merge_logit_max": (av_triton.merge_logit_max, (x, x.abs(), 1), ops.merge_logit_max, (x, x.abs(), -1)),
        "acceptance_score": (av_triton.acceptance_score, (x[..., 0], w, b), ops.acceptance_score, (x[..., 0], w, b)),
        "score_logits": (av_triton.score_logits, (x, w, b, t[:, 0]), ops.score_logits, (x, w, b, None, 0.3)),
        "sample_and_score": (
            av_triton.sample_and_score, (x, seeds, t), ops.sample_and_score, (x, seeds, None, 0.3),
        ),
        "survival": (av_triton.survival, (s, drafts), ops.survival, (s, None)),
        "segmented_topk": (
            av_triton.segmented_topk, (s, drafts, two, segments), ops.segmented_topk, (s, drafts, two[:1], None),
        ),
        "choose_budget": (
            av_triton.choose_budget, (s, drafts, cost, two, segments), ops.choose_budget,
            (s, drafts, cost, None, segments, 5, "lookahead"),
        ),
        "accumulate": (
            av_triton.accumulate, (x[0].t()[:4].contiguous(), verdict, drafts, w, b[None]), ops.accumulate,
            (s, verdict, drafts, w, b[None], torch.zeros(4, **INTS), torch.ones(4, dtype=torch.bool), s / 2),
        ),
        "refit": (
            av_triton.refit, (sums, w, b[None]), ops.refit, (sums, w, b[None], 1e-3, 50.0, 0.1, 2.0, sums[:, 5], 4.0),
        ),
    }  # fmt: skip


NAMES = list(calls())


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(backend, name):
    _, _, op, arguments = calls()[name]
    torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_compile_traces_through_the_public_function(backend, name):
    public, arguments, _, _ = calls()[name]
    torch._dynamo.reset()
    compiled = torch.compile(public, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*arguments), public(*arguments), rtol=0, atol=0)


def test_every_public_op_is_in_this_file():
    ops = {n for n in av_triton.__all__ if n[0].islower()} - {"logit_from_partial", "entropy_from_partial"}
    assert ops == set(NAMES)
