"""Requests that come and go: slots are reused, prompts come in chunks, requests are retracted and resumed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine import checkpoints
from tests.integrations.sglang.cpu_engine.client import ForkServer
from tests.integrations.sglang.runs import FAMILIES, engine, plain_engine

pytestmark = pytest.mark.sglang

WATCHED = "tests.integrations.sglang.cpu_engine.stale:generate"


def small(requests: int) -> dict[str, Any]:
    """A cache that holds about two requests of up to 150 tokens for every four slots; 200 requests share 8 slots."""
    slots = 8 if requests >= 200 else 4
    return {"max_total_tokens": 80 * slots, "chunked_prefill_size": 32, "max_running_requests": slots}


def workload(requests: int, seed: int = 0) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts of 2 to 70 tokens and outputs of 1 to 80."""
    pick = random.Random(seed)
    prompts = [[pick.randrange(3, 512) for _ in range(pick.choice((2, 5, 20, 70)))] for _ in range(requests)]
    lengths = [pick.choice((1, 2, 15, 40, 80)) for _ in range(requests)]
    return prompts, [{"temperature": 0, "max_new_tokens": each, "ignore_eos": True} for each in lengths]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=[] if name in ("DSPARK", "EAGLE") else pytest.mark.full)
        for name, each in FAMILIES.items()
    ],
    ids=FAMILIES,
)
@pytest.mark.parametrize("requests", [24, pytest.param(200, marks=pytest.mark.full)])
def test_churn_leaves_the_text_alone(
    server: ForkServer, models: Path, tmp_path: Path, family: runs.Family, requests: int
) -> None:
    prompts, sampling = workload(requests)
    job: dict[str, Any] = {"prompts": prompts, "sampling": sampling, "return_logprob": True, "timeout": 900}
    job["retract_every"] = 7
    plain, _ = server.call(runs.GENERATE, engine=plain_engine(family, models) | small(requests), **job)
    adaptive = engine(family, models, adaptive=True) | small(requests)
    got, _ = server.call(WATCHED, engine=adaptive, watch=str(tmp_path / "count"), **job)
    for index, (want, have) in enumerate(zip(plain["tokens"][0], got["tokens"][0], strict=True)):
        assert have == want, index
    for index, (want, have) in enumerate(zip(plain["meta"][0], got["meta"][0], strict=True)):
        values = [[value for value, *_ in meta["output_token_logprobs"]] for meta in (want, have)]
        assert values[1] == pytest.approx(values[0], abs=1e-3), index
    status = got["adaptive_verification"]
    assert sum(status["admitted"]) < 0.9 * sum(status["drafted"])
    assert all(some <= each for some, each in zip(status["labelled"], status["admitted"], strict=True))
    assert got["reused"] >= requests // 2
    assert got["stale"] == 0
    assert sum(each["num_retractions"] for each in got["meta"][0]) > 0


@pytest.mark.full
def test_a_stale_score_would_be_seen(server: ForkServer, models: Path, tmp_path: Path) -> None:
    """EAGLE scores a next first draft after a request's last verdicts; without a reset the next request is graded."""
    prompts, sampling = workload(24)
    adaptive = engine(FAMILIES["EAGLE"], models, adaptive=True) | small(24)
    job = {"prompts": prompts, "sampling": sampling, "watch": str(tmp_path / "count"), "timeout": 900}
    got, _ = server.call(WATCHED, engine=adaptive, forget=True, **job)
    assert got["stale"] > 0


STREAM = "tests.integrations.sglang.cpu_engine.churn:stream"
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize("family", [FAMILIES[name] for name in ("DSPARK", "EAGLE")], ids=("DSPARK", "EAGLE"))
@pytest.mark.parametrize("requests", [24, pytest.param(200, marks=pytest.mark.full)])
def test_streams_aborts_and_grammars(server: ForkServer, models: Path, family: runs.Family, requests: int) -> None:
    """Every ninth request is given up while it runs; every seventh is held to a JSON schema."""
    prompts, sampling = workload(requests, seed=1)
    for each in sampling[::7]:
        each |= {"json_schema": SCHEMA, "max_new_tokens": 24, "ignore_eos": False}
    abort = {str(index): 3 for index in range(4, requests, 9)}
    for index in abort:
        sampling[int(index)] = {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True}
    checkpoints.add_tokenizer(checkpoints.make(family.target, models))
    more = small(requests) | {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}
    job: dict[str, Any] = {"prompts": prompts, "sampling": sampling, "retract_every": 7, "timeout": 900}
    plain, _ = server.call(STREAM, engine=plain_engine(family, models) | more, abort={}, **job)
    got, _ = server.call(STREAM, engine=engine(family, models, adaptive=True) | more, abort=abort, **job)
    for index, (want, have) in enumerate(zip(plain["requests"], got["requests"], strict=True)):
        if str(index) in abort:
            assert want["tokens"][: len(have["tokens"])] == have["tokens"], index
        else:
            assert have["tokens"] == want["tokens"], index
            assert have["finished"] == want["finished"] != "abort", index
    constrained = [got["requests"][index]["tokens"] for index in range(0, requests, 7) if str(index) not in abort]
    assert len({tokens[0] for tokens in constrained}) == 1  # "{"
    given_up = [got["requests"][int(index)] for index in abort]
    assert any(each["finished"] == "abort" and len(each["tokens"]) < 80 for each in given_up)
    status = got["adaptive_verification"]
    assert sum(status["admitted"]) < 0.9 * sum(status["drafted"])
    assert all(some <= each for some, each in zip(status["labelled"], status["admitted"], strict=True))
