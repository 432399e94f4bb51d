"""What `make bench` prints: counted launches, and no speed-up for a wrong result."""

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import av_triton as av
from benchmarks.kernels import device, host, run, static
from benchmarks.kernels.compare import Comparison, compare, in_turns

RIGHT = Comparison(what="score", shape="4 x 3", ours="a", peer="b", ours_us=1.0, peer_us=7.5, ratio=7.5)
WRONG = msgspec.structs.replace(RIGHT, wrong="budget 3, ours 4")


def bench(monkeypatch, tmp_path, on_host=(), timed=()):
    """The command with everything measured in advance: (exit status, output)."""
    for name in ("show_launches", "show_floors"):
        monkeypatch.setattr(run, name, lambda *args: None)
    monkeypatch.setattr(run, "show_static", lambda *args: [])
    monkeypatch.setattr(static, "score", lambda target: iter(()))
    monkeypatch.setattr(run, "measure_host", lambda *args: host.Host(list(on_host), "no SGLang here"))
    monkeypatch.setattr(device, "measure", lambda *args: device.Device("CPU", list(timed), []))
    with run.console.capture() as text:
        result = CliRunner().invoke(run.app, ["--out", str(tmp_path)])
    return result.exit_code, text.get()


def test_a_right_result_gets_its_speed_up(monkeypatch, tmp_path):
    status, text = bench(monkeypatch, tmp_path, on_host=[RIGHT])
    assert (status, "7.5" in (tmp_path / "host.csv").read_text()) == (0, True)
    assert "no SGLang here" in text
    assert (tmp_path / "host.png").exists()
    (tmp_path / "host.png").unlink()
    assert "nothing was measured" in bench(monkeypatch, tmp_path)[1]


@pytest.mark.parametrize("where", ["on_host", "timed"])
def test_a_wrong_result_gets_no_speed_up(monkeypatch, tmp_path, where):
    wrong = msgspec.structs.replace(WRONG, peer_us=8.0)
    status, text = bench(monkeypatch, tmp_path, **{where: [wrong]})
    assert status == 1
    assert "budget 3, ours 4" in text
    assert "7.5" not in text


def test_a_wrong_budget_is_found_on_the_same_shape(monkeypatch):
    small = {"shapes": ((6, 3),), "rounds": 1, "calls": 1}
    assert all(c.speed_up is not None for c in host.measure(**small).comparisons)
    budget = host.numpy_budget
    monkeypatch.setattr(host, "numpy_budget", lambda *args: budget(*args) - 1)
    found = host.measure(**small).comparisons
    assert found
    assert all(c.speed_up is None and c.shown().startswith("refused") for c in found)


def test_a_wrong_score_is_found_on_the_same_shape(monkeypatch):
    arguments = (torch.device("cpu"), ((2, 3, 500),), 1, 1, float("inf"))
    assert all(c.speed_up is not None for c in device.logits_grid(*arguments).comparisons)
    score = device.confidence.score_torch
    monkeypatch.setattr(device.confidence, "score_torch", lambda *args: [x + 0.01 for x in score(*args)])
    assert all(c.speed_up is None for c in device.logits_grid(*arguments).comparisons)


def test_a_wrong_token_is_found(monkeypatch):
    arguments = (torch.device("cpu"), ((2, 3, 500),), 1, 1, float("inf"))
    sample = av.sample_and_score
    monkeypatch.setattr(av, "sample_and_score", lambda x, seeds, t: sample(x, seeds + 1, t))
    found = {c.what: c.wrong for c in device.logits_grid(*arguments).comparisons}
    assert found["score"] == ""
    assert found["sample and score"].startswith("the token is off")


def test_the_peers_plan_as_ours():
    found = device.plan_grid(torch.device("cpu"), 1, 1)
    assert {"segmented_topk", "choose_budget"} <= {c.what for c in found}
    assert not any(c.wrong for c in found)


def test_a_wrong_step_is_found(monkeypatch):
    (right,) = device.learn_grid(torch.device("cpu"), 1, 1)
    assert right.wrong == ""
    step = device.estimation.newton_step
    monkeypatch.setattr(device.estimation, "newton_step", lambda *args: step(*args, ridge=10.0))
    assert all(c.wrong for c in device.learn_grid(torch.device("cpu"), 1, 1))


def test_wrong_lengths_are_found():
    confidence = torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    cost = host.dense(host.staircase(6, 3), 6, 18)
    budget = host.numpy_budget(confidence.numpy(), cost)
    assert host.check_ops(confidence, cost, budget, None) == ""
    assert "lengths" in host.check_ops(confidence, cost, budget, torch.full((6,), 4))


def test_ratios_are_of_one_round():
    samples = {"a": [1.0, 10.0, 2.0], "b": [3.0, 30.0, 6.0]}
    (found,) = compare("x", "s", samples, [("a", "b")], {})
    assert (found.ours_us, found.peer_us, found.speed_up) == (2.0, 6.0, 3.0)


def test_arms_take_turns():
    order = []
    arms = {name: lambda name=name: order.append(name) for name in "ab"}
    samples = in_turns(arms, rounds=2, calls=1)
    assert "".join(order) == "baabba"
    assert [len(found) for found in samples.values()] == [2, 2]


def test_launches_are_counted():
    found = static.launches(rows=4, positions=3, steps=2)
    assert sum(found["block drafter"].values()) == 4
    assert found["autoregressive drafter"]["logit_max_kernel"] == 3
    assert sum(found["published form: score alone"].values()) == 2


def test_ours_needs_fewer_instructions_per_logit_than_the_published_form():
    ours, with_entropy, with_argmax, with_draw = static.score("sm_90")
    peer = next(s for s in static.published_score("sm_90") if s.per_logit)
    assert ours.in_loop <= 10
    assert peer.per_logit > 16
    assert with_entropy.in_loop <= 14
    assert with_argmax.in_loop <= 11
    assert not any(each.violations for each in (ours, with_entropy, with_argmax, with_draw))
