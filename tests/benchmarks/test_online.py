"""The streams of the online report: the same for both arms, and scored as it says."""

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest

from av_triton import Settings
from benchmarks.online import compare
from benchmarks.online.arms import Ours, Peer, Step, predictions
from benchmarks.online.compare import expected_log_losses
from benchmarks.online.report import Result
from benchmarks.online.scenarios import Scenario, Stream, all_of, replayed, take
from benchmarks.traces.quality import load

DATA = Path(__file__).parents[2] / "benchmarks/traces/data"


@pytest.fixture(scope="module")
def traces():
    return [load(path) for path in sorted(DATA.glob("*.npz"))]


def test_a_scenario_is_its_seed(traces):
    for scenario in all_of(traces, 100):
        first, second, other = (scenario.make(seed).steps[:3] for seed in (1, 1, 2))
        for a, b, c in zip(first, second, other, strict=True):
            for name, value in vars(a).items():
                np.testing.assert_array_equal(value, vars(b)[name])
            assert (a.uniform != c.uniform).any()


def test_greedy_streams_of_different_seeds_differ(traces):
    greedy = next(trace for trace in traces if trace.greedy)
    first = [next(replayed(greedy, seed, rows=4)) for seed in range(3)]
    for a, b in itertools.combinations(first, 2):
        assert (a.features != b.features).any()


def test_with_the_peer_s_settings_ours_predicts_as_the_peer(traces):
    """Where nothing saturates, the two are the same formulas, written twice."""
    trace = next(trace for trace in traces if trace.name == "A_gsm8k_T1")
    steps = take(replayed(trace, 1), 220).steps
    settings = Settings(
        policy="fixed", fixed_budget=336, refit_interval=100, memory=1, initial_slopes=(0.5, 0.5), max_slope_step=9,
        max_intercept_step=9,
    )  # fmt: skip
    ours, peer = (predictions(arm, steps) for arm in (Ours(48, 7, settings), Peer(48, 7, fixed=336)))
    assert np.abs(peer[200:] - peer[:20]).max() > 0.03  # two refits
    np.testing.assert_allclose(ours, peer, atol=2e-4)


def test_both_arms_see_the_same_steps(traces, monkeypatch):
    seen = {}
    for arm in (Ours, Peer):

        def admit(self, step, inner=arm.admit):
            seen.setdefault(type(self), []).append((step, copy.deepcopy(vars(step))))
            return inner(self, step)

        monkeypatch.setattr(arm, "admit", admit)
    for scenario in all_of(traces, 100)[-2:]:
        stream = scenario.make(0)
        compare.run(scenario, Stream(stream.steps[:5], range(5)))
    assert len(seen[Ours]) == len(seen[Peer]) == 10
    for (a, before), (b, _) in zip(seen[Ours], seen[Peer], strict=True):
        assert a is b
        assert all(np.array_equal(vars(a)[name], value) for name, value in before.items())  # nobody changed it


def test_what_is_needed_is_there(traces):
    names = " ".join(scenario.name for scenario in all_of(traces, 100))
    for kind in ("cold start", "at rest", "switch: B_gsm8k_T1 to humaneval", "starved", "one-hot", "greedy and sampled",
                 "budget 50%", "budget 25%"):  # fmt: skip
        assert kind in names


def test_the_loss_is_the_expectation_of_the_log_loss():
    p, alpha = np.array([0.8, 0.3]), np.array([0.25, 1.0])
    expected = [-0.25 * np.log(0.8) - 0.75 * np.log(0.2), -np.log(0.3)]
    np.testing.assert_allclose(expected_log_losses(p, alpha), expected)


def test_scored_is_what_has_a_label_when_all_is_verified(traces):
    """With a budget of 25 % as many drafts are scored as with all."""
    stream = take(replayed(traces[0], 3), 4, skip=1)
    labels = sum(int((step.accepted() + 1).clip(max=7).sum()) for step in stream.steps[1:])
    for budget in (1.0, 0.25):
        found = Result(Scenario("", lambda seed: stream, budget), [compare.run(Scenario("", take, budget), stream)])
        assert found.labels == labels


def test_a_fixed_budget_binds_both(traces):
    steps = take(replayed(traces[0], 0), 3).steps
    rows, positions = steps[0].features.shape
    for arm in (Ours(rows, positions, Settings(policy="fixed", fixed_budget=50)), Peer(rows, positions, fixed=50)):
        for step in steps[1:]:
            admitted, _ = arm.admit(step)
            assert admitted.sum() == 50
            arm.observe(step.accepted(admitted), admitted)


def test_predictions_come_before_the_verdict(traces):
    step = take(replayed(traces[1], 0), 1).steps[0]
    lucky = Step(step.features, step.alpha, np.zeros_like(step.uniform), step.greedy, step.fresh, step.cluster)
    assert (lucky.accepted() != step.accepted()).any()
    for make in (lambda: Ours(48, 7, Settings(policy="fixed", fixed_budget=336)), lambda: Peer(48, 7, fixed=336)):
        np.testing.assert_array_equal(predictions(make(), [step]), predictions(make(), [lucky]))
