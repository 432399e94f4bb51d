"""Two tensor-parallel ranks over gloo decide alike, whatever the timing of each and the last bits of its logits."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine.client import ForkServer
from tests.integrations.sglang.runs import FAMILIES, engine, plain_engine

pytestmark = pytest.mark.sglang

JOB = "tests.integrations.sglang.cpu_engine.ranks:generate_on_ranks"


def workload(steps: int, temperature: float = 0) -> dict[str, Any]:
    """Requests of 8 to 60 tokens that join and leave a batch of four for about `steps` decode steps."""
    pick = random.Random(0)
    prompts, sampling = [], []
    for _ in range(steps // 4):
        prompts.append([pick.randrange(3, 512) for _ in range(pick.choice((2, 5, 20)))])
        sampling.append({"temperature": temperature, "max_new_tokens": pick.randrange(8, 60), "ignore_eos": True})
    return {"prompts": prompts, "sampling": sampling}


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.full), 1e-3])
@pytest.mark.parametrize(
    "family", [FAMILIES[name] for name in ("DSPARK", "DFLASH", "EAGLE")], ids=("DSPARK", "DFLASH", "EAGLE")
)
@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.full)])
# Of verify graphs: then both hosts pick a size by the proposal of two steps back.
@pytest.mark.parametrize("captured", [None, pytest.param([5, 10, 20], marks=pytest.mark.full)], ids=("eager", "sizes"))
def test_ranks_decide_alike(
    server: ForkServer,
    models: Path,
    tmp_path: Path,
    family: runs.Family,
    noise: float,
    steps: int,
    captured: list[int] | None,
) -> None:
    job = workload(steps)
    keywords = engine(family, models, adaptive=True, settings={"refit_interval": 8}) | {"tp_size": 2}
    if captured is not None and family.algorithm == "DSPARK":
        keywords["disable_overlap_schedule"] = False
    result, _ = server.call(
        JOB, timeout=500, engine=keywords, folder=str(tmp_path), noise=noise, captured=captured, **job
    )
    first, second = result["ranks"]
    assert len(first) >= steps
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one == other, step
    assert len({len(each["slots"]) for each in first}) > 1  # requests joined and left
    assert len({tuple(each["slopes"]) for each in first}) > 2  # and the estimator learned
    assert any(sum(each["admitted"]) < len(each["slots"]) * (family.width - 1) for each in first)
    plain, _ = server.call(runs.GENERATE, engine=plain_engine(family, models) | {"tp_size": 2}, **job)
    for got, want in zip(result["tokens"][0], plain["tokens"][0], strict=True):
        assert got == want


@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.full), 1e-3])
@pytest.mark.parametrize("name", ["DSPARK", pytest.param("EAGLE", marks=pytest.mark.full)])
def test_ranks_learn_alike_from_exact_labels(
    server: ForkServer, models: Path, tmp_path: Path, name: str, noise: float
) -> None:
    """Sampled requests: every rank learns from rank 0's acceptance probabilities, and serves the same offsets."""
    settings = {"refit_interval": 8, "offset_prior": 4.0}
    keywords = engine(FAMILIES[name], models, adaptive=True, settings=settings) | {"tp_size": 2}
    if name == "EAGLE":
        keywords["speculative_use_rejection_sampling"] = True
    job = workload(40, temperature=1.0)
    result, _ = server.call(JOB, timeout=500, engine=keywords, folder=str(tmp_path), noise=noise, **job)
    first, second = result["ranks"]
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one == other, step
    labels = [n for each in first for n in each["sums"][0][5]]
    assert any(n % (1 << 30) for n in labels)  # weights below 1: not those of verdicts
    assert len({tuple(each["offsets"]) for each in first}) > 20
