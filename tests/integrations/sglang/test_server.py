"""What an operator meets: the command line, /server_info, /metrics, start-up costs, saved coefficients, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine import checkpoints
from tests.integrations.sglang.cpu_engine.client import ForkServer, JobError
from tests.integrations.sglang.runs import FAMILIES, PROMPTS, engine, plain_engine, plugin_config, run

pytestmark = pytest.mark.sglang

JOBS = "tests.integrations.sglang.cpu_engine.jobs:"
GREEDY = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
DSPARK = FAMILIES["DSPARK"]


def total(metrics: str, name: str) -> float:
    """The sum of a counter's samples in Prometheus' text format."""
    return sum(float(value) for value in re.findall(rf"^{name}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE))


def test_command_line_server_info_and_metrics(server: ForkServer, models: Path) -> None:
    config = plugin_config(models, log_interval=1)
    arguments = [
        f"--model-path={checkpoints.make('target', models)}",
        "--speculative-algorithm=DSPARK",
        f"--speculative-draft-model-path={checkpoints.make('dspark', models)}",
        "--enable-adaptive-verification",
        f"--adaptive-verification-config={json.dumps(config)}",
        "--enable-metrics",
    ]
    result, log = server.call(JOBS + "serve", arguments=arguments, prompts=PROMPTS, sampling=GREEDY, port=31877)
    status = result["server_info"]["internal_states"][0]["adaptive_verification"]
    assert status["algorithm"] == "DSPARK"
    assert status["steps"] > 0
    # Every generated token but the first of each request was an accepted draft or a bonus.
    generated = sum(len(tokens) - 1 for tokens in result["tokens"])
    rows = status["drafted"][0]
    overshoot = rows + sum(status["accepted"]) - generated
    assert 0 <= overshoot <= 4 * len(PROMPTS)
    metrics = result["metrics"]
    for name in ("drafted", "admitted", "trimmed", "accepted", "labelled", "labelled_accepted"):
        assert total(metrics, f"av_triton_{name}") == sum(status[name]), name
    assert total(metrics, "av_triton_expected_accepted") == pytest.approx(sum(status["expected_accepted"]) / 2**20)
    for name in ("steps", "refits", "explored", "bypassed"):
        assert total(metrics, f"av_triton_{name}") == status[name], name
    assert "Adaptive verification: active" in log


def test_costs_are_measured_once(server: ForkServer, models: Path, tmp_path: Path) -> None:
    keywords = engine(DSPARK, models, adaptive=True, cost_table=None, cost_cache=str(tmp_path))
    first = run(server, keywords, length=40)
    measured = r"measured the cost of verifying 1 to 20 tokens \(.* ms, .* ms of it for each request\) in .* s"
    assert re.search(measured, first.log)
    assert first.status is not None
    [cache] = tmp_path.iterdir()
    assert first.status["cost"] == f"measured at start-up, kept in {cache}"
    # The same engine again: another length, so that the run is not taken from the cache of runs.
    second = run(server, keywords, length=41)
    assert second.status is not None
    assert second.status["cost"] == f"{cache} (measured before)"
    cache.write_text("{")
    third = run(server, keywords, length=42)
    assert f"{cache}: not a cost table" in third.log
    assert third.status is not None
    assert third.status["cost"].startswith("measured at start-up")


def test_sglangs_own_cost_file_is_taken(server: ForkServer, models: Path, tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    path.write_text(
        '{"sample_batch_tokens": [1, 4, 8, 20], "sample_steps_per_sec": [100.0, 80.0, 50.0, 20.0], '
        '"max_batch_tokens": 20}'
    )
    keywords = engine(DSPARK, models, adaptive=True, cost_table=None)
    outcome = run(server, keywords | {"speculative_dspark_sps_table_path": str(path)}, length=40)
    assert outcome.status is not None
    assert outcome.status["cost"] == f"{path} (SGLang's format)"


def test_coefficients_are_saved_and_loaded(server: ForkServer, models: Path, tmp_path: Path) -> None:
    path = tmp_path / "coefficients.json"
    config: dict[str, Any] = {
        "coefficients": str(path),
        "save_interval": 10,
        "settings": {"refit_interval": 8},
    }
    first = run(server, engine(DSPARK, models, adaptive=True, **config))
    assert path.exists()
    assert first.status is not None
    assert first.status["refits"] > 0
    saved = json.loads(path.read_text())
    assert saved["intercepts"] != [[-0.2] * 4] * 2
    second = run(server, engine(DSPARK, models, adaptive=True, **config | {"settings": {"refit_interval": 10**5}}))
    assert second.status is not None
    loaded = [second.status["coefficients"][name]["intercepts"] for name in ("sampled", "greedy")]
    assert loaded == saved["intercepts"]


def refused(server: ForkServer, keywords: dict[str, Any], job: str = "generate", **more: Any) -> str:
    with pytest.raises(JobError) as error:
        server.call(JOBS + job, engine=keywords, prompts=PROMPTS, sampling=GREEDY, **more)
    return error.value.log


def test_unsupported_arguments_are_refused_before_anything_starts(server: ForkServer, models: Path) -> None:
    keywords = engine(DSPARK, models, adaptive=True, ragged_backends=[])
    log = refused(server, keywords, env={"SGLANG_DSPARK_USE_GREEDY_DRAFT": "1"})
    assert "--enable-adaptive-verification cannot be used here" in log
    assert "attention backend av_torch: the target's attention must take a verify length per request" in log
    assert "SGLANG_DSPARK_USE_GREEDY_DRAFT=1: it keeps no draft logits; unset it" in log


def test_a_bad_file_is_refused(server: ForkServer, models: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": 1')
    assert f"{broken}: not a cost table" in refused(
        server, engine(DSPARK, models, adaptive=True, cost_table=str(broken))
    )
    assert str(broken) in refused(server, engine(DSPARK, models, adaptive=True, coefficients=str(broken)))
    missing = tmp_path / "missing.json"
    log = refused(server, engine(DSPARK, models, adaptive=True, cost_table=str(missing)))
    assert f"{missing}: No such file or directory; give a cost table that exists" in log


def test_a_changed_sglang_is_refused(server: ForkServer, models: Path) -> None:
    target = "sglang.srt.speculative.dspark_components.dspark_draft.draft_markov_block"
    log = refused(server, engine(DSPARK, models, adaptive=True), "generate_with_renamed_target", target=target)
    assert f"{target} is missing" in log
    assert "(verified: 0.5.23)" in log


def test_a_checkpoint_with_a_head_keeps_it_by_default(server: ForkServer, models: Path) -> None:
    keywords = engine(DSPARK, models, adaptive=True)
    drafter = Path(keywords["speculative_draft_model_path"])
    headed = drafter.with_name("headed")
    headed.mkdir(exist_ok=True)
    settings = json.loads((drafter / "config.json").read_text()) | {"enable_confidence_head": True}
    (headed / "config.json").write_text(json.dumps(settings))
    (headed / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes())
    keywords["speculative_draft_model_path"] = str(headed)
    assert "this DSPARK checkpoint has a confidence head" in refused(server, keywords)
    estimator = plugin_config(models, dspark_head="estimator")
    outcome = run(server, keywords | {"adaptive_verification_config": estimator}, length=20)
    assert outcome.status is not None
    assert outcome.status["steps"] > 0


def test_rows_with_another_target_are_not_learned_from(server: ForkServer, models: Path) -> None:
    biased = run(server, engine(DSPARK, models, adaptive=True), length=40, logit_bias={"7": -1.0})
    assert biased.status is not None
    assert sum(biased.status["admitted"]) > 0
    assert sum(biased.status["labelled"]) == 0
    plain = run(server, plain_engine(DSPARK, models), length=40, logit_bias={"7": -1.0})
    runs.assert_same_text(server, plain_engine(DSPARK, models), plain, biased)


def test_without_the_flag_the_plugin_changes_nothing(server: ForkServer, models: Path) -> None:
    """Against an SGLang that does not load it: the same text; the times are printed, a busy machine decides them."""
    job: dict[str, Any] = {"engine": engine(DSPARK, models), "prompts": PROMPTS, "sampling": GREEDY, "repeats": 3}
    absent, _ = server.call(JOBS + "generate", env={"SGLANG_PLUGINS": "none"}, **job)
    installed, _ = server.call(JOBS + "generate", **job)
    assert installed["tokens"] == absent["tokens"]
    assert [[each["spec_verify_ct"] for each in run] for run in installed["meta"]] == [
        [each["spec_verify_ct"] for each in run] for run in absent["meta"]
    ]
    ratio = installed["generate_seconds"] / absent["generate_seconds"]
    print(f"three runs take {ratio:.2f} times as long with the plug-in installed")
