"""The serving benchmark without SGLang: a run that goes on, a point's figures, the comparison of arms."""

from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path

import msgspec
import pytest

from av_triton import CostTable
from av_triton.snapshot import Snapshot
from benchmarks.serving import bench, models
from benchmarks.serving.bench import Bench, Plan, Results, Turn
from benchmarks.serving.engine import measured
from benchmarks.serving.points import (
    Arm,
    Difference,
    Figures,
    Point,
    Ratio,
    Step,
    append,
    differences,
    load,
    pareto_front,
    profiled_costs,
    ratio,
)

ONE, TWO, ADAPTIVE = Arm("DFLASH", "fixed", 1), Arm("DFLASH", "fixed", 2), Arm("DFLASH", "adaptive", 2)
PLAIN, OTHER = Arm("DFLASH", "plain", 0), Arm("STANDALONE", "fixed", 1)
PLAN = Plan(groups=((PLAIN, ONE, TWO, ADAPTIVE), (OTHER,)), requests={1: 2, 4: 4}, length=3, warm_up=1, passes=2)
DFLASH = PLAN.groups[0]


def point(arm, repetition=0, concurrency=4, ms=100.0, emitted=8, outputs=None):
    """The target: 6 CPU ms, .5 per request and 1 per token; drafting 5."""
    tokens = concurrency * (1 + arm.length)
    target = 6.0 + 0.5 * concurrency + tokens
    steps = [Step(concurrency, tokens, emitted, ms, target + 5.0, ms / 4, target)] * 2
    outputs = outputs or [[1, 2, 3]] * PLAN.requests[concurrency]
    return Point(
        arm=arm, repetition=repetition, concurrency=concurrency, requests=PLAN.requests[concurrency], length=3,
        seconds=1.0, steps=steps, outputs=outputs,
    )  # fmt: skip


class FakeServer:
    """Measures at once; stops as if it were killed in the point after `budget` others."""

    def __init__(self, budget):
        self.budget, self.measured = budget, []

    def call(self, function, *, arms, turns, points, **job):
        for turn in turns:
            path, arm = Path(points), arms[turn.arm][0]
            if not self.budget:
                with path.open("ab") as file:
                    file.write(b'{"arm": ["DFL')
                raise ConnectionError("killed")
            self.budget -= 1
            append(path, point(arm, turn.repetition, turn.concurrency))
            self.measured.append((arm, turn.repetition, turn.concurrency))


def run(folder, budget, drafters=(), plan=PLAN):
    with ExitStack() as resources:
        running = Bench(plan, folder, resources)
        running.server, running.prompts, running.engine = FakeServer(budget), [], lambda arm: {}
        try:
            running.measure(drafters)
        except ConnectionError:
            assert not running.server.budget
        return running


def test_a_killed_run_goes_on(tmp_path):
    every = [
        (arm, n, each)
        for group in PLAN.groups
        for n in range(2)
        for each in (4, 1)
        for arm in (group if n == 0 else group[::-1])
    ]
    first, second = run(tmp_path, 5), run(tmp_path, 100)
    assert first.server.measured + second.server.measured == every
    assert run(tmp_path, 100).server.measured == []
    assert set(load(first.store)) == PLAN.keys()
    assert set(second.results().points) == {(arm, each) for arm in PLAN.arms for each in PLAN.requests}


def test_further_passes_add_to_the_others(tmp_path, monkeypatch):
    assert run(tmp_path, 100).results().plan.passes == 2
    more = run(tmp_path, 100, plan=PLAN._replace(passes=3))
    assert {repetition for _, repetition, _ in more.server.measured} == {2}
    later = run(tmp_path, 100)
    assert not later.server.measured
    assert later.results().plan.passes == 3
    assert len(later.results().points[ADAPTIVE, 4]) == 3
    monkeypatch.setattr(bench, "FORMS", dict.fromkeys(bench.FORMS, PLAN))
    assert [bench.command_of(bench.SHORT, passes) for passes in (2, 3)] == [
        "make bench-serving ARGS=--quick", "make bench-serving ARGS='--quick --passes 3'"
    ]  # fmt: skip
    assert bench.command_of(bench.WHOLE, 2) == "make bench-serving"


def test_one_drafter_can_be_measured_alone(tmp_path):
    running = run(tmp_path, 100, ["STANDALONE"])
    assert {arm for arm, _, _ in running.server.measured} == {OTHER}
    assert running.results() is None  # nothing to compare with


def test_points_of_another_workload_are_measured_again():
    assert PLAN._replace(length=4).turns(DFLASH, PLAN.keys()) == PLAN.turns(DFLASH, [])
    assert PLAN.turns(DFLASH, PLAN.keys() - {PLAN.key(TWO, 1, 4)}) == [Turn(2, 1, 4, 4)]


def test_a_profiled_arm_waits_for_the_first_pass_of_the_others():
    profiled = ADAPTIVE._replace(kind="profiled")
    turns = PLAN.turns((profiled, TWO), [])
    assert [(turn.arm, turn.repetition, turn.concurrency) for turn in turns] == [
        (1, 0, 4), (1, 0, 1), (0, 0, 4), (0, 0, 1), (1, 1, 4), (0, 1, 4), (1, 1, 1), (0, 1, 1)
    ]  # fmt: skip


def test_other_sources_have_other_points(monkeypatch):
    before = bench.digest()
    monkeypatch.setattr(bench, "SOURCES", bench.SOURCES[:-1])
    assert bench.digest() != before


def test_other_layers_have_other_checkpoints(tmp_path, monkeypatch):
    before = models.current(tmp_path)
    assert before == models.current(tmp_path)
    monkeypatch.setattr(models, "LAYER_SKIP", models.LAYER_SKIP[:-1])
    assert models.current(tmp_path) != before


def test_the_figures_of_a_point():
    steps = [
        Step(requests=2, verified=8, emitted=3, ms=30.0, cpu_ms=20.0, target_ms=15.0, target_cpu_ms=1.0),
        Step(2, 4, 5, 50.0, cpu_ms=20.0, target_ms=25.0, target_cpu_ms=1.0, own_cpu_ms=0.5),
        Step(
            requests=1, verified=4, emitted=4, ms=500.0, cpu_ms=500.0, target_ms=500.0, target_cpu_ms=1.0
        ),  # the last request, alone
        Step(2, 8, 2, 20.0, cpu_ms=10.0, target_ms=10.0, target_cpu_ms=1.0, own_cpu_ms=0.7),
    ]
    recorded = Point(
        arm=TWO, repetition=0, concurrency=2, requests=3, length=9, seconds=1.0, steps=steps, outputs=[]
    )  # fmt: skip
    figures = Figures.of([recorded])
    # 10 tokens in 100 ms of three steps of two requests, with 20 tokens verified.
    assert astuple(figures) == pytest.approx((100.0, 50.0, 200.0, 10 / 6, 2.0, 30.0, 15.0, 1.0, 0.5, 0.5, 3))
    with pytest.raises(ValueError, match="no decode step with 4 requests; serve at least 4"):
        Figures.of(
            [Point(**{name: getattr(recorded, name) for name in recorded.__struct_fields__} | {"concurrency": 4})]
        )


def test_arms_are_compared_pass_by_pass():
    mine = [point(ADAPTIVE, 0, ms=50.0), point(ADAPTIVE, 1, ms=400.0), point(ADAPTIVE, 2, ms=1.0)]
    theirs = [point(TWO, 1, ms=800.0), point(TWO, 0, ms=25.0)]
    assert ratio(mine, theirs) == pytest.approx((1.0, 0.5, 2.0))
    assert ratio(mine, []) is None


def test_the_costs_of_a_profiled_arm():
    points = [point(arm, 0, each) for arm in (PLAIN, ONE, TWO, ADAPTIVE) for each in (1, 4)]
    alone = Step(1, 3, 3, 900.0, 900.0, 900.0, 900.0)  # the last request of a batch of 4
    points[1] = msgspec.structs.replace(points[1], steps=[*points[1].steps, alone])
    slow = [Step(4, 12, 4, 900.0, 900.0, 900.0, 900.0)] * 9
    points += [msgspec.structs.replace(each, steps=slow) for each in (point(TWO, 1), point(OTHER))]  # do not count
    costs = profiled_costs(points, ADAPTIVE)
    # By tokens: plain decoding and both lengths, at 1 and at 4 requests. Drafting takes 5.
    assert costs.verify == [(1, 7.5), (2, 8.5), (3, 9.5), (4, 12.0), (8, 16.0), (12, 20.0)]
    assert costs.draft == [(1, 5.0), (4, 5.0)]
    with pytest.raises(ValueError, match="no step of DFLASH fixed 2 to take costs from; measure that arm first"):
        profiled_costs(points[:4], ADAPTIVE)


def test_many_passes_give_the_interval_of_the_mean():
    assert Ratio.of([0.5, 2.0, 1.0]) == pytest.approx((1.0, 0.5, 2.0))
    # log 2 apart from 0: deviation log 2 * sqrt(4 / 3), over sqrt(4), times t(.975, 3) = 3.182
    half = 2 ** (3.182446 / 3**0.5)
    assert Ratio.of([0.5, 2.0, 0.5, 2.0]) == pytest.approx((1.0, 1 / half, half))


def test_the_pareto_front():
    points = [(1.0, 9.0), (2.0, 8.0), (2.0, 7.0), (3.0, 8.0), (0.5, 9.0), (3.0, 8.0)]
    assert pareto_front(points) == [True, False, False, True, False, True]


def test_the_first_difference_of_each_output():
    other = point(TWO, outputs=[[1, 2, 3], [1, 5, 6], [1, 2, 3], [9, 2, 4]])
    assert differences(other, [[1, 2, 3]] * 4) == [Difference(1, 1, 5, 2), Difference(3, 0, 9, 1)]


def results(points, gap=1.0):
    tables = {ADAPTIVE: CostTable(draft=[(1, 1.0)], verify=[(1, 10.0), (4, 10.0), (12, 26.0)])}
    return Results(PLAN, points, lambda found: [gap] * len(found), tables, {})


def both(arm, ms, **options):
    return [point(arm, n, each, ms, **options) for n in range(2) for each in PLAN.requests]


def test_the_tables():
    found = results([*both(PLAIN, 200.0), *both(ONE, 100.0), *both(TWO, 125.0), *both(ADAPTIVE, 80.0)])
    columns, rows = bench.adaptive_rows(found)
    assert [len(row) for row in rows] == [len(columns)] * 2
    # The target at 1 request: 9.5 ms over 7.5; at 4: 20 over 12. The best fixed length is 1.
    assert [row[2] for row in rows] == ["1.27", "1.67"]
    # By the table 8 drafts at 4 requests cost 16 ms.
    assert [row[3] for row in rows] == ["0.00", "2.00"]
    # By the clock 125 over 80 ms; in CPU time 14.5, 13.5 and 12.5 ms with 2, 1 and no drafts.
    assert rows[0][4:] == ["1.56 [1.56, 1.56]", "1.00 [1.00, 1.00]", "0.93 [0.93, 0.93] (1)", "0.86 [0.86, 0.86]"]
    columns, rows = bench.arm_rows(found, "DFLASH")
    assert [row[:3] for row in rows[4:]] == [
        ["4", "plain", "40.0"], ["4", "fixed 1", "80.0"], ["4", "fixed 2", "64.0"], ["4", "adaptive 2", "100.0"]
    ]  # fmt: skip
    assert len(bench.page("Quick form", found).splitlines()) > 30


def test_what_is_claimed():
    """By CPU time: as drafting and the target take 14.5 and 25 ms with 2 drafts, 13.5 and 21 with 1."""
    points = [*both(PLAIN, 200.0), *both(ONE, 100.0), *both(TWO, 120.0), *both(ADAPTIVE, 125.0)]
    assert bench.verdicts(results(points)) == {
        "held": ["DFLASH adaptive 2, 1 at a time: 1.00 [1.00, 1.00] of DFLASH fixed 2, 0.98 is wanted"],
        "missed": [
            "DFLASH adaptive 2, 4 at a time: 0.84 [0.84, 0.84] of DFLASH fixed 1, 1.00 is wanted; a step's target took "
            "31 ms for 12 tokens against 25 for 8, the rest of the step 94 (0 of scoring, planning and learning) "
            "against 75, and it gave 2.00 tokens per request against 2.00"
        ],
        "open": [],
    }
    points[-1] = point(ADAPTIVE, 1, 4, emitted=12)
    assert results(points).noise() == pytest.approx((1.0, 1.5))
    [line] = bench.verdicts(results(points))["open"]
    assert line.startswith("DFLASH adaptive 2, 4 at a time: 1.03 [0.84, 1.26] of DFLASH fixed 1, 1.00 is wanted; a ")


def test_one_pass_says_nothing():
    arms = (PLAIN, 200.0), (ONE, 100.0), (TWO, 120.0), (ADAPTIVE, 125.0)
    plan = PLAN._replace(groups=(DFLASH,), passes=1)
    found = Results(plan, [each for arm, ms in arms for each in both(arm, ms)[:2]], lambda found: [], {}, {})
    assert {state: len(lines) for state, lines in bench.verdicts(found).items()} == {"missed": 0, "open": 2, "held": 0}
    assert found.noise() is None
    assert "; 1 pass.\n" in bench.page("Quick form", found)


@pytest.mark.parametrize("gate, served", [(5, "sampled"), (0, "closed")])
def test_a_head_is_compared_with_none(gate, served):
    headed, headless = (ADAPTIVE._replace(kind=each) for each in ("headed", "headless"))
    plan = PLAN._replace(groups=((PLAIN, headed, headless),))
    saved = Snapshot(
        num_draft_positions=2, strata=["sampled", "greedy"], slopes=[0.5, 0.9], intercepts=[[0.0, 0.0]] * 2,
        refits=3, gates=[[7, 7], [gate, -4]],
    )  # fmt: skip
    points = [*both(PLAIN, 200.0), *both(headed, 80.0, emitted=9), *both(headless, 100.0)]
    found = Results(plan, points, lambda found: [1.0] * len(found), {}, {headed: saved})
    columns, rows = bench.head_rows(found)
    assert [len(row) for row in rows] == [len(columns)] * 2
    same = ["DFLASH headed 2", "4", served, "1.333", "1.500", "2.250", "2.000"]
    assert rows[1] == [*same, "1.41 [1.41, 1.41]", "1.12 [1.12, 1.12]"]
    assert "over headless" in bench.page(bench.HEAD_FORM, found)
    assert not bench.head_rows(results([*both(PLAIN, 200.0), *both(ADAPTIVE, 80.0)]))[1]
    half = bench.page(bench.HEAD_FORM, Results(plan, both(PLAIN, 200.0), lambda found: [], {}, {}))
    assert "8 of 12 points not measured" in half
    assert "nan" not in half
    assert "Wanted" not in half


def test_no_speed_up_of_an_arm_with_other_output():
    points = [*both(PLAIN, 200.0), *both(TWO, 100.0), *both(ADAPTIVE, 50.0)]
    points[-1] = point(ADAPTIVE, 1, 4, 50.0, outputs=[[1, 2, 3]] * 3 + [[1, 2, 4]])
    wrong, tie = results(points), results(points, gap=1e-4)
    assert str(wrong.equality[ADAPTIVE]) == "1 of 12 DIFFER, 0 of them in near ties"
    assert str(tie.equality[ADAPTIVE]) == "1 of 12 differ, in near ties"
    assert [row[4] for row in bench.adaptive_rows(wrong)[1]] == ["", ""]
    assert [row[-1] for row in bench.arm_rows(wrong, "DFLASH")[1] if row[1] == "adaptive 2"] == ["", ""]
    assert not any(bench.verdicts(wrong).values())
    assert "DFLASH adaptive 2: output differs, no speed-up is claimed" in bench.claims(wrong)
    assert bench.adaptive_rows(tie)[1][1][4] == "2.00 [2.00, 2.00]"


def test_what_has_no_point_is_left_out():
    found = results([*both(PLAIN, 200.0), point(ADAPTIVE, 0, 4)])
    assert [row[1] for row in bench.adaptive_rows(found)[1]] == ["4"]
    assert bench.adaptive_rows(found)[1][0][4:7] == ["", "", ""]
    assert "DFLASH adaptive 2" in bench.page("Full form", found)
    assert "15 of 20 points not measured" in bench.page("Full form", found)
    assert "Nowhere compute-bound" not in bench.claims(found)  # what all drafts cost is unknown
    assert "Nowhere compute-bound" in bench.claims(
        results([*both(PLAIN, 200.0)[:1], point(TWO, 0, 1), point(ADAPTIVE, 0, 1)])
    )


def test_the_files(tmp_path):
    found = results([*both(PLAIN, 200.0), *both(TWO, 120.0), *both(ADAPTIVE, 125.0)])
    bench.write_csv(tmp_path / "points.csv", found)
    assert len((tmp_path / "points.csv").read_text().splitlines()) == 1 + 12
    bench.picture(tmp_path / "picture.png", found)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


class FakeEngine:
    """Its first runs begin before the last of 4 requests has come."""

    def __init__(self, late):
        self.late, self.runs = late, 0

    def send(self, job):
        self.runs += 1

    def recv(self):
        requests = 3 if self.runs <= self.late else 4
        return 1.0, [Step(requests, 8, 4, 9.0, 9.0, 5.0, 5.0)], [[1]] * 4


def test_a_run_without_a_step_of_all_requests_is_repeated():
    engine = FakeEngine(late=2)
    assert measured(engine, [[1]] * 4, length=3, concurrency=4)[1][0].requests == 4
    assert engine.runs == 3
    with pytest.raises(RuntimeError, match="in 5 runs of 4 requests of 3 tokens, no decode step had 4 of them"):
        measured(FakeEngine(late=9), [[1]] * 4, length=3, concurrency=4)
