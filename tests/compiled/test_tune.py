"""`av-triton bench` without a GPU: what is chosen, what is refused, what is written."""

import itertools
from functools import partial

import pytest
import torch
import triton
import typer.testing

from av_triton import aot, launches, tune
from av_triton.ops import logit_max


@pytest.fixture
def tried():
    return tune.candidates(launches.launches("sm_90"))


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
        if self == tried[1]:
            normaliser = torch.full_like(normaliser, torch.nan)
        return token, feature + (self == tried[0]), normaliser

    monkeypatch.setattr(tune.Candidate, "call", call)
    score, faults = measure(tried, lambda call: 1.0)
    assert faults[tried[0]] == "off by 1"
    assert faults[tried[1]] == "off by nan"
    assert tune.best(tried, score, faults, "logit_max") is tried[2]
    with pytest.raises(RuntimeError, match="no candidate for sample gave right results"):
        tune.best(tried, score, dict.fromkeys(tried, "off by 2"), "sample")


def test_what_is_in_force_is_among_them():
    logit_max = launches.LogitMaxLaunch(block_bytes=1024, logits=4096, warps=2)
    now = launches.Launches(logit_max, launches.SampleLaunch(logits=65536, warps=1))
    tried = tune.candidates(now)
    assert [each.kernel for each in tried if each.entry == now] == ["logit_max", "sample"]
    shipped = tune.candidates(launches.launches("sm_90"))
    assert len(shipped) == len(set(shipped)) == len(tried) - 2


def test_a_candidate_that_does_not_fit_is_left_out(tried):
    def milliseconds(call):
        if call.func.__self__ is tried[1]:
            raise triton.runtime.errors.OutOfResources(2, 1, "threads")
        return 1.0

    score, faults = measure(tried, milliseconds)
    assert "out of resource: threads" in faults[tried[1]]
    assert tune.best(tried, score, faults, "logit_max") is tried[0]


def test_a_candidate_is_what_is_launched(tried):
    logits, seeds = torch.empty(4, 129_280, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
    for each in (tried[0], tried[-1]):
        (case,) = aot.record(partial(each.call, logits, seeds), "sm_90")
        assert case.options["num_warps"] == each.parameters["warps"]
        assert case.name == f"{each.kernel}_kernel"
    with launches.trial(tried[0].entry):
        assert logit_max.launch_shape(129_280, 2, "sm_90")[2] == tried[0].parameters["block_bytes"] // 2


def test_without_a_gpu_nothing_is_written(monkeypatch, tried, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(tune, "candidates", lambda now: [tried[0], tried[-1]])
    file = tmp_path / "launches.json"
    done = typer.testing.CliRunner().invoke(tune.app, ["--table", str(file)])
    assert done.exit_code == 0, done.output
    assert "logit_max" in done.output
    assert "sample" in done.output
    assert "no GPU: nothing was timed" in done.output
    assert not file.exists()


def test_a_table_is_written_as_it_is_read(tried, tmp_path):
    file = tmp_path / "launches.json"
    table = launches.read(launches.TABLE) | {"sm_80": tried[0].entry}
    tune.write(table, file)
    assert launches.read(file) == table


def test_a_broken_table_is_refused_before_anything_is_timed(tmp_path):
    (tmp_path / "launches.json").write_text("{")
    done = typer.testing.CliRunner().invoke(tune.app, ["--table", str(tmp_path / "launches.json")])
    assert done.exit_code == 2
    assert "--table" in done.output


def test_an_unknown_target_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = typer.testing.CliRunner().invoke(tune.app, ["--target", "sm_1"])
    assert done.exit_code == 2
    assert "sm_1: known are sm_80" in done.output
