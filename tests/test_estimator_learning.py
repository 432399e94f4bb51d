"""The estimator learns: known models, saturated rows, mixed and changing traffic, starved positions, recorded traces.

The verdicts are drawn from a model that is known, so that what has to be learned is known too. Seeds are fixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from av_triton import GREEDY, SAMPLED, AcceptanceEstimator, AdaptiveVerifier, CostTable, Settings
from benchmarks.traces.quality import (
    Integers,
    Mask,
    Report,
    accepted_before_rejection,
    calibration_error,
    load,
    logits_for,
    replay,
    sigmoid,
)

DATA = Path(__file__).parents[1] / "benchmarks/traces/data"
INTERVAL = Settings().refit_interval
Q30 = 1 << 30
CYCLES = 20  # refits within which a model has to be learned


@dataclass(frozen=True)
class Model:
    """p[k] = sigmoid(slope * f + intercepts[k]) with f normal, cut to -3 .. 12."""

    slope: float
    intercepts: Sequence[float]
    mean: float = 1.0
    spread: float = 2.0

    def draw(self, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, Integers]:
        """(features float32 [rows, K], true probabilities [rows, K], accepted drafts int64 [rows])."""
        f = rng.normal(self.mean, self.spread, (rows, len(self.intercepts))).clip(-3, 12).astype(np.float32)
        p = sigmoid(self.slope * f.astype(np.float64) + np.array(self.intercepts))
        return f, p, accepted_before_rejection(rng.random(f.shape) < p)


def test_at_rest_the_coefficients_move_less_than_one_cycle_s_fit(use):
    use("torch")
    model, spread = Model(0.6, (0.2, -0.4)), {}
    for memory in (1.0, 4.0):
        estimator = AcceptanceEstimator(32, 2, settings=Settings(memory=memory))
        rng, moves = np.random.default_rng(3), []
        for _ in range(100):
            teach(estimator, model, rng, cycles=1, rows=32)
            moves.append(float(estimator.state.intercepts[0, 0]))
        spread[memory] = np.var(moves[10:])
        assert estimator.state.labels[0, 0] == 100 * INTERVAL * 32 * Q30
    # A mean with weights of 1/4, 3/16, ... has a seventh of the variance.
    assert 0.07 < spread[4.0] / spread[1.0] < 0.3


def labelled(accepted: Integers, positions: int) -> Mask:
    return np.arange(positions) <= accepted[:, None]


def teach(
    estimator: AcceptanceEstimator, model: Model, rng: np.random.Generator, cycles: int, rows: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cycles of steps, everything verified. (predicted, observed) of the labelled drafts at position 1, by cycle."""
    slots, K = torch.arange(rows), len(model.intercepts)
    every = torch.full((rows,), K)
    seen = []
    for _ in range(cycles):
        predicted, observed = [], []
        for _ in range(INTERVAL):
            f, _, accepted = model.draw(rng, rows)
            p = estimator.score(logits_for(f), slots)
            predicted.append(p[:, 0].double().numpy())
            observed.append((accepted > 0).astype(np.float64))
            estimator.observe(slots, torch.from_numpy(accepted), every)
        seen.append((np.concatenate(predicted), np.concatenate(observed)))
    return seen


def check_recovered(model: Model, stratum: int, seed: int) -> None:
    rows, K = 1024, len(model.intercepts)
    estimator, rng = AcceptanceEstimator(rows, K), np.random.default_rng(seed)
    estimator.reset(torch.arange(rows), torch.full((rows,), stratum, dtype=torch.int32))
    teach(estimator, model, rng, CYCLES, rows)
    fitted = estimator.coefficients()
    assert fitted.refits == CYCLES
    assert fitted.slopes[stratum] == pytest.approx(model.slope, abs=0.02)
    labels = np.zeros(K)
    for _ in range(INTERVAL):
        labels += labelled(model.draw(rng, rows)[2], K).sum(0)
    fed = labels > 8000
    assert fed.sum() >= 2
    error = np.abs(np.array(fitted.intercepts[stratum]) - model.intercepts)
    assert error[fed].max() < 0.1, (fitted, labels)


@pytest.mark.parametrize(
    ("model", "stratum"),
    [
        (Model(0.55, (0.6, 0.3, 0.1, -0.2, -0.4)), SAMPLED),
        (Model(0.3, (1.5, 0.8, -0.3, -1.0, -1.5)), SAMPLED),
        (Model(1.05, (0.9, 0.2, 0.4, -0.1, 0.0)), GREEDY),
    ],
)
def test_known_logistic_model_is_recovered(model: Model, stratum: int) -> None:
    check_recovered(model, stratum, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(24))
def test_random_logistic_model_is_recovered(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slope = rng.uniform(0.2, 1.2)
    check_recovered(Model(slope, np.sort(rng.uniform(-0.8, 1.5, 7))[::-1].tolist()), int(slope > 0.75), seed)


@pytest.mark.parametrize("stratum", [SAMPLED, GREEDY])
@pytest.mark.parametrize("counts", [(9, 1), (90, 9, 1), (900, 90, 9, 1)])
def test_saturated_rows_settle_at_their_acceptance(counts: tuple[int, ...], stratum: int) -> None:
    # counts[a] rows have a drafts accepted: 10 % at every position and in every step, without noise.
    accepted = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    rows, positions = len(accepted), len(counts) - 1
    estimator, slots = AcceptanceEstimator(rows, positions), torch.arange(rows)
    estimator.reset(slots, torch.full((rows,), stratum, dtype=torch.int32))
    logits = logits_for(np.full((rows, positions), 40, np.float32))
    for step in range(2 * CYCLES * INTERVAL):
        p = estimator.score(logits, slots)
        if step >= CYCLES * INTERVAL:
            assert p[0].tolist() == pytest.approx([0.1] * positions, abs=0.015), step
        estimator.observe(slots, accepted, torch.full((rows,), positions))


@pytest.mark.parametrize("slope_bound", [0.1, 1e9])
def test_saturated_rows_settle_from_below_only_with_a_bounded_slope(slope_bound: float) -> None:
    # p = 1e-11 at first: the Hessian vanishes, and an unbounded step throws the slope to 1e6, then back to 0, for ever.
    accepted, slots = torch.tensor([0] * 9 + [1]), torch.arange(10)
    estimator = AcceptanceEstimator(10, 1, settings=Settings(max_slope_step=slope_bound))
    estimator.reset(slots)
    estimator.state.slopes[SAMPLED] = 0
    estimator.state.intercepts[SAMPLED] = -25
    logits = logits_for(np.full((10, 1), 40, np.float32))
    for _ in range(CYCLES * INTERVAL):
        estimator.score(logits, slots)
        estimator.observe(slots, accepted, torch.full((10,), 1))
    p = float(estimator.score(logits, slots)[0, 0])
    assert (abs(p - 0.1) < 0.015) == (slope_bound == 0.1), p


def test_greedy_traffic_does_not_move_the_sampled_predictions() -> None:
    # vLLM #52228: the slope of greedy traffic is .65, that of sampled traffic .50.
    sampled, greedy = Model(0.5, (0.4, 0.1, -0.2)), Model(0.65, (1.4, 1.2, 1.0))
    half, K, cycles = 128, 3, 8
    slots = torch.arange(2 * half)
    strata = torch.tensor([SAMPLED] * half + [GREEDY] * half, dtype=torch.int32)

    def serve(rows: int, strata: torch.Tensor | None) -> list[torch.Tensor]:
        estimator = AcceptanceEstimator(2 * half, K)
        estimator.reset(slots, strata)
        rng, others = np.random.default_rng(3), np.random.default_rng(4)
        served = []
        for _ in range(cycles * INTERVAL):
            f, _, accepted = (
                np.concatenate(pair) for pair in zip(sampled.draw(rng, half), greedy.draw(others, half), strict=True)
            )
            p = estimator.score(logits_for(f)[:rows], slots[:rows])
            served.append(p[:half].clone())
            estimator.observe(slots[:rows], torch.from_numpy(accepted)[:rows], torch.full((rows,), K))
        return served

    alone, mixed, merged = serve(half, strata), serve(2 * half, strata), serve(2 * half, None)
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(alone, merged, strict=True)) > 0.05


def test_calibration_recovers_from_a_workload_switch() -> None:
    # The article's figures: the first intercept goes from +.61 to -.09.
    before, after = Model(0.52, (0.61, 0.3, 0.1)), Model(0.52, (-0.09, -0.2, -0.3))
    rows = 512
    estimator, rng = AcceptanceEstimator(rows, 3), np.random.default_rng(5)
    estimator.reset(torch.arange(rows))
    settled = teach(estimator, before, rng, 10, rows)
    switched = teach(estimator, after, rng, 4, rows)
    errors = [calibration_error(*cycle) for cycle in (settled[-1], *switched)]
    assert errors[0] < 0.03
    assert errors[1] > 0.1
    assert max(errors[2:]) < 0.03, errors


def rounds(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(features, exact acceptance probabilities) of the rounds of a recorded trace, float32 [n, K] each."""
    trace = load(DATA / f"{name}.npz")
    positions = trace.features.shape[-1]
    return trace.features.reshape(-1, positions), trace.alpha.reshape(-1, positions)


def redrawn(alpha: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(accepted_before_rejection(rng.random(alpha.shape) < alpha))


def expected_loss(estimator: AcceptanceEstimator, f: np.ndarray, alpha: np.ndarray) -> float:
    """Mean log-loss per label, in expectation over the verdicts, of rounds that are verified in full."""
    now = estimator.coefficients()
    p = sigmoid(now.slopes[SAMPLED] * f.astype(np.float64) + np.array(now.intercepts[SAMPLED])).clip(1e-9, 1 - 1e-9)
    reach = np.cumprod(np.concatenate([np.ones_like(alpha[:, :1]), alpha[:, :-1]], 1), 1)
    return float(-(reach * (alpha * np.log(p) + (1 - alpha) * np.log(1 - p))).sum() / reach.sum())


def put(estimator: AcceptanceEstimator, slots: torch.Tensor, f: np.ndarray) -> None:
    """As if drafts with these features had been scored."""
    estimator.state.features[slots, : f.shape[1]] = torch.from_numpy(f)
    estimator.state.scores[slots] = 0.5


def test_exact_labels_converge_to_where_many_redrawn_verdicts_do() -> None:
    rng = np.random.default_rng(8)
    f, alpha = (values[:256] for values in rounds("A_gsm8k_T1"))
    rows, K = f.shape
    slots, every = torch.arange(rows), torch.full((rows,), K)
    exact = AcceptanceEstimator(rows, K, settings=Settings(refit_interval=8, memory=1.0))
    verdicts = AcceptanceEstimator(rows, K, settings=Settings(refit_interval=8, memory=50.0))
    for _ in range(100 * 8):
        before = exact.coefficients()
        for estimator, acceptance in ((exact, torch.from_numpy(alpha)), (verdicts, None)):
            put(estimator, slots, f)
            estimator.observe(slots, redrawn(alpha, rng), every, acceptance=acceptance)
    a, b = exact.coefficients(), verdicts.coefficients()
    assert a.slopes == pytest.approx(before.slopes, abs=1e-6), "at rest: these labels have no noise"
    assert a.intercepts[SAMPLED] == pytest.approx(before.intercepts[SAMPLED], abs=1e-6)
    assert a.slopes[SAMPLED] == pytest.approx(b.slopes[SAMPLED], abs=0.01)
    assert a.intercepts[SAMPLED] == pytest.approx(b.intercepts[SAMPLED], abs=0.05)
    assert abs(a.slopes[SAMPLED] - Settings().initial_slopes[SAMPLED]) > 0.02


@pytest.mark.parametrize("name", ["A_gsm8k_T1", pytest.param("B_humaneval_T1", marks=pytest.mark.full)])
def test_exact_labels_leave_less_excess_loss_than_verdicts_of_as_many_rounds(name: str) -> None:
    f, alpha = (values[:1024] for values in rounds(name))
    K = f.shape[1]

    def fitted(exact: bool, rows: int, steps: int, seed: int = 0, **options: float) -> float:
        rng = np.random.default_rng(seed)
        estimator = AcceptanceEstimator(rows, K, settings=Settings(**options))
        slots, every = torch.arange(rows), torch.full((rows,), K)
        for _ in range(steps):
            chosen = rng.choice(len(f), rows, replace=False)
            put(estimator, slots, f[chosen])
            acceptance = torch.from_numpy(alpha[chosen]) if exact else None
            estimator.observe(slots, redrawn(alpha[chosen], rng), every, acceptance=acceptance)
        return expected_loss(estimator, f, alpha)

    best = fitted(True, len(f), 60, refit_interval=1, memory=1.0)
    verdicts, exact = (
        np.mean([fitted(kind, 8, 160, seed, refit_interval=8) for seed in range(16)]) - best for kind in (False, True)
    )
    print(f"{name}: excess log-loss {exact:.5f} by exact labels, {verdicts:.5f} by verdicts: {exact / verdicts:.2f}")
    assert 0 < exact < 0.85 * verdicts


# Verifying costs in proportion to the tokens: unlikely drafts do not pay.
RISING = CostTable(draft=[(1, 0.5)], verify=[(1, 19.0), (1024, 121.0)])
STARVED = -6.0
K = 4
TRUTH = 0.9  # acceptance of every draft, whatever its feature


def step(verifier: AdaptiveVerifier, rng: np.random.Generator, verdict: bool = True) -> int:
    """One step under the planner's own budget. Drafts admitted."""
    rows = verifier.estimator.max_slots
    slots = torch.arange(rows)
    f = rng.normal(2.0, 1.0, (rows, K)).clip(0, 6).astype(np.float32)
    verifier.score(logits_for(f), slots)
    plan = verifier.plan(slots)
    accepted = torch.from_numpy(accepted_before_rejection(rng.random(f.shape) < TRUTH))
    verifier.observe(slots, torch.minimum(accepted, plan.admitted) if verdict else torch.full((rows,), -1))
    return int(plan.admitted.sum())


def starved(rows: int, positions: Sequence[int], exploration: float = Settings().exploration) -> AdaptiveVerifier:
    """The first plan has no earlier survivals and verifies all: its verdicts are withheld, for they would help."""
    verifier = AdaptiveVerifier(rows, K, cost=RISING, settings=Settings(exploration=exploration))
    verifier.reset(torch.arange(rows))
    verifier.estimator.state.intercepts[SAMPLED, list(positions)] = STARVED
    step(verifier, np.random.default_rng(6), verdict=False)
    return verifier


def run(verifier: AdaptiveVerifier, refits: int, seed: int) -> list[int]:
    """Drafts admitted in each step until the coefficients have been refitted so often."""
    rng, admitted = np.random.default_rng(seed), []
    while verifier.status().refits < refits:
        admitted.append(step(verifier, rng))
    return admitted


def acceptance(verifier: AdaptiveVerifier) -> np.ndarray:
    """Predicted at the mean feature, float64 [K]."""
    fitted = verifier.coefficients()
    return sigmoid(fitted.slopes[SAMPLED] * 2 + np.array(fitted.intercepts[SAMPLED]))


# A small batch explores fewer drafts per refit.
@pytest.mark.parametrize(("rows", "refits"), [(256, 5), (16, 10)])
@pytest.mark.parametrize("positions", [[1], [2], [3], range(K)])
def test_starved_position_recovers_by_exploration(positions: Sequence[int], rows: int, refits: int) -> None:
    # vLLM #44336: b = -6 where the true acceptance is .9, under a binding budget; at all positions: a budget of 0.
    verifier = starved(rows, positions)
    assert acceptance(verifier)[list(positions)].max() < 0.01
    admitted = run(verifier, refits, seed=7)
    assert sum(admitted[: INTERVAL - 1]) < (positions[0] + 0.1) * rows * INTERVAL
    assert acceptance(verifier).min() > 0.5


@pytest.mark.parametrize("positions", [[1], [2], [3], range(K)])
def test_starved_position_stays_so_without_exploration(positions: Sequence[int]) -> None:
    verifier = starved(64, positions, exploration=0.0)
    admitted = run(verifier, 10, seed=7)
    assert max(admitted) <= 64 * positions[0]
    assert {verifier.coefficients().intercepts[SAMPLED][k] for k in positions} == {STARVED}
    assert verifier.counters()["labelled"][list(positions)].sum() == 0


# AUC, log-loss, ECE online and log-loss offline over the last half of 50 passes, from benchmarks/traces/README.md.
FIGURES = {
    "A_gsm8k_T0": (0.7977, 0.5032, 0.0236, 0.5031),
    "A_gsm8k_T1": (0.7163, 0.5971, 0.0272, 0.5970),
    "B_humaneval_T1": (0.8015, 0.5215, 0.0145, 0.5214),
}


@pytest.mark.parametrize("name", sorted(FIGURES))
@pytest.mark.parametrize(
    ("passes", "tolerance"), [(12, 0.008), pytest.param(50, 0.001, marks=pytest.mark.full)], ids=["12", "50"]
)
def test_recorded_trace_is_learned_as_well_online_as_offline(name: str, passes: int, tolerance: float) -> None:
    report = Report.of(replay(load(DATA / f"{name}.npz"), passes))
    assert -0.001 < report.excess < 0.01
    quality = report.quality()
    online = quality["online"]
    seen = (online.auc, online.log_loss, online.ece, quality["offline"].log_loss)
    assert seen == pytest.approx(FIGURES[name], abs=tolerance)
    assert online.log_loss < quality["q_max"].log_loss - 0.01
    assert online.ece < quality["q_max"].ece / 2
