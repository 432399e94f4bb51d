"""The replay of acceptance traces: its measures against scikit-learn's, its fit, its input, its command."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from typer import Typer
from typer.testing import CliRunner

from av_triton import logit_max
from benchmarks.traces.quality import (
    COLUMNS,
    Labels,
    Quality,
    accepted_before_rejection,
    area_under_curve,
    calibration_error,
    load,
    logits_for,
    offline_fit,
    predict,
    replay,
    sigmoid,
)
from benchmarks.traces.replay import main

DATA = Path(__file__).parents[1] / "benchmarks/traces/data"
TRACE = DATA / "A_gsm8k_T1.npz"


def labels(n: int, seed: int = 0) -> Labels:
    rng = np.random.default_rng(seed)
    f, k = rng.normal(1, 2, n), rng.integers(0, 3, n)
    observed = (rng.random(n) < sigmoid(0.6 * f + np.array([0.4, -0.3, -1.0])[k])).astype(np.float64)
    return Labels(f, k, np.zeros(n, np.int64), observed, sigmoid(f), None)


def test_measures_equal_those_of_scikit_learn() -> None:
    data = labels(3000)
    p = data.online.round(2).clip(0.01, 0.99)  # with ties
    quality = Quality.of(p, data.observed)
    assert quality.auc == pytest.approx(roc_auc_score(data.observed, p), abs=1e-12)
    assert quality.log_loss == pytest.approx(log_loss(data.observed, p), abs=1e-12)
    assert np.isnan(area_under_curve(p, np.ones_like(p)))


def test_calibration_error_of_known_cases() -> None:
    observed = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    assert calibration_error(np.full(8, 0.5), observed) == pytest.approx(0)
    assert calibration_error(np.full(8, 0.9), observed) == pytest.approx(0.4)
    assert calibration_error(np.repeat([0.25, 0.75], 4), observed) == pytest.approx(0.5)
    assert calibration_error(np.array([0.0, 1.0]), np.array([1.0, 0.0])) == 1


def test_offline_fit_equals_that_of_scikit_learn() -> None:
    data = labels(5000)
    design = np.column_stack([data.feature, *(data.position == k for k in range(3))])
    other = LogisticRegression(C=0.2, fit_intercept=False, tol=1e-9, max_iter=1000).fit(design, data.observed)
    assert offline_fit(data, 3, ridge=5.0) == pytest.approx(other.coef_[0], abs=1e-5)
    theta = offline_fit(data, 4)  # a position that was never seen
    assert theta[-1] == 0
    assert abs(predict(theta, data) - data.observed).mean() < 0.45


def test_offline_fit_is_finite_where_a_position_was_never_accepted() -> None:
    data = labels(500)
    theta = offline_fit(Labels(data.feature, data.position, data.workload, 0 * data.observed, data.online, None), 3)
    assert np.isfinite(theta).all()
    assert predict(theta, data).max() < 0.01


def test_logits_carry_the_feature() -> None:
    f = np.linspace(-5, 16, 211, dtype=np.float32)
    assert logit_max(logits_for(f)).numpy() == pytest.approx(f, abs=2e-5)
    assert logits_for(np.full((2, 3), 40, np.float32)).shape == (2, 3, 2)
    assert torch.equal(logit_max(logits_for(np.full(4, 40, np.float32))), torch.full((4,), 40.0))


def test_first_pass_has_the_recorded_verdicts_and_later_ones_follow_alpha() -> None:
    trace = load(TRACE)
    passes = 40
    result = replay(trace, passes)
    assert np.array_equal(result.accepted[0], trace.accepted)
    assert not np.array_equal(result.accepted[1], trace.accepted)
    expected = np.cumprod(trace.alpha, -1, dtype=np.float64).sum(-1).mean()
    assert result.accepted[1:].mean() == pytest.approx(expected, abs=0.03)
    # Labelled: up to and including the first rejection.
    assert len(result.labels().observed) == np.minimum(result.accepted + 1, trace.features.shape[-1]).sum()
    assert result.labels().observed.sum() == result.accepted.sum()
    assert np.array_equal(
        result.labels(passes - 1).online, result.labels().online[-len(result.labels(passes - 1).online) :]
    )


def test_accepted_drafts_end_at_the_first_rejection() -> None:
    verdicts = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], bool)
    assert accepted_before_rejection(verdicts).tolist() == [2, 0, 4]


def test_order_of_the_entries_does_not_matter(tmp_path: Path) -> None:
    with np.load(TRACE) as file:
        order = np.random.default_rng(0).permutation(len(file["f"]))
        np.savez(tmp_path / TRACE.name, **{name: file[name][order] for name in file.files})
    a, b = load(TRACE), load(tmp_path / TRACE.name)
    assert np.array_equal(a.features, b.features)
    assert np.array_equal(a.accepted, b.accepted)


def test_trace_in_smaller_batches_holds_the_same_rows() -> None:
    whole = load(DATA / "B_humaneval_T1.npz")
    parts = whole.in_batches(20)
    steps = len(whole.features)
    assert parts.features.shape == (2 * steps, 20, 7)
    assert whole.head is not None
    assert parts.head is not None
    assert {"prompt", "gap"} <= set(whole.extra)
    pairs = [(whole.features, parts.features), (whole.head, parts.head), (whole.accepted, parts.accepted)]
    for a, b in (*pairs, *((whole.extra[name], parts.extra[name]) for name in whole.extra)):
        assert np.array_equal(a[:, :20], b[:steps])
        assert np.array_equal(a[:, 20:40], b[steps:])
    with pytest.raises(ValueError, match="48 rows"):
        whole.in_batches(49)


def test_stratum_follows_the_temperature() -> None:
    assert load(DATA / "A_gsm8k_T0.npz").greedy
    assert not load(TRACE).greedy


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda columns: columns.pop("alpha"), "no column alpha"),
        (lambda columns: columns.update({name: columns[name][:-1] for name in COLUMNS}), "entries, "),
        (lambda columns: columns["pos"].__setitem__(0, 2), "6384 entries, 6383 of them different"),
        (lambda columns: columns["alpha"].__setitem__(5, 1.5), "within 0 to 1"),
        (lambda columns: columns["f"].__setitem__(5, np.nan), "finite"),
    ],
)
def test_damaged_trace_is_refused(damage, message: str, tmp_path: Path) -> None:
    with np.load(TRACE) as file:
        columns = {name: file[name] for name in file.files}
    damage(columns)
    np.savez(tmp_path / "x.npz", **columns)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "x.npz")


def command(*arguments: object) -> tuple[int, str]:
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_command_prints_and_draws(tmp_path: Path) -> None:
    (tmp_path / TRACE.name).symlink_to(TRACE)
    picture = tmp_path / "new" / "traces.png"
    status, output = command(tmp_path, "--passes", 6, "--output", picture)
    assert status == 0, output
    for text in ("By trace and workload", "gsm8k", "by draft position", "Cold start", "good"):
        assert text in output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    # An estimator that does not move misses the bound.
    status, output = command(tmp_path, "--passes", 6, "--damping", 1e9, "--output", picture)
    assert status == 1
    assert "MISSED" in output
    assert command(tmp_path, "--passes", 2, "--rows", 49)[0] == 2


def test_command_refuses_a_folder_without_traces(tmp_path: Path) -> None:
    assert command(tmp_path)[0] == 2
    (tmp_path / "x.npz").write_text("no archive")
    status, output = command(tmp_path)
    assert status == 2
    assert "x.npz" in output
