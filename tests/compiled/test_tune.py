"""`av-triton bench` without a GPU: what is chosen, what is refused, what is written."""

import itertools
import json

import msgspec
import pytest
import torch
import typer.testing

from av_triton import launches, tune


@pytest.fixture
def tried():
    return list(tune.candidates(launches.launches("sm_90")))


def measure(tried, milliseconds):
    return tune.measure(tried, "cpu", milliseconds, [(5, 300), (6, 300)])


def test_the_candidate_that_takes_least_is_chosen(tried):
    clock = itertools.cycle([3.0] * 20 + [1.0] + [3.0] * (len(tried) - 21))
    score, faults = measure(tried, lambda call: next(clock))
    assert not any(faults.values())
    assert tune.best(tried, score, faults, "logit_max") is tried[20]


def test_a_wrong_candidate_is_never_chosen(tried, monkeypatch):
    right = tune.Candidate.call

    def call(self, logits, seeds):
        token, feature, normaliser = right(self, logits, seeds)
        return token, feature + (self == tried[0]), normaliser

    monkeypatch.setattr(tune.Candidate, "call", call)
    score, faults = measure(tried, lambda call: 1.0)
    assert faults[tried[0]] == "off by 1"
    assert tune.best(tried, score, faults, "logit_max") is tried[1]
    with pytest.raises(RuntimeError, match="no candidate for sample gave right results"):
        tune.best(tried, score, dict.fromkeys(tried, "off by 2"), "sample")


def test_an_entry_is_written_beside_the_others(tried, tmp_path):
    file = tmp_path / "launches.json"
    tune.write(tried[0].entry, "sm_80", file)
    tune.write(tried[1].entry, "gfx942", file)
    table = launches.read(file)
    assert (table["sm_80"], table["gfx942"]) == (tried[0].entry, tried[1].entry)
    assert table["default"] == launches.read(launches.TABLE)["default"]
    assert json.loads(file.read_bytes())["sm_80"]["logit_max"] == msgspec.to_builtins(tried[0].entry.logit_max)


def test_without_a_gpu_nothing_is_written(monkeypatch, tried, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(tune, "candidates", lambda now: [tried[0], tried[-1]])
    file = tmp_path / "launches.json"
    done = typer.testing.CliRunner().invoke(tune.app, ["--table", str(file)])
    assert done.exit_code == 0, done.output
    assert "logit_max" in done.output
    assert "no GPU: nothing was timed" in done.output
    assert not file.exists()


def test_an_unknown_target_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = typer.testing.CliRunner().invoke(tune.app, ["--target", "sm_1"])
    assert done.exit_code == 2
    assert "sm_1: known are sm_80" in done.output
