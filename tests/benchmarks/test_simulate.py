"""The simulated server: what it counts, against an example worked out by hand, and its bounds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from av_triton import CostTable, Settings
from benchmarks import results
from benchmarks.online.arms import Step
from benchmarks.resume import Store
from benchmarks.serving import simulate
from benchmarks.serving.server import DEPLOYMENTS, Deployment, Fixed, Server, misjudged, settings_for, traffic
from benchmarks.traces.quality import Trace, load

DATA = Path(__file__).parents[2] / "benchmarks/traces/data"


def step(alpha: list[list[float]]) -> Step:
    rows = len(alpha)
    values = np.array(alpha, np.float32)
    kind = np.zeros(rows, bool)
    return Step(np.zeros_like(values), values, np.full_like(values, 0.5), kind, kind, np.arange(rows))


@pytest.fixture
def two_steps():
    """Two requests, two positions; a step costs 4 ms of drafting, and 10 + n ms of verifying n tokens."""
    table = CostTable(draft=[(1, 2.0), (2, 4.0)], verify=[(1, 11.0), (100, 110.0)])
    values = np.zeros((1, 2, 2), np.float32)
    trace = Trace("hand", values, values, np.zeros((1, 2), np.int64), np.zeros((1, 2), np.int64), False, None)
    server = Server(trace, Deployment("hand", table), 2, Settings())
    return server, [step([[1.0, 0.5], [0.5, 0.5]]), step([[0.0, 1.0], [0.25, 1.0]])]


def test_tokens_and_milliseconds_by_hand(two_steps):
    server, steps = two_steps
    # Both drafts: 2 + 1 + .5 + .5 + .25 and 2 + 0 + 0 + .25 + .25 tokens, twice 4 + 16 ms.
    assert server.serve(Fixed(2), steps) == pytest.approx(1e3 * (4.25 + 2.5) / 40)
    assert server.serve(Fixed(1), steps) == pytest.approx(1e3 * (3.5 + 2.25) / 36)
    assert server.serve(Fixed(0), steps) == pytest.approx(1e3 * 4 / 24)  # nothing is drafted
    assert server.serve(Fixed(2), steps, first=1) == pytest.approx(1e3 * 2.5 / 20)


def test_a_drafter_that_pays_per_position(two_steps):
    server, steps = two_steps
    server = Server(server.trace, server.deployment, 2, Settings(autoregressive=True))
    assert server.serve(Fixed(1), steps) == pytest.approx(1e3 * (3.5 + 2.25) / (2 * (2 + 14)))


def test_the_oracle_by_hand(two_steps):
    """Step 1: all four (4.25 / 20). Step 2: the two that may be accepted (2.5 / 18) pay less than no drafting (2 / 12),
    unless it costs nothing (2.5 / 14); three are then best in step 1 alone (4 / 15), but four over both steps."""
    server, steps = two_steps
    assert server.oracle(steps) == pytest.approx([1e3 * (4.25 + 2) / (20 + 12)] * 2)
    table = CostTable(draft=[(1, 1e-9)], verify=server.deployment.table.verify)
    server = Server(server.trace, Deployment("hand", table), 2, Settings())
    assert server.oracle(steps) == pytest.approx([1e3 * (4.25 + 2.5) / (16 + 14), 1e3 * (4 + 2.5) / (15 + 14)])


def test_step_by_step_is_not_always_best():
    """A draft costs 1 ms on top of 10. Accepted with .12 it raises its own step's ratio, 1.12 / 11 > 1 / 10, but not
    that of both: 3.12 / 22 < 3 / 21."""
    table = CostTable(draft=[(1, 1e-9)], verify=[(1, 10.0), (2, 11.0), (3, 100.0)])
    values = np.zeros((1, 1, 2), np.float32)
    trace = Trace("hand", values, values, np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64), False, None)
    server = Server(trace, Deployment("hand", table), 1, Settings())
    most, stepwise = server.oracle([step([[1.0, 0.0]]), step([[0.12, 0.0]])])
    assert stepwise == pytest.approx(1e3 * 3.12 / 22)
    assert most == pytest.approx(1e3 * 3 / 21)


@pytest.mark.parametrize("name", ["A_gsm8k_T1", "B_humaneval_T1"])
@pytest.mark.parametrize("requests", [1, 24])
def test_no_arm_serves_more_than_the_oracle(name, requests):
    trace = load(DATA / f"{name}.npz")
    server = Server(trace, DEPLOYMENTS[0], requests, settings_for(trace))
    steps = list(traffic(trace, requests, 40, 0))
    arms = [server.ours(), server.ours(np.array([0.6, *[-0.2] * 7])), server.peer(), *map(Fixed, range(8))]
    most, stepwise = server.oracle(steps[10:])
    assert most >= stepwise
    assert all(server.serve(arm, steps, 10) <= most * (1 + 1e-9) for arm in arms)


def test_not_drafting_serves_no_more_than_the_oracle():
    """A block drafter at many requests: most drafts are not worth their time."""
    trace = load(DATA / "B_humaneval_T1.npz")
    server = Server(trace, DEPLOYMENTS[0], 256, settings_for(trace))
    steps = list(traffic(trace, 256, 4, 0))
    plain = server.serve(Fixed(0), steps)
    assert plain > server.serve(Fixed(1), steps)
    assert server.oracle(steps)[0] >= plain


def test_the_drafter_is_known_by_the_name_of_the_trace():
    for name, autoregressive in {
        "A_x_T1": True,
        "layer-skip_x_T0.7": True,
        "B_x_T1": False,
        "block_x_T0": False,
    }.items():
        values = np.zeros((1, 1, 1), np.float32)
        trace = Trace(name, values, values, np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64), False, None)
        assert settings_for(trace).autoregressive is autoregressive
    with pytest.raises(ValueError, match="whether drafter 'Another' pays per position is not known"):
        settings_for(replace(trace, name="Another_x_T1"))


def test_the_stream_is_its_seed():
    trace = load(DATA / "B_humaneval_T1.npz")
    runs = [list(traffic(trace, 8, 5, seed)) for seed in (0, 0, 1)]
    assert all(np.array_equal(a.uniform, b.uniform) for a, b in zip(runs[0], runs[1], strict=True))
    assert not np.array_equal(runs[0][0].uniform, runs[2][0].uniform)


def test_misjudged_costs_pivot_at_the_smallest_size():
    table = CostTable(draft=[(1, 1.0)], verify=[(8, 10.0), (16, 14.0)])
    assert misjudged(table, 0.5).verify == [(8, 10.0), (16, 12.0)]


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    store = Store(tmp_path, [])
    assert store.get("a", lambda: [1.5]) == [1.5]
    with store.path.open("a") as file:
        file.write('["b", [2')  # stopped while it was writing
    again = Store(tmp_path, [])
    assert again.get("a", pytest.fail) == [1.5]
    assert again.get("b", lambda: [2]) == [2]
    third = Store(tmp_path, [])
    assert [third.get(key, pytest.fail) for key in "ab"] == [[1.5], [2]]
    monkeypatch.setattr(results, "versions", lambda: "numpy 9")
    assert Store(tmp_path, []).path != store.path
    changed = tmp_path / "input"
    changed.write_text("")
    assert Store(tmp_path, [changed]).path != store.path


def test_the_page(two_steps):
    """Ours 2 % below the best fixed length and the peer at one point, by more than the interval; not surely within 2 %
    of the offline fit at the other."""
    server, _ = two_steps
    arms = ("fixed 1", "fixed 2", "plain", "offline fit", "peer", "oracle", "oracle step by step")
    behind = dict.fromkeys(arms, np.full(3, 90.0)) | {"fixed 2": np.full(3, 100.0), "peer": np.full(3, 100.0)}
    behind |= {"ours": np.array([97.9, 98.0, 98.1]), "plain": np.full(3, 98.1)}
    ahead = dict.fromkeys(arms, np.full(3, 100.0)) | {"ours": np.array([101.0, 104.0, 107.0])}
    ahead |= {"offline fit": np.array([104.0, 104.0, 104.0])}
    found = [(server, behind), (replace(server, requests=3), ahead)]
    assert simulate.compared(*found[0])[:6] == ["2", "98", "2", "-2.0 ± 0.2 %", "-2.0 ± 0.2 %", "-0.1 ± 0.3 %"]
    says = simulate.outcome(found, 3)
    assert "below -2 % at 1 of them (hand, hand, 3 requests)" in says
    assert "-2.0 to +4.0 %, below it by more than the interval at 1 of them (hand, hand, 2 requests)" in says
    page = simulate.body(found, 3, [], [], ["hand"])
    assert "The peer, which does not explore, serves more at: hand, hand, 2 requests." in page.replace("\n", " ")
    assert "Plain decoding serves more" not in page  # within the interval
    assert simulate.csv(found).splitlines()[1] == "hand,hand,2,fixed 1,0,90.00"


def test_the_command(tmp_path):
    app = Typer()
    app.command()(simulate.main)
    same = [tmp_path / name / "A_gsm8k_T1.npz" for name in "xy"]
    for path in same:
        path.parent.mkdir()
        path.symlink_to(DATA / path.name)
    unknown = tmp_path / "Another_gsm8k_T1.npz"
    unknown.write_bytes(b"")
    for paths, says in (
        ([tmp_path / "none.npz"], "no such trace"),
        ([unknown], "is not a readable .npz file"),
        (same, "traces of equal names, A_gsm8k_T1, A_gsm8k_T1"),
    ):
        shown = CliRunner().invoke(app, [*map(str, paths), "--output", str(tmp_path / "out")])
        assert shown.exit_code == 2, says
        assert says in shown.output.replace("\n", " ")
