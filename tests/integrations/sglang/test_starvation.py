"""Drafts that are not verified earn no verdicts: a budget of nothing must not last for ever."""

from pathlib import Path
from statistics import mean

import pytest

from av_triton import CostTable
from av_triton.snapshot import Snapshot
from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine.client import ForkServer
from tests.integrations.sglang.runs import FAMILIES, engine

pytestmark = pytest.mark.sglang

JOB = "tests.integrations.sglang.cpu_engine.ranks:generate_on_ranks"
FAMILY = FAMILIES["DSPARK"]
REQUESTS = 32
# A draft is worth its cost where its chance is above one in seven.
COST = CostTable(draft=[(1, 1.0)], verify=[(1, 5.0), (4, 6.0), (20, 10.0)])


def admitted_per_request(server: ForkServer, models: Path, folder: Path, exploration: float) -> list[float]:
    """Of 4 drafts, in the steps of four requests; the coefficients are of a workload on which all were wrong."""
    intercepts = [[-12.0] * (FAMILY.width - 1)] * 2
    learned = folder / "coefficients.json"
    Snapshot(
        num_draft_positions=FAMILY.width - 1,
        strata=["sampled", "greedy"],
        slopes=[0.5, 0.5],
        intercepts=intercepts,
        refits=100,
    ).write(learned)
    COST.save(folder / "cost.json")
    files = {"coefficients": str(learned), "cost_table": str(folder / "cost.json")}
    settings = {"exploration": exploration, "refit_interval": 8}
    # Of different lengths, so that there is always a request with a stored survival: else all is verified.
    lengths = [40 + 7 * index % 40 for index in range(REQUESTS)]
    result, _ = server.call(
        JOB,
        folder=str(folder),
        engine=engine(FAMILY, models, adaptive=True, settings=settings, save_interval=0, **files),
        prompts=runs.PROMPTS * (REQUESTS // 4),
        sampling=[{"temperature": 0, "max_new_tokens": each, "ignore_eos": True} for each in lengths],
    )
    [steps] = result["ranks"]
    return [sum(each["admitted"]) / 4 for each in steps if len(each["slots"]) == 4]


def test_the_estimator_recovers_from_a_budget_of_nothing(server: ForkServer, models: Path, tmp_path: Path) -> None:
    admitted = admitted_per_request(server, models, tmp_path, exploration=0.1)
    first, last = mean(admitted[1:21]), mean(admitted[-40:])
    print(f"{first:.2f} drafts verified per request at first, {last:.2f} in the end, of which 0.4 explored")
    assert first < 0.5
    assert last > 0.8


@pytest.mark.full
def test_without_exploration_it_does_not(server: ForkServer, models: Path, tmp_path: Path) -> None:
    """What the test above is worth: the same run, with nothing but the exploration left out."""
    admitted = admitted_per_request(server, models, tmp_path, exploration=0.0)
    assert max(admitted[1:]) == 0
