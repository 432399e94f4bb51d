"""Each drafter family in SGLang's real engine: the same text as plain decoding, with fewer tokens verified."""

import json
from pathlib import Path

import pytest

from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine.client import ForkServer
from tests.integrations.sglang.runs import FAMILIES, engine, plain_engine, run

pytestmark = pytest.mark.sglang


# A run of the engine takes about ten seconds: where the code is shared, the other families are `full`.
SOME = [pytest.param(each, marks=[] if name == "DSPARK" else pytest.mark.full) for name, each in FAMILIES.items()]
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
one_family = pytest.mark.parametrize("family", SOME, ids=FAMILIES)


@each_family
def test_greedy_text_is_that_of_plain_decoding(server: ForkServer, models: Path, family: runs.Family) -> None:
    plain = run(server, plain_engine(family, models))
    adaptive = run(server, engine(family, models, adaptive=True))
    assert adaptive.status is not None
    assert adaptive.status["policy"] == "earlier"
    assert sum(adaptive.status["trimmed"]) > 0
    runs.assert_same_text(server, plain_engine(family, models), plain, adaptive)


@each_family
def test_fewer_tokens_are_verified_than_statically(server: ForkServer, models: Path, family: runs.Family) -> None:
    static = run(server, engine(family, models))
    adaptive = run(server, engine(family, models, adaptive=True))
    assert adaptive.status is not None
    before, after = static.verified(family), adaptive.verified(family)
    print(f"{family.drafter}: {before} -> {after} tokens verified for {adaptive.decoded}")
    assert after < 0.8 * before


@each_family
def test_counters_are_those_of_the_outputs(server: ForkServer, models: Path, family: runs.Family) -> None:
    adaptive = run(server, engine(family, models, adaptive=True))
    status = adaptive.status
    assert status is not None
    positions = family.width - 1
    assert status["drafted"][0] == adaptive.steps
    if family.drafts_to_depth:
        assert sorted(status["drafted"], reverse=True) == status["drafted"]
        assert status["drafted"][-1] < 0.7 * adaptive.steps
    else:
        assert status["drafted"] == [adaptive.steps] * positions
    assert [a + t for a, t in zip(status["admitted"], status["trimmed"], strict=True)] == status["drafted"]
    # SGLang's own statistics: verified drafts that were accepted, cut at the length limit.
    reported = sum(each["spec_num_correct_drafts"] for each in adaptive.meta)
    assert reported <= sum(status["accepted"]) <= reported + len(adaptive.meta) * positions
    assert all(a >= b for a, b in zip(status["accepted"], status["accepted"][1:], strict=False))
    assert all(some <= each for some, each in zip(status["labelled"], status["admitted"], strict=True))
    assert "Adaptive verification: active" in adaptive.log
    assert "Adaptive verification: 20 steps" in adaptive.log


@one_family
def test_sampled_requests_are_served(server: ForkServer, models: Path, family: runs.Family, tmp_path: Path) -> None:
    """And learned from, with the hidden states of their drafts where the drafter has any."""
    saved = tmp_path / "coefficients.json"
    keywords = engine(family, models, adaptive=True, coefficients=str(saved), save_interval=10)
    sampled = run(server, keywords, length=60, temperature=1.0)
    assert [len(each) for each in sampled.tokens] == [60] * len(runs.PROMPTS)
    assert sampled.status is not None
    assert sum(sampled.status["labelled"]) > 0
    head = json.loads(saved.read_text())["head"]
    assert (head is None) if family.algorithm == "STANDALONE" else head["behind"][0] > 0


# SGLang captures multiples of the width: for three requests the next size up is that for four.
CAPTURED = [5, 10, 20]


@one_family
def test_the_host_picks_the_size_of_a_captured_graph(server: ForkServer, models: Path, family: runs.Family) -> None:
    """Without the lengths, which stay on the device: the host goes by the proposal of two steps back."""
    keywords = engine(family, models, adaptive=True) | {"disable_overlap_schedule": not family.overlaps}
    captured = run(server, keywords, captured=CAPTURED)
    assert ("overlapped event loop" in captured.log) == family.overlaps
    status = captured.status
    assert status is not None
    assert sum(status["trimmed"]) > 0
    runs.assert_same_text(server, plain_engine(family, models), run(server, plain_engine(family, models)), captured)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.overlaps])
def test_overlap_scheduling(server: ForkServer, models: Path, name: str) -> None:
    family = FAMILIES[name]
    keywords = engine(family, models, adaptive=True) | {"disable_overlap_schedule": False}
    overlapped = run(server, keywords)
    assert "overlapped event loop" in overlapped.log
    assert overlapped.status is not None
    assert sum(overlapped.status["trimmed"]) > 0
    plain = plain_engine(family, models)
    runs.assert_same_text(server, plain, run(server, plain), overlapped)


@one_family
def test_a_fixed_budget_holds_in_every_step(server: ForkServer, models: Path, family: runs.Family) -> None:
    settings = {"policy": "fixed", "fixed_budget": 3, "exploration": 0.0}
    fixed = run(server, engine(family, models, adaptive=True, settings=settings))
    assert fixed.status is not None
    assert sum(fixed.status["admitted"]) <= 3 * fixed.status["steps"]
    runs.assert_same_text(server, plain_engine(family, models), run(server, plain_engine(family, models)), fixed)


@one_family
def test_without_the_flag_nothing_is_hooked(server: ForkServer, models: Path, family: runs.Family) -> None:
    applied, _ = server.call(
        "tests.integrations.sglang.cpu_engine.jobs:hooks_of_the_plugin", engine=engine(family, models)
    )
    assert applied == [
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
    ]
