"""Every op over a small grid with pytest-benchmark, on a GPU where there is one, else the torch references on the CPU.

For regressions between commits (`--benchmark-save`, `--benchmark-compare`); comparisons with peers are in run.py.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import av_triton as av

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 129_280 if DEVICE == "cuda" else 4_096


def ops(rows: int, positions: int) -> dict[str, Callable[[], object]]:
    g = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, positions, VOCAB, generator=g).bfloat16().to(DEVICE)
    confidence = torch.rand(rows, positions, generator=g).to(DEVICE)
    seeds = torch.arange(rows * positions, device=DEVICE).view(rows, positions)
    drafts = torch.full((rows,), positions, dtype=torch.int32, device=DEVICE)
    budget = torch.full((1,), rows * positions // 3, dtype=torch.int32, device=DEVICE)
    slope, intercepts = torch.full((1,), 0.5, device=DEVICE), torch.full((positions,), -0.2, device=DEVICE)
    cost = torch.linspace(10, 30, rows * positions + 1, dtype=torch.float64, device=DEVICE)
    survival = av.survival(confidence)
    features = av.logit_max(logits)
    sums = av.accumulate(features, drafts, drafts, slope, intercepts[None])
    return {
        "score_logits": partial(av.score_logits, logits, slope, intercepts),
        "sample_and_score": partial(av.sample_and_score, logits, seeds),
        "survival": partial(av.survival, confidence),
        "segmented_topk": partial(av.segmented_topk, survival, drafts, budget),
        "choose_budget": partial(av.choose_budget, survival, drafts, cost),
        "accumulate": partial(av.accumulate, features, drafts, drafts, slope, intercepts[None]),
        "refit": partial(av.refit, sums, slope, intercepts[None]),
    }


@pytest.mark.parametrize("shape", [(16, 7), (64, 7)], ids=lambda shape: f"{shape[0]} x {shape[1]}")
@pytest.mark.parametrize("name", ops(1, 1))
def test_op(benchmark, name: str, shape: tuple[int, int]) -> None:
    call = ops(*shape)[name]

    def and_wait() -> None:
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark(and_wait)
