import math
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import av_triton.cost
from av_triton.cost import CostTable

DRAFT = [(1, 1.0), (64, 2.0)]


def verify_curve(samples, limit, captured=()):
    return CostTable(DRAFT, list(samples), list(captured)).dense(1, limit).verify


# What users of other engines reported.


def test_vllm_curve_noisy_samples_become_a_cumulative_maximum():
    table = CostTable([(1, 3.0), (2, 2.0), (4, 4.0)], [(1, 1.0), (2, 5.0), (3, 4.0), (4, 6.0)])
    dense = table.dense(4, 4)
    assert dense.verify.tolist() == [1.0, 1.0, 5.0, 5.0, 6.0]
    assert dense.draft.tolist() == [3.0, 3.0, 3.0, 3.5, 4.0]


def test_vllm_curve_the_jump_from_captured_to_eager_is_not_interpolated():
    verify = verify_curve([(4, 1.0), (8, 2.0), (16, 10.0), (32, 18.0)], 40, captured=[4, 8])
    assert verify[8] == 2.0
    assert verify[9:17].tolist() == [10.0] * 8
    assert verify[24] == pytest.approx(14.0)
    assert verify[40] == pytest.approx(22.0)


def test_vllm_curve_eager_samples_do_not_smear_the_captured_draft_curve():
    captured = CostTable([(4, 1.0), (8, 1.5)], [(1, 1.0)], draft_captured=[4, 8]).dense(8, 1).draft
    both = CostTable([(4, 1.0), (8, 1.5), (16, 9.0)], [(1, 1.0)], draft_captured=[4, 8]).dense(16, 1).draft
    assert both[:9].tolist() == captured.tolist() == [1.0] * 5 + [1.5] * 4
    assert both[9:].tolist() == [9.0] * 8


def test_vllm_curve_a_slow_graph_does_not_raise_eager_samples_above_it():
    verify = verify_curve([(8, 5.0), (16, 6.0), (32, 8.0)], 32, captured=[8])
    assert verify[16] == 6.0


def test_local_inference_lab_748_cost_is_that_of_the_padded_graph():
    dense = CostTable(DRAFT, [(8, 2.0), (16, 3.0), (32, 7.0)], captured=[8, 16, 32]).dense(1, 32)
    for low, high, cost in ((0, 8, 2.0), (8, 16, 3.0), (16, 32, 7.0)):
        assert set(dense.verify[low + 1 : high + 1]) == {cost}
        assert set(dense.padded[low + 1 : high + 1]) == {high}


@pytest.mark.parametrize("samples", [[(1, 5.0)], [(1, 5.0), (512, 5.0)], [(1, 5.0), (256, 5.04)], [(1, 5.0), (8, 4.0)]])
def test_sglang_35413_38897_a_flat_table_says_so(samples):
    assert CostTable(DRAFT, samples).dense(4, 512 if len(samples) == 1 else samples[-1][0]).is_flat


@pytest.mark.parametrize("samples", [[(1, 5.0), (256, 5.06)], [(1, 5.0), (255, 5.0), (256, 9.0)]])
def test_sglang_35413_38897_a_rising_table_is_not_flat(samples):
    assert not CostTable(DRAFT, samples).dense(4, 256).is_flat


def test_sglang_35413_38897_the_default_table_of_sglang_reads_as_flat():
    sps = {"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0], "max_batch_tokens": 512}
    assert CostTable.from_sps(sps).dense(8, 512).is_flat


@pytest.mark.parametrize("asked", [None, [1, 64, 1024, 4096]])
def test_vllm_ascend_16761_profiling_keeps_to_the_bounds_of_the_run_time(asked):
    seen = {"verify": set(), "draft": set()}
    table = CostTable.measure(
        lambda n: seen["verify"].add(n),
        asked,
        max_tokens=2721,
        draft=lambda n: seen["draft"].add(n),
        draft_sizes=asked,
        max_requests=40,
        captured=[500, 1000, 4096],
        repeats=1,
        warmup=1,
        progress=False,
    )
    assert max(seen["verify"]) == 2721
    assert max(seen["draft"]) == 40
    assert table.verify[-1][0] == 2721
    assert table.draft[-1][0] == 40
    assert {500, 1000} <= seen["verify"] or asked
    assert min(seen["verify"]) >= 1


# Shape of the dense table.


@st.composite
def tables(draw):
    def curve():
        sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=8, unique=True).map(sorted))
        captured = draw(st.lists(st.integers(1, 300), max_size=8, unique=True).map(sorted))
        if captured and captured[-1] < sizes[0]:
            captured.append(sizes[0])
        return [(n, draw(st.floats(1e-3, 1e3))) for n in sizes], captured

    (drafts, draft_captured), (verify, captured) = curve(), curve()
    return CostTable(drafts, verify, captured, draft_captured)


@given(tables(), st.integers(1, 400), st.integers(1, 400))
def test_dense_is_positive_never_falls_and_pads_upwards(table, max_requests, max_tokens):
    dense = table.dense(max_requests, max_tokens)
    assert dense.draft.shape == (max_requests + 1,)
    assert dense.verify.shape == dense.padded.shape == (max_tokens + 1,)
    assert (dense.draft.dtype, dense.verify.dtype, dense.padded.dtype) == (np.float64, np.float64, np.int32)
    for curve in (dense.draft, dense.verify):
        assert np.isfinite(curve).all()
        assert (curve > 0).all()
        assert (np.diff(curve) >= 0).all()
    assert (dense.padded >= np.arange(max_tokens + 1)).all()
    assert (np.diff(dense.padded) >= 0).all()
    top = table.captured[-1] if table.captured else 0
    inside = dense.padded[1 : top + 1]
    assert set(inside) <= set(table.captured)
    # One graph, one cost.
    for size in set(inside):
        assert len(set(dense.verify[1:][: len(inside)][inside == size])) == 1
    if max_tokens > top:
        assert dense.padded[top + 1 :].tolist() == list(range(top + 1, max_tokens + 1))


@given(tables(), st.integers(1, 200))
def test_a_larger_range_changes_nothing_below(table, limit):
    small, large = table.dense(limit, limit), table.dense(limit + 100, limit + 100)
    assert np.array_equal(large.verify[: limit + 1], small.verify)
    assert np.array_equal(large.draft[: limit + 1], small.draft)


def test_samples_without_noise_are_met_exactly_and_lines_join_them():
    verify = verify_curve([(2, 1.0), (6, 3.0)], 10)
    assert verify.tolist() == [1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]


def test_captured_sizes_between_samples_are_interpolated_at_the_size_that_runs():
    verify = verify_curve([(4, 1.0), (16, 4.0)], 16, captured=[4, 8, 16])
    assert set(verify[5:9]) == {2.0}


def test_a_sample_between_captured_sizes_counts_for_the_next():
    verify = verify_curve([(3, 1.0), (5, 2.0)], 8, captured=[4, 8])
    assert verify.tolist() == [1.0] * 5 + [2.0] * 4


def test_of_two_samples_of_one_graph_the_slower_counts():
    assert set(verify_curve([(5, 1.0), (8, 3.0)], 8, captured=[8])) == {3.0}


def test_without_eager_samples_the_last_slope_goes_on():
    assert verify_curve([(4, 1.0), (8, 2.0)], 12, captured=[4, 8])[12] == pytest.approx(3.0)


@pytest.mark.parametrize("bounds", [(0, 4), (4, 0), (-1, 4)])
def test_dense_refuses_empty_ranges(bounds):
    with pytest.raises(ValueError, match="at least 1"):
        CostTable(DRAFT, [(1, 1.0)]).dense(*bounds)


# Bad input.


@pytest.mark.parametrize(
    ("verify", "message"),
    [
        ([], "verify is empty"),
        ([(1, 0.0)], r"0\.0 ms at 1 tokens: give a positive"),
        ([(1, -2.0)], r"-2\.0 ms"),
        ([(1, math.nan)], "nan ms"),
        ([(1, math.inf)], "inf ms"),
        ([(2, 1.0), (1, 2.0)], "1 after 2: give ascending"),
        ([(2, 1.0), (2, 2.0)], "2 after 2"),
        ([(0, 1.0)], "0 after 0"),
        ([(1.5, 1.0)], "whole numbers"),
        ([1.0, 2.0], r"list of \(tokens, ms\) pairs"),
        ([(1, "fast")], r"list of \(tokens, ms\) pairs"),
        (None, r"list of \(tokens, ms\) pairs"),
    ],
)
def test_bad_samples_are_refused_with_value_and_remedy(verify, message):
    with pytest.raises(ValueError, match=message):
        CostTable(DRAFT, verify)
    with pytest.raises(ValueError, match=message.replace("verify", "draft").replace("tokens", "requests")):
        CostTable(verify, [(1, 1.0)])


@pytest.mark.parametrize(
    ("captured", "message"),
    [([0, 4], "0 after 0"), ([4, 4], "4 after 4"), ([8, 4], "4 after 8"), ([2], "no sample up to 2")],
)
def test_bad_captured_sizes_are_refused(captured, message):
    with pytest.raises(ValueError, match=message):
        CostTable(DRAFT, [(4, 1.0)], captured)


def test_numpy_numbers_are_taken_and_written():
    table = CostTable([(np.int32(1), np.float32(0.5))], [(np.int64(4), np.float64(2.0))], list(np.array([4])))
    assert CostTable.from_json(table.to_json()) == table


# Files.


@given(tables())
def test_json_round_trip(table):
    assert CostTable.from_json(table.to_json()) == table


def test_save_and_load(tmp_path):
    table = CostTable(DRAFT, [(4, 1.0), (16, 2.5)], captured=[4, 8])
    path = tmp_path / "cost.json"
    table.save(path)
    table.save(path)
    assert CostTable.load(path) == table
    assert [p.name for p in tmp_path.iterdir()] == ["cost.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"draft": [[1, 1.0]], "verify": [[1, 1',
        b"[1, 2]",
        b'{"draft": [[1, 1.0]]}',
        b'{"draft": [[1, 1.0]], "verify": [[1, -1.0]]}',
        b'{"draft": [[1, 1.0]], "verify": [[1, 1.0]], "theta": 3}',
        b'{"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0], "max_batch_tokens": 4}',
        b"\xff\xfe",
    ],
)
def test_load_refuses_foreign_and_damaged_files(tmp_path, content):
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cost\.json: not a cost table: .*from_sps"):
        CostTable.load(path)


def test_load_of_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        CostTable.load(tmp_path / "none.json")


# SGLang's tables.

STEPS = {"sample_batch_tokens": [1, 64, 256], "sample_steps_per_sec": [100.0, 80.0, 40.0], "max_batch_tokens": 512}
ADDITIVE = {
    "bias_seconds": 0.01,
    "bs_probes": [1, 32],
    "alpha_seconds": [-0.001, 0.003],
    "m_probes": [8, 64, 256],
    "theta_seconds": [-0.002, 0.0, 0.02],
}


@pytest.mark.parametrize("form", ["mapping", "path", "object"])
def test_sglang_steps_per_second_keep_the_step_time(form, tmp_path):
    dense = CostTable.from_sps(as_source(STEPS, form, tmp_path)).dense(64, 256)
    for tokens, rate in ((1, 100.0), (64, 80.0), (256, 40.0)):
        for requests in (1, 64):
            assert dense.draft[requests] + dense.verify[tokens] == pytest.approx(1000 / rate)


@pytest.mark.parametrize("form", ["mapping", "path", "object"])
def test_sglang_additive_table_keeps_the_step_time(form, tmp_path):
    dense = CostTable.from_sps(as_source(ADDITIVE, form, tmp_path)).dense(32, 256)
    for requests, alpha in ((1, -1.0), (32, 3.0)):
        for tokens, theta in ((8, -2.0), (64, 0.0), (256, 20.0)):
            assert dense.draft[requests] + dense.verify[tokens] == pytest.approx(10.0 + alpha + theta)


def as_source(table, form, tmp_path):
    if form == "path":
        path = tmp_path / "sps.json"
        path.write_bytes(msgspec.json.encode(table))
        return path
    if form == "object":
        return msgspec.defstruct("Table", list(table), frozen=True)(**table)
    return table


def test_sglang_table_takes_captured_sizes():
    dense = CostTable.from_sps(STEPS, captured=[64, 128]).dense(1, 64)
    assert set(dense.verify) == {dense.verify[64]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_steps_per_sec": [100.0, 0.0, 40.0]}, r"has 0\.0; every rate"),
        ({"sample_steps_per_sec": [100.0]}, "3 entries, sample_steps_per_sec 1"),
        ({"sample_batch_tokens": [], "sample_steps_per_sec": []}, "0 entries"),
        ({"sample_batch_tokens": [64, 1, 256]}, "1 after 64"),
        ({"sample_batch_tokens": "all"}, "Expected `array`"),
    ],
)
def test_bad_steps_per_second_are_refused(change, message):
    with pytest.raises(ValueError, match=f"{message}.*dspark_sps_profiler"):
        CostTable.from_sps(STEPS | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias_seconds": 0.002}, r"shortest step takes -0\.001"),
        ({"bias_seconds": math.nan}, "nan"),
        ({"alpha_seconds": [0.1]}, "bs_probes has 2 entries"),
    ],
)
def test_bad_additive_tables_are_refused(change, message):
    with pytest.raises(ValueError, match=f"{message}.*dspark_sps_profiler"):
        CostTable.from_sps(ADDITIVE | change)


def test_sps_of_another_kind_is_refused(tmp_path):
    for source in ({}, 3, None):
        with pytest.raises(ValueError, match=r"SPS table: .*sample_batch_tokens"):
            CostTable.from_sps(source)
    path = tmp_path / "sps.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"sps\.json: not valid JSON"):
        CostTable.from_sps(str(path))


# Measuring.


@pytest.fixture
def clock(monkeypatch):
    """A clock that the measured functions move by hand."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(av_triton.cost, "time", clock)
    return clock


def test_measure_takes_the_median_of_the_passes_after_the_warm_up(clock):
    calls = {}

    def step(name, base):
        def run(size):
            calls.setdefault((name, size), 0)
            calls[name, size] += 1
            # The warm-up pass compiles, one later pass stalls.
            clock.now += {1: 50.0, 3: 9.0}.get(calls[name, size], base * size) / 1e3

        return run

    table = CostTable.measure(
        step("verify", 0.5),
        [2, 4],
        max_tokens=8,
        draft=step("draft", 0.25),
        draft_sizes=[1],
        max_requests=2,
        captured=[4],
        draft_captured=[1],
        warmup=1,
        repeats=3,
    )
    assert set(calls.values()) == {4}
    assert [(n, pytest.approx(ms)) for n, ms in table.verify] == [(2, 1.0), (4, 2.0), (8, 4.0)]
    assert [(n, pytest.approx(ms)) for n, ms in table.draft] == [(1, 0.25), (2, 0.5)]
    assert table.captured == [4]
    assert table.draft_captured == [1]


def test_measure_waits_for_the_device_before_and_after_each_call():
    order = []
    CostTable.measure(
        lambda n: order.append("verify"),
        [],
        max_tokens=1,
        draft=lambda n: order.append("draft"),
        draft_sizes=[],
        max_requests=1,
        warmup=0,
        repeats=1,
        synchronize=lambda: order.append("wait"),
    )
    assert order == ["wait", "draft", "wait", "wait", "verify", "wait"]


def test_measure_shows_a_progress_bar_where_rich_is_installed(monkeypatch, capsys):
    def measure(progress=True):
        CostTable.measure(
            lambda n: None, max_tokens=4, draft=lambda n: None, max_requests=2, repeats=2, progress=progress
        )
        output = capsys.readouterr()
        assert output.out == ""
        return output.err

    assert "100%" in measure()
    assert measure(progress=False) == ""
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert measure() == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_requests": -3}, "max_requests = -3"),
        ({"repeats": 0}, "repeats = 0"),
    ],
)
def test_measure_refuses_bad_bounds(change, message):
    bounds = {"max_tokens": 4, "max_requests": 4} | change
    with pytest.raises(ValueError, match=message):
        CostTable.measure(lambda n: None, draft=lambda n: None, **bounds)


def test_measure_lets_errors_of_the_measured_function_through():
    def fail(n):
        raise MemoryError(n)

    with pytest.raises(MemoryError):
        CostTable.measure(fail, max_tokens=4, draft=lambda n: None, max_requests=1)


# Refining.


def refined(table, truth, sizes, steps=400):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        size = int(rng.choice(sizes))
        table = table.refine(size, truth(size) * rng.uniform(0.95, 1.05))
    return table


def test_refine_moves_the_curve_to_the_live_times_without_growing():
    table = CostTable(DRAFT, [(8, 1.0), (64, 1.0), (256, 1.0)])
    live = refined(table, lambda n: 2.0 + n / 64, range(1, 257))
    verify = live.dense(1, 256).verify
    assert len(live.verify) == 3
    assert verify[256] == pytest.approx(6.0, rel=0.06)
    assert verify[64] == pytest.approx(3.0, rel=0.06)
    assert table.verify == [(8, 1.0), (64, 1.0), (256, 1.0)]


def test_refine_lowers_a_sample_hidden_behind_a_smaller_one_that_was_too_slow():
    live = refined(CostTable(DRAFT, [(8, 50.0), (64, 3.0)]), lambda n: 3.0, [64])
    assert live.dense(1, 64).verify[64] == pytest.approx(3.0, rel=0.05)


def test_refine_keeps_to_its_side_of_the_captured_limit():
    table = CostTable(DRAFT, [(4, 1.0), (8, 2.0), (16, 9.0), (32, 12.0)], captured=[4, 8])
    eager, graph = table.refine(20, 30.0), table.refine(6, 30.0)
    assert eager.verify[:2] == table.verify[:2]
    assert eager.verify[2][1] > 9.0
    assert graph.verify[2:] == table.verify[2:]
    assert graph.verify[0] == table.verify[0]
    assert graph.verify[1][1] > 2.0
    # No eager sample to move.
    graphs_only = CostTable(DRAFT, [(4, 1.0)], captured=[4])
    assert graphs_only.refine(20, 3.0) == graphs_only


def test_refine_with_whole_steps_moves_both_curves():
    table = CostTable([(8, 1.0)], [(8, 1.0)])
    for _ in range(400):
        table = table.refine(8, 6.0, requests=8)
    assert table.draft[0][1] == table.verify[0][1] == pytest.approx(3.0)


def test_refine_cuts_a_stall():
    table = CostTable(DRAFT, [(8, 1.0)]).refine(8, 1e6, weight=0.05)
    assert table.verify[0][1] == pytest.approx(2**0.05)


@given(tables(), st.integers(1, 400), st.floats(1e-3, 1e6), st.none() | st.integers(1, 400))
def test_refine_keeps_sizes_and_validity_and_moves_towards_the_live_time(table, tokens, ms, requests):
    live = table.refine(tokens, ms, requests)
    assert [n for n, _ in live.verify] == [n for n, _ in table.verify]
    assert live.captured == table.captured
    if requests is None:
        before, after = (t.dense(1, tokens).verify[tokens] for t in (table, live))
        assert live.draft == table.draft
        low, high = sorted((before, ms))
        # A line between two samples that move by a ratio can overshoot a little; never to the other side of twice.
        assert low * (1 - 1e-9) <= after <= high * (1 + 1e-9) or abs(math.log(after / before)) <= math.log(2) * 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0), "tokens = 0"),
        ((4, 0.0), r"ms = 0\.0"),
        ((4, math.nan), "ms = nan"),
        ((4, 1.0, 0), "requests = 0"),
        ((4, 1.0, 1, 0.0), r"weight = 0\.0"),
    ],
)
def test_refine_refuses_bad_steps(arguments, message):
    with pytest.raises(ValueError, match=message):
        CostTable(DRAFT, [(1, 1.0)]).refine(*arguments)
