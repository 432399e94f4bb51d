"""Sampled output has the target's exact distribution, with half of the drafts trimmed."""

import itertools
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine import checkpoints
from tests.integrations.sglang.cpu_engine.client import ForkServer

pytestmark = [pytest.mark.sglang, pytest.mark.full]

VOCAB, TOKENS, REQUESTS, ROWS = 6, 3, 20_000, 64
PROMPT = [3, 1, 4]


def exact_law(target: Path) -> dict[tuple[int, ...], float]:
    """The target's probability of every sequence of the first tokens after PROMPT, at temperature 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        prefixes = list(law)
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])).logits[:, -1]
        probabilities = torch.softmax(logits.double(), -1)
        law = {
            (*prefix, token): law[prefix] * float(probabilities[row, token])
            for (row, prefix), token in itertools.product(enumerate(prefixes), range(VOCAB))
        }
    return law


def p_value(law: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> float:
    """Chi-square of the counts against the law; cells with fewer than five expected are taken together."""
    from scipy.stats import chi2

    total = sum(counts.values())
    large = {cell: p * total for cell, p in law.items() if p * total >= 5}
    rest = total - sum(large.values())
    statistic = sum((counts[cell] - expected) ** 2 / expected for cell, expected in large.items())
    cells = len(large)
    if rest > 0:
        seen = total - sum(counts[cell] for cell in large)
        statistic += (seen - rest) ** 2 / rest
        cells += 1
    return float(chi2.sf(statistic, cells - 1))


def test_joint_law_of_the_first_tokens(server: ForkServer, models: Path) -> None:
    target = checkpoints.make("target", models, vocab=VOCAB)
    drafter = checkpoints.make("dspark", models, vocab=VOCAB)
    settings = {"policy": "fixed", "fixed_budget": ROWS * 4 // 2, "exploration": 0.0}
    keywords = {
        "model_path": str(target),
        "speculative_algorithm": "DSPARK",
        "speculative_draft_model_path": str(drafter),
        "enable_adaptive_verification": True,
        "adaptive_verification_config": runs.plugin_config(models, settings=settings, log_interval=0),
        "disable_radix_cache": True,
        "max_running_requests": ROWS,
    }
    result, _ = server.call(
        runs.GENERATE,
        timeout=3000,
        engine=keywords,
        prompts=[PROMPT] * REQUESTS,
        sampling={"temperature": 1.0, "max_new_tokens": TOKENS + 3, "ignore_eos": True},
    )
    counts = Counter(tuple(tokens[:TOKENS]) for tokens in result["tokens"][0])
    assert math.isclose(sum(counts.values()), REQUESTS)
    p = p_value(exact_law(target), counts)
    print(f"chi-square against the target's law: p = {p:.2g}")
    assert p > 1e-3
