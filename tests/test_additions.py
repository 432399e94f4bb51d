"""Offset and head on top of an estimator that does not see them: cold start, gates, order of the rows."""

import pytest
import torch

from av_triton import AcceptanceEstimator, Settings
from av_triton.ops.accumulate import GATES, HEAD, OFFSET, SETTLED
from av_triton.ops.select import Q30
from tests.state import copies, differences
from tests.traffic import SLOTS, D, K, Step, settle, traffic

BASE = ("features", "strata", "slopes", "intercepts", "sums", "labels", "counters", "clock")


def estimator(head: bool = True, prior: float | None = 4.0, interval: int = 8) -> AcceptanceEstimator:
    options = Settings(offset_prior=prior, refit_interval=interval)
    made = AcceptanceEstimator(SLOTS, K, settings=options, hidden_size=D if head else None)
    made.reset(torch.arange(SLOTS), torch.arange(SLOTS).int() % 2)
    settle(made)
    return made


def force_open(*estimators: AcceptanceEstimator) -> None:
    for each in estimators:
        each.state.gates.fill_(Q30)


def excess(step: Step, scores: torch.Tensor, base: torch.Tensor) -> float:
    """Expected log-loss above the base's over the step's labels, nats."""
    loss = [-(step.alpha * p.log() + (1 - step.alpha) * (1 - p).log()) for p in (scores, base)]
    return float((step.omega * (loss[0] - loss[1])).sum())


@pytest.mark.parametrize("exact", [True, False], ids=["exact labels", "verdicts"])
def test_scores_are_bit_for_bit_the_base_s_until_a_gate_opens(backend, exact):
    ours, base = estimator(), estimator(head=False, prior=None)
    opened, differed = torch.zeros(2, dtype=torch.bool), False
    for step in traffic(1, 250 if backend == "torch" else 8):
        scores, without = step.score(ours), step.score(base)
        stratum = ours.state.strata[step.slots.clamp_min(0)].long()
        closed = (ours.state.gates <= 0).all(0)[stratum]
        assert torch.equal(scores[closed], without[closed])
        opened |= (ours.state.gates[HEAD] > 0) & (ours.state.gates[OFFSET] <= 0)
        differed |= not torch.equal(scores, without)
        step.observe(ours, exact)
        step.observe(base, exact)
    assert backend == "triton" or (bool(opened.all()) and differed)


def test_gates_move_from_4096_labels_of_their_stratum_on(backend):
    ours = estimator(interval=100)
    ours.state.labels[:] = torch.tensor([[SETTLED - 3, 1, 1, 0], [SETTLED - 3, 1, 1, 1]]) * Q30
    ours.state.gates.zero_()
    for step in traffic(9, 2):
        step.score(ours)
        step.observe(ours)
    assert not ours.state.gates[:, 0].any()
    assert bool(ours.state.gates[OFFSET, 1])
    assert not ours.state.gains.any()
    ours.state.labels.fill_(1 << 62)
    step.score(ours)
    step.observe(ours)
    assert bool(ours.state.gates[OFFSET, 0])


def test_with_the_head_s_gate_closed_scores_are_those_with_the_offset_alone(backend):
    ours, offsets = estimator(), estimator(head=False)
    for step in traffic(2, 40 if backend == "torch" else 6):
        force_open(ours, offsets)
        ours.state.gates[HEAD] = 0  # not above 0
        assert torch.equal(step.score(ours), step.score(offsets))
        step.observe(ours)
        step.observe(offsets)
    assert not differences(
        *({n: t for n, t in copies(e.state).items() if n in (*BASE, "offsets")} for e in (ours, offsets))
    )
    assert bool((offsets.state.offsets != 0).any())


@pytest.mark.parametrize("exact", [True, False], ids=["exact labels", "verdicts"])
def test_slopes_intercepts_and_refits_never_see_the_additions(backend, exact):
    ours, base = estimator(interval=3), estimator(head=False, prior=None, interval=3)
    served = False
    for step in traffic(3, 120 if backend == "torch" else 8):
        force_open(ours)
        served |= not torch.equal(step.score(ours), step.score(base))
        step.observe(ours, exact)
        step.observe(base, exact)
        for name in BASE:
            one, other = (getattr(each.state, name) for each in (ours, base))
            if name == "counters":  # the last row sums the scores that were served
                one, other = one[:-1], other[:-1]
            assert torch.equal(one, other), name
    assert served
    assert int(base.state.clock[3]) >= 2


def play(ours: AcceptanceEstimator, base: AcceptanceEstimator, seed: int, steps: int, signal: float, exact: bool):
    """[steps, 2]: labels, and the expected log-loss above the base's, nats."""
    found = []
    for step in traffic(seed, steps, signal, whole=True):
        scores, without = step.score(ours), step.score(base)
        found.append((float(step.omega.sum()), excess(step, scores, without)))
        step.observe(ours, exact)
        step.observe(base, exact)
    return torch.tensor(found, dtype=torch.float64)


def worst_window(found: torch.Tensor, labels: float = 1000) -> float:
    """Largest mean excess over a run of steps with at least that many labels."""
    ends = torch.cat([torch.zeros(1, 2, dtype=torch.float64), found.cumsum(0)])
    means = [
        float((ends[j, 1] - ends[i, 1]) / (ends[j, 0] - ends[i, 0]))
        for i in range(len(ends))
        if (j := int(torch.searchsorted(ends[:, 0].contiguous(), ends[i, 0] + labels))) < len(ends)
    ]
    return max(means)


@pytest.mark.parametrize("exact", [True, False], ids=["exact labels", "verdicts"])
def test_hidden_states_of_noise_never_cost_more_than_a_thousandth(monkeypatch, exact):
    monkeypatch.setenv("AV_TRITON_BACKEND", "torch")
    found = play(estimator(), estimator(head=False, prior=None), 4, 400, 0.0, exact)
    assert found[:, 0].sum() > 3000
    assert worst_window(found) < 0.001


@pytest.mark.parametrize("exact", [True, False], ids=["exact labels", "verdicts"])
def test_a_switch_costs_a_gate_s_bounds_once(monkeypatch, exact):
    """A head that was useful meets hidden states that say nothing: the gate closes once it has lost what it was above
    0, and what a gate loses on its way to its lower bound, by openings in between, is no more than that again."""
    monkeypatch.setenv("AV_TRITON_BACKEND", "torch")
    ours, base = estimator(prior=None), estimator(head=False, prior=None)
    before = play(ours, base, 5, 250, 1.5, exact)
    assert bool((ours.state.gates[HEAD] > 0).all())
    assert before[:, 1].sum() < -50
    assert worst_window(before) < 0.001
    after = play(ours, base, 6, 250, 0.0, exact)
    strata = 2
    assert after[:, 1].cumsum(0).max() < strata * 2 * GATES[HEAD] / Q30
    assert bool((ours.state.gates[HEAD] <= 0).all())
    assert worst_window(after[100:]) < 0.001


@pytest.mark.parametrize("exact", [True, False], ids=["exact labels", "verdicts"])
def test_any_order_of_the_rows_gives_equal_bits(backend, exact):
    """Over 300 steps, with gates that open on their own, and what was served by row."""
    ours, theirs = estimator(), estimator()
    rng = torch.Generator().manual_seed(0)
    for step in traffic(7, 300 if backend == "torch" else 24):
        if backend == "triton":
            force_open(ours, theirs)
        order = torch.randperm(len(step.slots), generator=rng)
        assert torch.equal(step.score(ours)[order], step.score(theirs, order))
        step.observe(ours, exact)
        step.observe(theirs, exact, order)
        assert not differences(copies(ours.state), copies(theirs.state))
    assert bool((ours.state.head.weights != 0).any())
    assert backend == "triton" or bool((ours.state.gates[HEAD] > 0).any())
