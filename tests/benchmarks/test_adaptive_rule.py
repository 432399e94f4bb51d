"""The released peer's rule, restated: its decisions on cases worked out by hand."""

import math

import numpy as np
import pytest

from benchmarks.peers.adaptive_rule import REFIT_INTERVAL, PeerEstimator, PeerRule, cancelled, ranked_prefixes


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def test_the_feature_cancels_for_confident_rows():
    found = cancelled(np.array([-3.0, 0.0, 5.0, 15.0, 20.0], np.float32))
    np.testing.assert_allclose(found[:3], [-3, 0, 5], atol=1e-4)
    assert 0.01 < abs(found[3] - 15) < 0.5
    assert found[4] == 40


def test_a_refit_is_the_damped_newton_step_of_its_formulas():
    """One position, one request, f = 2, always accepted: p = sigmoid(.5 * 2 - .2), n = 100 labels."""
    estimator = PeerEstimator(1)
    features, one = np.full((1, 1), 2, np.float32), np.ones(1, np.int64)
    for step in range(REFIT_INTERVAL):
        assert estimator.slope == np.float32(0.5), step
        estimator.observe(features, estimator.score(features), accepted=one, admitted=one)
    p, damping = sigmoid(0.8), 100 / 150
    v, r = 100 * p * (1 - p), 100 * (1 - p)
    a, b, c, h, g = 4 * v + 1e-3, 2 * v, v + 1e-3, 2 * r, r
    slope_step = (h - b * g / c) / (a - b * b / c) * damping
    assert estimator.slope == pytest.approx(0.5 + slope_step, rel=2e-3)  # the differences cancel in float32
    moved = estimator.slope - np.float32(0.5)
    assert estimator.intercepts[0] == pytest.approx(-0.2 + (g - b * moved) / c * damping, rel=1e-4)
    assert not estimator.info.any()
    assert not estimator.counts.any()


def test_only_verified_drafts_up_to_the_first_rejection_teach():
    estimator = PeerEstimator(4)
    features = np.zeros((3, 4), np.float32)
    estimator.observe(features, estimator.score(features), np.array([1, 2, 0]), np.array([4, 2, 0]))
    assert estimator.counts.tolist() == [2, 2, 0, 0]  # row 0: accepted, rejected; row 1: two accepted, all it had


def test_saturated_rows_move_the_intercept_without_a_bound():
    """p = 1 in float32: no weight, so the step is the residual over the ridge."""
    estimator = PeerEstimator(1)
    features, zero, one = np.full((1, 1), 40, np.float32), np.zeros(1, np.int64), np.ones(1, np.int64)
    for _ in range(REFIT_INTERVAL):
        estimator.observe(features, estimator.score(features), zero, one)
    assert estimator.slope == 0.5  # a step below 0 is not taken
    assert estimator.intercepts[0] == pytest.approx(-0.2 - 100 / 1e-3 * 100 / 150, rel=1e-3)


def test_the_budget_is_that_of_the_drafts_before_and_the_ranking_of_these():
    """Two requests; the second draft never pays, the first only where it is likely enough for its cost."""
    rule = PeerRule(2, 2, np.array([1.0, 1.6, 10, 10, 10]))
    none, sure, unsure = np.zeros(2, bool), np.full((2, 2), 12, np.float32), np.full((2, 2), -8, np.float32)
    assert rule.admit(unsure, np.ones(2, bool)).tolist() == [0, 0]  # 3 / 1.6 < 2 / 1, even for new, certain ones
    rule = PeerRule(2, 2, np.array([1.0, 1.2, 10, 10, 10]))
    assert rule.admit(unsure, np.ones(2, bool)).sum() == 1  # new: certain
    mixed = np.array([[-8, 12], [-7, 12]], np.float32)
    assert rule.admit(mixed, none).tolist() == [0, 0]  # the drafts before were unsure
    assert rule.admit(sure[:, ::-1] + np.array([[0], [1]], np.float32), none).tolist() == [0, 0]
    assert rule.admit(mixed, none).tolist() == [0, 1]  # the drafts before were sure; the best of these is row 1's
    assert rule.admit(mixed, np.array([True, False])).sum() == 1


def test_the_ranking_admits_prefixes():
    survival = np.cumprod(np.random.default_rng(0).random((5, 4), dtype=np.float32), 1)
    admitted = ranked_prefixes(survival, 9)
    assert admitted.sum() == 9
    inside = np.arange(4) < admitted[:, None]
    assert survival[inside].min() >= survival[~inside].max()
