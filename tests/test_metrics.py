import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from av_triton import AdaptiveVerifier
from av_triton.metrics import MetricsCollector, StepTimes, calibration, difference, percent


class Verifier:
    def __init__(self, **counters):
        self.values = {name: np.array(value, np.int64) for name, value in counters.items()}

    def counters(self):
        return self.values


def busy():
    return Verifier(
        drafted=[100, 100],
        admitted=[90, 50],
        trimmed=[10, 50],
        accepted=[63, 12],
        labelled=[90, 40],
        labelled_accepted=[60, 10],
        expected_accepted=[int(63.25 * 2**20), 12 << 20],
        steps=7,
        refits=[2],
        explored=3,
        bypassed=1,
    )


def scrape(collector):
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {f.name: f for f in text_string_to_metric_families(text)}, registry


def test_vllm_51303_51874_every_counter_people_missed_is_there_by_position():
    families, registry = scrape(MetricsCollector(busy()))
    assert {f.type for f in families.values()} == {"counter"}
    expected = {
        "drafted": [100, 100],
        "admitted": [90, 50],
        "trimmed": [10, 50],
        "accepted": [63, 12],
        "labelled": [90, 40],
        "labelled_accepted": [60, 10],
        "expected_accepted": [63.25, 12],
    }
    for name, values in expected.items():
        for position, value in enumerate(values):
            assert registry.get_sample_value(f"av_triton_{name}_total", {"position": str(position)}) == value
    for name, value in {"steps": 7, "refits": 2, "explored": 3, "bypassed": 1}.items():
        assert registry.get_sample_value(f"av_triton_{name}_total") == value
    assert len(families) == 11


def test_vllm_51303_51874_predicted_against_measured_step_time():
    times = StepTimes()
    registry = scrape(MetricsCollector(busy(), step_times=times))[1]
    times.add(predicted_ms=8.0, measured_ms=10.0)
    times.add(predicted_ms=8.0, measured_ms=9.0)
    assert registry.get_sample_value("av_triton_predicted_step_seconds_total") == pytest.approx(0.016)
    assert registry.get_sample_value("av_triton_step_seconds_total") == pytest.approx(0.019)


def test_vllm_51303_51874_calibration_error_follows_from_the_counters():
    result = calibration(busy().counters())
    assert result.predicted == pytest.approx([63.25 / 90, 12 / 40])
    assert result.observed == pytest.approx([60 / 90, 10 / 40])
    assert result.error == pytest.approx([3.25 / 90, 2 / 40])
    assert result.overall == pytest.approx(5.25 / 130)


def test_vllm_metal_766_zero_drafts_are_inconclusive_not_zero():
    idle = Verifier(labelled=[0, 0], labelled_accepted=[0, 0], expected_accepted=[0, 0])
    result = calibration(idle.counters())
    for values in (result.predicted, result.observed, result.error, result.overall):
        assert np.isnan(values).all()
    assert percent(0, 0) == "inconclusive"
    assert percent(0, 4) == "0.0 %"
    assert percent(1, 4) == "25.0 %"


def test_vllm_metal_766_a_position_without_labels_does_not_blur_the_others():
    starved = Verifier(labelled=[10, 0], labelled_accepted=[5, 0], expected_accepted=[6 << 20, 0])
    result = calibration(starved.counters())
    assert result.error[0] == pytest.approx(0.1)
    assert np.isnan(result.error[1])
    assert result.overall == pytest.approx(0.1)


def run(verifier, slots):
    """Steps over `slots`, whose first draft alone is accepted."""
    slots = torch.tensor(slots, dtype=torch.int32)
    logits = torch.randn(len(slots), 2, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        verifier.score(logits, slots)
        verifier.plan(slots)
        verifier.observe(slots, torch.ones(len(slots), dtype=torch.int32))


def test_a_real_verifier_is_scraped_and_adds_up():
    verifier = AdaptiveVerifier(8, 2)
    verifier.reset(torch.arange(8, dtype=torch.int32))
    families, registry = scrape(MetricsCollector(verifier))
    assert len(families) == 11
    run(verifier, [0, 1, 2, 3])

    def value(name, position):
        return registry.get_sample_value(f"av_triton_{name}_total", {"position": str(position)})

    assert registry.get_sample_value("av_triton_steps_total") == 3
    for position in (0, 1):
        assert value("drafted", position) == 12
        assert value("admitted", position) + value("trimmed", position) == 12
        assert value("labelled_accepted", position) <= value("labelled", position) <= value("admitted", position)
        assert 0 < value("expected_accepted", position) < value("labelled", position)
    assert value("labelled_accepted", 0) == value("labelled", 0) == 12
    assert value("labelled_accepted", 1) == 0


def test_sglang_confidence_metrics_padded_rows_leave_every_metric_unchanged():
    plain, padded = (AdaptiveVerifier(8, 2) for _ in range(2))
    for verifier in (plain, padded):
        verifier.reset(torch.arange(8, dtype=torch.int32))
    # Padding behind the real rows, which so keep their logits.
    run(plain, [0, 1, 2])
    run(padded, [0, 1, 2, -1, -1])
    for name, values in plain.counters().items():
        np.testing.assert_array_equal(padded.counters()[name], values, err_msg=name)


def test_constant_labels_are_on_every_sample():
    families, _ = scrape(MetricsCollector(busy(), {"model": "a", "rank": "3"}, StepTimes()))
    for family in families.values():
        for sample in family.samples:
            assert (sample.labels["model"], sample.labels["rank"]) == ("a", "3")
    assert len(families) == 13


def test_two_verifiers_share_a_registry_by_their_labels():
    registry = CollectorRegistry()
    for rank in "01":
        registry.register(MetricsCollector(busy(), {"rank": rank}))
    assert registry.get_sample_value("av_triton_steps_total", {"rank": "1"}) == 7


def test_a_counter_that_the_source_lacks_is_absent():
    families, _ = scrape(MetricsCollector(Verifier(steps=4)))
    assert list(families) == ["av_triton_steps"]


def test_a_scrape_reads_the_source_once_and_shows_what_it_holds_then():
    verifier = busy()
    reads = []
    real = verifier.counters
    verifier.counters = lambda: (reads.append(1), real())[1]
    registry = CollectorRegistry()
    registry.register(MetricsCollector(verifier))
    generate_latest(registry)
    assert len(reads) == 1
    verifier.values["steps"] += 5
    assert registry.get_sample_value("av_triton_steps_total") == 12


def test_a_label_named_position_is_refused():
    with pytest.raises(ValueError, match=r"'position'.*choose another"):
        MetricsCollector(busy(), {"position": "x"})


def test_without_prometheus_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"av-triton\[metrics\]"):
        MetricsCollector(busy())
    # The figures need no Prometheus.
    assert calibration(busy().counters()).overall > 0


counts = st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=16)


@given(counts, counts)
def test_the_calibration_of_a_window_is_that_of_its_own_drafts(first, second):
    size = min(len(first), len(second))

    def read(rows):
        labelled = np.array([n for n, _, _ in rows[:size]], np.int64)
        accepted = np.array([int(n * share) for n, share, _ in rows[:size]], np.int64)
        expected = np.array([int(n * p * 2**20) for n, _, p in rows[:size]], np.int64)
        return {"labelled": labelled, "labelled_accepted": accepted, "expected_accepted": expected}

    before, window = read(first), read(second)
    after = {name: before[name] + window[name] for name in window}
    result, alone = calibration(difference(after, before)), calibration(window)
    np.testing.assert_array_equal(result.error, alone.error)
    assert (np.isnan(result.error) == (window["labelled"] == 0)).all()
    known = result.error[~np.isnan(result.error)]
    assert ((known >= 0) & (known <= 1)).all()
    assert np.isnan(result.overall) == (window["labelled"].sum() == 0)
