"""Sampled output has the target's exact distribution, with half of the drafts trimmed by scores that each request's
offset moves; a biased score is caught."""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine import checkpoints
from tests.integrations.sglang.cpu_engine.client import ForkServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

Law = dict[tuple[int, ...], float]

VOCAB, TOKENS, ROWS, POSITIONS = 6, 3, 64, 4
# Of the logits: with 1.5 nats of entropy per token a bias has room, with the .3 nats of the checkpoints it has not.
FLATTER = 0.2
PROMPT = [3, 1, 4]
PLANTED = "tests.integrations.sglang.cpu_engine.plants:generate"
CHAIN = runs.CHAIN | {"speculative_use_rejection_sampling": True}
# Drafters that draw their drafts: (algorithm, checkpoint, options of the engine).
DRAWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DSPARK": ("DSPARK", "dspark", {}),
    "DFLASH2": ("DFLASH", "dflash2", {}),
    "EAGLE": ("EAGLE", "eagle", CHAIN),
}
FULL = pytest.param(20_000, marks=pytest.mark.full)


def exact_law(target: Path) -> Law:
    """The target's probability of every sequence of the first tokens after PROMPT, at temperature 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    law: Law = {(): 1.0}
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


def p_value(law: Law, counts: Counter[tuple[int, ...]]) -> float:
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


def measured(server: ForkServer, models: Path, family: str, requests: int, job: str = runs.GENERATE) -> float:
    """p of the law of the first tokens of `requests` samples, with at most half of the drafts verified."""
    algorithm, drafter, options = DRAWN[family]
    target, draft_model = (
        checkpoints.flattened(checkpoints.make(name, models, vocab=VOCAB), FLATTER) for name in ("target", drafter)
    )
    settings = {"policy": "fixed", "fixed_budget": ROWS * POSITIONS // 4, "exploration": 0.0, "refit_interval": 10**5}
    settings["offset_prior"] = 1.0
    keywords = {
        "model_path": str(target),
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(draft_model),
        "enable_adaptive_verification": True,
        "adaptive_verification_config": runs.plugin_config(models, settings=settings, log_interval=0),
        "disable_radix_cache": True,
        "max_running_requests": ROWS,
        **options,
    }
    result, _ = server.call(
        job,
        timeout=3000,
        engine=keywords,
        prompts=[PROMPT] * requests,
        sampling={"temperature": 1.0, "max_new_tokens": TOKENS + 3, "ignore_eos": True},
        open_gates=True,
    )
    status = result["adaptive_verification"]
    assert sum(status["admitted"]) <= sum(status["drafted"]) / 2
    counts = Counter(tuple(tokens[:TOKENS]) for tokens in result["tokens"][0])
    assert math.isclose(sum(counts.values()), requests)
    p = p_value(exact_law(target), counts)
    accepted, seconds = sum(status["accepted"]) / status["drafted"][0], result["generate_seconds"]
    print(f"{family}: {requests} requests, {accepted:.2f} drafts accepted per step, {seconds:.0f} s: p = {p:.2g}")
    return p


@pytest.mark.parametrize("requests", [3_000, FULL])
@pytest.mark.parametrize(
    "family", ["DSPARK", pytest.param("DFLASH2", marks=pytest.mark.full), pytest.param("EAGLE", marks=pytest.mark.full)]
)
def test_joint_law_of_the_first_tokens(server: ForkServer, models: Path, family: str, requests: int) -> None:
    assert measured(server, models, family, requests) > 1e-3


@pytest.mark.parametrize("requests", [3_000, FULL])
def test_a_score_by_later_tokens_fails_the_same_test(server: ForkServer, models: Path, requests: int) -> None:
    assert measured(server, models, "DSPARK", requests, job=PLANTED) < 1e-3
