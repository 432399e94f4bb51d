"""Serves real prompts by SGLang's engine on the CPU: no speculation, every fixed length and adaptive verification.

python -m benchmarks.serving.bench [--quick]
"""

import csv
import hashlib
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import matplotlib
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from av_triton import CostTable, Settings
from av_triton.ops.head import HEAD
from av_triton.snapshot import Snapshot
from benchmarks import results
from benchmarks.serving import launch, models
from benchmarks.serving.engine import Turn
from benchmarks.serving.points import (
    ADAPTIVE,
    FIXED,
    HEADED,
    HEADLESS,
    PLAIN,
    PROFILED,
    Arm,
    Difference,
    Figures,
    Point,
    Ratio,
    differences,
    load,
    pareto_front,
    ratio,
)
from tests.integrations.sglang.cpu_engine.client import ForkServer
from tests.integrations.sglang.runs import LOGIT_TOLERANCE

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
# What the measured times depend on; the tables do not.
SOURCES = (
    "av_triton", "integrations", "tests/integrations/sglang/cpu_engine", "benchmarks/serving/engine.py",
    "benchmarks/serving/launch.py", "benchmarks/serving/models.py", "benchmarks/serving/points.py",
)  # fmt: skip
BYPASSED, BYPASS_LOSS = (1, 2), 0.02
# Verification is compute-bound where all drafts cost the target at least so many times what none cost.
COMPUTE_BOUND = 1.5
ABOUT = """\
Throughput is over the decode steps with as many requests as the concurrency says (prefill and the end are left out), by
the wall clock and, because the machine is shared, by CPU time of the scheduler process as well. One engine works at a
time, on one thread, without overlap scheduling. Drafters: DFLASH is the demo's block drafter, DSPARK the same without a
confidence head and with an empty Markov head, STANDALONE the target with 20 of its 30 layers. Fixed lengths are set by
SGLang's own options, `--speculative-num-draft-tokens` and, for DSPARK, `--speculative-dspark-block-size`.
SGLang 0.5.23 has `--speculative-adaptive` for EAGLE and EAGLE3 only; with these drafters it warns and stays static. It
is no arm here, for there is no trained EAGLE drafter for this target.

DFLASH and DSPARK draft a whole block, whatever is verified of it: a short fixed length drafts less.
STANDALONE drafts to the planned depth.

"adaptive" plans by the step costs that the server measures when it starts, "profiled" by the medians of the steps of
plain decoding and of the fixed arms in the first pass. Every engine had served the same prompts once before what is
measured, so prompts are cached and coefficients learned. With DFLASH and DSPARK both learn a head too, as is the
plug-in's default at this width (576) and vocabulary (49,152), and pay for it; it is not served before 4,096 labels,
more than six passes of the quick form have. The arms of a table took turns at every concurrency, in every other pass
backwards.

Ratios are of tokens per CPU second, geometric means over the passes, with the 95 % interval of the mean (Student's t);
of fewer than 4 passes the lowest and the highest are given instead. "over fixed": over the same fixed length, "by the
clock" the same in tokens/s; the best fixed length is in brackets. "all / none": the target's forward with all drafts,
in the fixed arm, over that with none, in plain decoding. "ms per draft": what the arm plans with for a verified draft,
from none to all. "own ms": CPU time of scoring, planning and learning in a step (median); for DFLASH the drafts' argmax
is in it, which SGLang takes elsewhere.
"""
console = Console(width=None if sys.stdout.isatty() else 140)


class Plan(NamedTuple):
    """groups: arms that take turns. requests: by concurrency. length, warm_up: new tokens of each request."""

    groups: tuple[tuple[Arm, ...], ...]
    requests: dict[int, int]
    length: int
    warm_up: int
    passes: int

    @property
    def arms(self) -> list[Arm]:
        return [arm for group in self.groups for arm in group]

    def turns(self, group: Sequence[Arm], done: Iterable[tuple[object, ...]]) -> list[Turn]:
        """What is still to be measured: pass by pass, at each concurrency arm after arm.

        Every other pass goes backwards, so that no arm is always the later one. In the first one the profiled arms come
        after all others, for their step costs are from there.
        """
        finished = set(done)
        turns = [
            Turn(group.index(arm), repetition, concurrency, self.requests[concurrency])
            for repetition in range(self.passes)
            for concurrency in sorted(self.requests, reverse=True)
            for arm in (group if repetition % 2 == 0 else group[::-1])
            if self.key(arm, repetition, concurrency) not in finished
        ]
        return sorted(
            turns, key=lambda turn: (turn.repetition, turn.repetition == 0 and group[turn.arm].kind == PROFILED)
        )

    def key(self, arm: Arm, repetition: int, concurrency: int) -> tuple[object, ...]:
        return arm, repetition, concurrency, self.requests.get(concurrency), self.length

    def keys(self) -> set[tuple[object, ...]]:
        return {self.key(arm, n, each) for arm in self.arms for n in range(self.passes) for each in self.requests}


def group(drafter: str, fixed: Iterable[int], adaptive: int, *kinds: str) -> tuple[Arm, ...]:
    """Fixed arms, and adaptive ones of one length."""
    return (*(Arm(drafter, FIXED, length) for length in fixed), *(Arm(drafter, kind, adaptive) for kind in kinds))


def without(drafter: str) -> tuple[Arm, ...]:
    return (Arm(drafter, PLAIN, 0),)


# Each group's engines are in memory at once.
QUICK = Plan(
    groups=(
        without("DFLASH") + group("DFLASH", (1, 3), 3, ADAPTIVE, PROFILED),
        without("STANDALONE") + group("STANDALONE", (2,), 2, ADAPTIVE),
        without("DSPARK") + group("DSPARK", (3,), 3, ADAPTIVE),
    ),
    requests={1: 1, 2: 2, 16: 16},
    length=24,  # much shorter ones hardly ever have all 16 decode at once
    warm_up=16,
    passes=2,
)
FULL = Plan(
    groups=(
        without("DFLASH") + group("DFLASH", range(1, 8), 7, ADAPTIVE, PROFILED),
        without("STANDALONE") + group("STANDALONE", range(1, 5), 4, ADAPTIVE, PROFILED),
        without("DSPARK") + group("DSPARK", range(1, 8), 7, ADAPTIVE, PROFILED),
    ),
    requests={1: 2, 2: 4, 4: 4, 8: 8, 16: 16, 32: 32},
    length=32,
    warm_up=16,
    passes=2,
)
# With and without a head. The warm-up is as long as its gate needs to open.
HEADS = Plan(
    groups=(without("DFLASH") + group("DFLASH", (), 3, HEADED, HEADLESS),),
    requests={16: 48},
    length=32,
    warm_up=160,
    passes=4,
)
WHOLE, SHORT, HEAD_FORM = "Full form", "Quick form", "With and without a head"
FORMS = {WHOLE: FULL, SHORT: QUICK, HEAD_FORM: HEADS}
OPTIONS = {WHOLE: "", SHORT: "--quick", HEAD_FORM: "--head"}


def digest() -> str:
    """Of the sources and versions that a point depends on; points of others are not used."""
    parts = hashlib.sha256()
    for path in sorted(each for source in SOURCES for each in (ROOT / source, *(ROOT / source).rglob("*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            parts.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    parts.update(results.versions().encode())
    return parts.hexdigest()[:12]


class Bench:
    """Runs engines in a fork server, which is started when it is needed, and keeps what they measure below `folder`."""

    def __init__(self, plan: Plan, folder: Path, resources: ExitStack) -> None:
        self.plan, self.checkpoints, self._resources = plan, folder / "models", resources
        self.kept = folder / f"{digest()}-{plan.length}"
        self.store = self.kept / "points.jsonl"

    @cached_property
    def prompts(self) -> list[list[int]]:
        return models.prompts(self.checkpoints, max(self.plan.requests.values()))

    @cached_property
    def server(self) -> ForkServer:
        logs = Path(self._resources.enter_context(TemporaryDirectory()))
        with console.status("starting SGLang"):
            return self._resources.enter_context(ForkServer(logs))

    def points(self) -> list[Point]:
        """Of the plan, and of further passes that there may be."""
        arms = set(self.plan.arms)
        return [
            point
            for point in load(self.store).values()
            if point.arm in arms and point.key == self.plan.key(point.arm, point.repetition, point.concurrency)
        ]

    def engine(self, arm: Arm) -> dict[str, Any]:
        return launch.keywords(arm, self.checkpoints, self.kept, max(self.plan.requests))

    def measure(self, drafters: Sequence[str] = ()) -> None:
        """All that is missing, one engine at work at a time, under a progress bar. drafters: only with these."""
        self.kept.mkdir(parents=True, exist_ok=True)
        done = load(self.store)
        todo = [
            (arms, turns)
            for arms in self.plan.groups
            if (turns := self.plan.turns(arms, done)) and (not drafters or arms[0].drafter in drafters)
        ]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress, ThreadPoolExecutor(1) as pool:
            task = progress.add_task("", total=sum(len(turns) for _, turns in todo))
            for arms, turns in todo:
                before, completed = len(load(self.store)), progress.tasks[task].completed
                running = pool.submit(self._serve, arms, turns)
                while not running.done():
                    time.sleep(0.5)
                    measured = len(load(self.store)) - before
                    turn = turns[min(measured, len(turns) - 1)]
                    what = f"pass {turn.repetition + 1}, {turn.concurrency} at a time: {arms[turn.arm]}"
                    progress.update(task, completed=completed + measured, description=what)
                running.result()
                progress.update(task, completed=completed + len(turns))

    def _serve(self, arms: Sequence[Arm], turns: Sequence[Turn]) -> None:
        self.server.call(
            "benchmarks.serving.engine:serve",
            timeout=36000,
            arms=[(arm, self.engine(arm)) for arm in arms],
            turns=turns,
            prompts=self.prompts,
            length=self.plan.length,
            warm_up=self.plan.warm_up,
            points=str(self.store),
            owner=os.getpid(),
        )

    def gaps(self, found: Sequence[tuple[Difference, list[int]]]) -> list[float]:
        """Of the target's logits at each difference, which comes with plain decoding's output; kept in a file."""
        path = self.kept / "gaps.json"
        known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        cases = {
            f"{each} after {output[: each.position]}": (
                self.prompts[each.request] + output[: each.position], each.token, each.reference
            )
            for each, output in found
        }  # fmt: skip
        new = [name for name in cases if name not in known]
        if new:
            measured, _ = self.server.call(
                "benchmarks.serving.engine:gaps",
                timeout=600,
                engine=self.engine(self.plan.arms[0]),
                cases=[cases[name] for name in new],
            )
            known |= dict(zip(new, measured, strict=True))
            path.write_text(json.dumps(known))
        return [known[name] for name in cases]

    def results(self) -> "Results | None":
        """Of what has been measured so far; None where plain decoding has not, with which all is compared."""
        points = self.points()
        if not any(point.arm.kind == PLAIN for point in points):
            return None
        tables = {}
        for arm in self.plan.arms:
            costs = launch.costs(arm, self.kept)
            for path in costs.glob("*.json") if costs.is_dir() else [costs] if costs.exists() else ():
                tables[arm] = CostTable.load(path)
        learned = {
            arm: Snapshot.read(path, arm.length, Settings().strata)
            for arm in self.plan.arms
            if (path := launch.coefficients(arm, self.kept)).exists()
        }
        passes = max(self.plan.passes, *(point.repetition + 1 for point in points))
        return Results(self.plan._replace(passes=passes), points, self.gaps, tables, learned)


class Equality(NamedTuple):
    """Requests of an arm in all its points; of those, with another output than plain decoding; and of those again,
    where the two logits nearly tie at the first difference."""

    requests: int
    differing: int
    ties: int

    @property
    def good(self) -> bool:
        return self.differing == self.ties

    def __str__(self) -> str:
        if self.good:
            return f"{self.differing} of {self.requests} differ" + (", in near ties" if self.differing else "")
        return f"{self.differing} of {self.requests} DIFFER, {self.ties} of them in near ties"


class Results:
    """points: of one plan, by arm and concurrency; what has no point is left out everywhere. gaps: see `Bench.gaps`.
    tables: the step costs that adaptive arms plan by. learned: what they have saved."""

    def __init__(
        self,
        plan: Plan,
        points: Sequence[Point],
        gaps: Callable[[Sequence[tuple[Difference, list[int]]]], list[float]],
        tables: dict[Arm, CostTable],
        learned: dict[Arm, Snapshot],
    ) -> None:
        self.plan, self.tables, self.learned = plan, tables, learned
        self.points: dict[tuple[Arm, int], list[Point]] = {}
        for point in sorted(points, key=lambda point: point.repetition):
            self.points.setdefault((point.arm, point.concurrency), []).append(point)
        self.arms = [arm for arm in plan.arms if any(arm == each for each, _ in self.points)]
        self.equality = self._compare(gaps)

    def _compare(self, gaps: Callable[[Sequence[tuple[Difference, list[int]]]], list[float]]) -> dict[Arm, Equality]:
        by_arm = {arm: [p for key, of_key in self.points.items() if key[0] == arm for p in of_key] for arm in self.arms}
        plain = [point for arm, points in by_arm.items() if arm.kind == PLAIN for point in points]
        reference = max(plain, key=lambda point: len(point.outputs)).outputs
        found = {
            arm: [each for point in points for each in differences(point, reference)] for arm, points in by_arm.items()
        }
        unique = list(dict.fromkeys(each for of_arm in found.values() for each in of_arm))
        gap = dict(zip(unique, gaps([(each, reference[each.request]) for each in unique]), strict=True))
        return {
            arm: Equality(
                sum(len(point.outputs) for point in by_arm[arm]),
                len(of_arm),
                sum(gap[each] < LOGIT_TOLERANCE for each in of_arm),
            )
            for arm, of_arm in found.items()
        }

    @property
    def drafters(self) -> list[str]:
        return list(dict.fromkeys(arm.drafter for arm in self.arms))

    def concurrencies(self, arm: Arm) -> list[int]:
        return [each for each in self.plan.requests if (arm, each) in self.points]

    def adaptive(self) -> list[tuple[Arm, int]]:
        """(arm, concurrency)"""
        return [(arm, each) for arm in self.arms if arm.kind in launch.TRIMMING for each in self.concurrencies(arm)]

    def figures(self, arm: Arm, concurrency: int) -> Figures:
        return Figures.of(self.points[arm, concurrency])

    def ratio(self, arm: Arm, other: Arm, concurrency: int, figure: str = "cpu_throughput") -> Ratio | None:
        """None too where an output is wrong: such an arm is not faster, it does something else."""
        if not (self.equality[arm].good and other in self.equality and self.equality[other].good):
            return None
        return ratio(self.points[arm, concurrency], self.points.get((other, concurrency), ()), figure)

    def served(self, arm: Arm) -> list[str]:
        """Strata in which the arm's head is served, by what it has saved last."""
        saved = self.learned.get(arm)
        if saved is None or saved.gates is None:
            return []
        return [name for name, gate in zip(saved.strata, saved.gates[HEAD], strict=True) if gate > 0]

    def noise(self) -> tuple[float, float] | None:
        """(median, largest) factor between the CPU throughputs of one arm at one concurrency in two passes; None where
        nothing was measured twice."""
        factors = [
            max(rates) / min(rates)
            for points in self.points.values()
            if len(rates := [Figures.of([point]).cpu_throughput for point in points]) > 1
        ]
        return (statistics.median(factors), max(factors)) if factors else None

    def planned(self, arm: Arm, concurrency: int) -> float:
        """Milliseconds per verified draft by the arm's own table, from none to all; NaN without a table."""
        if arm not in self.tables:
            return math.nan
        drafts = concurrency * arm.length
        verify = self.tables[arm].dense(concurrency, concurrency + drafts).verify
        return float(verify[-1] - verify[concurrency]) / drafts

    def growth(self, arm: Arm, concurrency: int) -> Ratio | None:
        """What the target's forward costs with all drafts, in the fixed arm, over what it costs with none, in plain
        decoding."""
        same, plain = arm._replace(kind=FIXED), Arm(arm.drafter, PLAIN, 0)
        if (same, concurrency) not in self.points:
            return None
        return self.ratio(same, plain, concurrency, "target_cpu_ms")

    def best_fixed(self, arm: Arm, concurrency: int) -> Arm:
        """The fixed arm with this arm's drafter of the highest throughput by CPU time, of those measured."""
        fixed = [
            each
            for each in self.arms
            if (each.drafter, each.kind) == (arm.drafter, FIXED) and (each, concurrency) in self.points
        ]
        return max(
            fixed, key=lambda each: self.figures(each, concurrency).cpu_throughput, default=arm._replace(kind=FIXED)
        )


Rows = list[list[str]]
NUMBERS = {
    "tokens/s": ("throughput", ".1f"),
    "per user": ("per_user", ".2f"),
    "per CPU second": ("cpu_throughput", ".1f"),
    "accept length": ("accept_length", ".2f"),
    "verified per token": ("verified_per_token", ".2f"),
    "step ms": ("step_ms", ".1f"),
    "target ms": ("target_ms", ".1f"),
    "own ms": ("own_cpu_ms", ".1f"),
}


def arm_rows(found: Results, drafter: str) -> tuple[list[str], Rows]:
    """One row per concurrency and arm, that without a drafter first."""
    rows = []
    arms = [arm for arm in found.arms if arm.drafter == drafter]
    for concurrency in found.plan.requests:
        for arm in (arm for arm in arms if (arm, concurrency) in found.points):
            figures = found.figures(arm, concurrency)
            numbers = [format(getattr(figures, name), form) for name, form in NUMBERS.values()]
            versus = "" if arm.kind == PLAIN else _text(found.ratio(arm, Arm(drafter, PLAIN, 0), concurrency))
            rows.append([str(concurrency), str(arm).removeprefix(f"{drafter} "), *numbers, versus])
    return ["at a time", "arm", *NUMBERS, "over plain"], rows


def adaptive_rows(found: Results) -> tuple[list[str], Rows]:
    """Every adaptive arm against the fixed arms of its drafter and against plain decoding, by concurrency."""
    rows = []
    for arm, concurrency in found.adaptive():
        same, best = arm._replace(kind=FIXED), found.best_fixed(arm, concurrency)
        rows.append(
            [
                str(arm),
                str(concurrency),
                "" if (growth := found.growth(arm, concurrency)) is None else f"{growth.mean:.2f}",
                f"{found.planned(arm, concurrency):.2f}",
                _text(found.ratio(arm, same, concurrency, "throughput")),
                _text(found.ratio(arm, same, concurrency)),
                "" if (value := found.ratio(arm, best, concurrency)) is None else f"{value} ({best.length})",
                _text(found.ratio(arm, Arm(arm.drafter, PLAIN, 0), concurrency)),
            ]
        )
    columns = ["arm", "at a time", "all / none", "ms per draft"]
    columns += ["by the clock", "over fixed", "over the best fixed", "over plain"]
    return columns, rows


def depth_rows(found: Results) -> tuple[list[str], Rows]:
    """What drafting to the planned depth takes of a step, against the fixed arm, which always drafts all positions."""
    rows = []
    for arm, concurrency in found.adaptive():
        if arm.drafter == "STANDALONE":
            figures = found.figures(arm, concurrency)
            admitted = figures.verified_per_token * figures.accept_length - 1
            same = arm._replace(kind=FIXED)
            whole = found.figures(same, concurrency) if (same, concurrency) in found.points else None
            rows.append(
                [
                    str(arm),
                    str(concurrency),
                    f"{admitted:.2f}",
                    f"{figures.step_ms - figures.target_ms:.1f}",
                    "" if whole is None else f"{whole.step_ms - whole.target_ms:.1f}",
                    _text(found.ratio(arm, same, concurrency)),
                    _text(found.ratio(arm, Arm(arm.drafter, PLAIN, 0), concurrency)),
                ]
            )
    columns = ["arm", "at a time", "verified drafts", "rest ms", "rest ms, fixed", "over fixed", "over plain"]
    return columns, rows


def head_rows(found: Results) -> tuple[list[str], Rows]:
    """Arms with a head over the same without."""
    rows = []
    for arm, concurrency in found.adaptive():
        other = arm._replace(kind=HEADLESS)
        if arm.kind == HEADED and (other, concurrency) in found.points:
            pair = [found.figures(each, concurrency) for each in (arm, other)]
            rows.append(
                [
                    str(arm),
                    str(concurrency),
                    ", ".join(found.served(arm)) or "closed",
                    *(f"{each.verified_per_token:.3f}" for each in pair),
                    *(f"{each.accept_length:.3f}" for each in pair),
                    _text(found.ratio(arm, other, concurrency, "throughput")),
                    _text(found.ratio(arm, other, concurrency)),
                ]
            )
    columns = ["arm", "at a time", "served in", "verified per token", "the same, headless", "accept length"]
    return [*columns, "the same, headless", "by the clock", "over headless"], rows


def equality_rows(found: Results) -> tuple[list[str], Rows]:
    return ["arm", "requests"], [[str(arm), str(each)] for arm, each in found.equality.items()]


def _text(value: Ratio | None) -> str:
    return "" if value is None else str(value)


def compute_bound(found: Results, arm: Arm, concurrency: int) -> bool:
    growth = found.growth(arm, concurrency)
    return growth is not None and growth.mean >= COMPUTE_BOUND


def steps_beside(found: Results, arm: Arm, other: Arm, concurrency: int) -> str:
    """Where an arm's steps spend what another's do not: times are medians, tokens means."""
    mine, theirs = (found.figures(each, concurrency) for each in (arm, other))
    tokens = [each.verified_per_token * each.accept_length * concurrency for each in (mine, theirs)]
    rest = [each.step_ms - each.target_ms for each in (mine, theirs)]
    return (
        f"a step's target took {mine.target_ms:.0f} ms for {tokens[0]:.0f} tokens against {theirs.target_ms:.0f} for "
        f"{tokens[1]:.0f}, the rest of the step {rest[0]:.0f} ({mine.own_cpu_ms:.0f} of scoring, planning and "
        f"learning) against {rest[1]:.0f}, and it gave "
        f"{mine.accept_length:.2f} tokens per request against {theirs.accept_length:.2f}"
    )


def verdicts(found: Results) -> dict[str, list[str]]:
    """Every case of what is wanted (see `claims`): "held" or "missed" where the whole interval says so, else "open",
    as it is with one pass, which has no interval."""
    lines: dict[str, list[str]] = {"missed": [], "open": [], "held": []}
    for arm, concurrency in found.adaptive():
        cases = []
        if concurrency in BYPASSED:
            cases.append((arm._replace(kind=FIXED), 1 - BYPASS_LOSS))
        if compute_bound(found, arm, concurrency):
            cases.append((found.best_fixed(arm, concurrency), 1.0))
        for other, least in cases:
            value = found.ratio(arm, other, concurrency)
            if value is not None:
                passes = min(len(found.points[each, concurrency]) for each in (arm, other))
                settled = "held" if value.low >= least else "missed" if value.high < least else "open"
                state = settled if passes > 1 else "open"
                why = "" if state == "held" else f"; {steps_beside(found, arm, other, concurrency)}"
                lines[state].append(f"{arm}, {concurrency} at a time: {value} of {other}, {least:.2f} is wanted{why}")
    return lines


def claims(found: Results) -> str:
    growths = [each for arm in found.adaptive() if (each := found.growth(*arm)) is not None]
    nowhere = bool(growths) and max(growths).mean < COMPUTE_BOUND
    wrong = [f"{arm}: output differs, no speed-up is claimed" for arm, each in found.equality.items() if not each.good]
    lines = [
        f"Wanted, by CPU time: where verification is compute-bound (all drafts cost the target {COMPUTE_BOUND} times "
        f"what none cost, or more) no fixed length is faster; at 1 and 2 requests at least {1 - BYPASS_LOSS} of the "
        "same fixed length. A state is what the whole interval says; one pass has none and leaves all open.\n",
        *(f"- {line}" for line in wrong),
        *(["- Nowhere compute-bound here."] if nowhere else []),
        *(f"- {state}: {line}" for state, of_state in verdicts(found).items() for line in of_state),
    ]
    return "\n".join(lines) + "\n"


def show(title: str, columns: Sequence[str], rows: Rows) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name.replace(" ", "\n"), justify="right" if place > 1 else "left", no_wrap=True)
    for _, group in groupby(rows, lambda row: row[0]):
        for row in group:
            table.add_row(*row)
        table.add_section()
    console.print(table)


def write_csv(path: Path, found: Results) -> None:
    """One row per point."""
    names = list(Figures.__dataclass_fields__)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        head = ["drafter", "kind", "length", "pass", "at_a_time", "requests", "new_tokens", "seconds"]
        writer.writerow([*head, *names])
        for (arm, concurrency), points in found.points.items():
            for point in points:
                figures = Figures.of([point])
                labels = [*arm, point.repetition + 1, concurrency, point.requests, point.length, point.seconds]
                writer.writerow([*labels, *(getattr(figures, name) for name in names)])


def picture(path: Path, found: Results) -> None:
    """Throughput against interactivity, one line per arm over the concurrencies; rings mark the Pareto front.

    Above by wall time, below by CPU time of the scheduler.
    """
    width = len(found.drafters)
    colours = {
        PLAIN: plt.cm.binary, FIXED: plt.cm.Blues, ADAPTIVE: plt.cm.Oranges, PROFILED: plt.cm.Greens,
        HEADED: plt.cm.Reds, HEADLESS: plt.cm.Purples,
    }  # fmt: skip
    figure, axes = plt.subplots(2, width, figsize=(5.2 * width, 9), layout="constrained", squeeze=False)
    for column, drafter in enumerate(found.drafters):
        arms = [arm for arm in found.arms if arm.drafter == drafter]
        longest = max(arm.length for arm in arms)
        for row, (name, second) in enumerate((("throughput", "second"), ("cpu_throughput", "CPU second"))):
            panel, every = axes[row][column], []
            for arm in arms:
                levels = found.concurrencies(arm)
                rates = [getattr(found.figures(arm, each), name) for each in levels]
                line = [(rate / each, rate) for rate, each in zip(rates, levels, strict=True)]
                every += line
                share = 0.3 + 0.6 * arm.length / longest
                colour = colours[arm.kind](1.0 if arm.kind == PLAIN else share)
                label = str(arm).removeprefix(f"{drafter} ")
                panel.plot(*zip(*line, strict=True), marker=".", color=colour, label=label)
            front = [each for each, best in zip(every, pareto_front(every), strict=True) if best]
            panel.scatter(*zip(*front, strict=True), s=90, facecolors="none", edgecolors="tab:red", label="front")
            panel.set(
                title=drafter, xlabel=f"tokens per {second} and user", ylabel=f"tokens per {second}",
                xscale="log", yscale="log",
            )  # fmt: skip
            panel.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def page(form: str, found: Results) -> str:
    """A part of the section of docs/results.md."""
    plan = found.plan
    requests = ", ".join(f"{count} at {each}" for each, count in plan.requests.items())
    open_points = len(plan.keys()) - sum(map(len, found.points.values()))
    state = f" ({open_points} of {len(plan.keys())} points not measured)" if open_points else ""
    passes = "1 pass" if plan.passes == 1 else f"{plan.passes} passes"
    about = f"{plan.length} new tokens per request; requests by concurrency: {requests}; {passes}{state}."
    if (noise := found.noise()) is not None:
        about += (
            " The machine's noise: between passes the tokens per CPU second of one arm at one concurrency differ by a "
            f"factor of {noise[0]:.2f} (median), {noise[1]:.2f} at most."
        )
    parts = [f"### {form}\n"]
    if HEADED in {arm.kind for arm in plan.arms}:
        parts += [
            f"{about} Every request served once before was {plan.warm_up} tokens long, so that the head's gate could "
            "open; both arms plan by the same step costs. Ratios are of the arm with a head over that without.\n",
            results.table(*head_rows(found)),
        ]
    else:
        parts += [
            f"{about}\n",
            results.table(*adaptive_rows(found)),
            claims(found),
        ]
    columns, rows = depth_rows(found)
    if rows:
        parts += [
            "What an autoregressive drafter costs: the engine leaves out its forwards beyond the planned depth. "
            "Verified drafts are per request; the rest of a step is drafting and scheduling (medians), beside that of "
            "the fixed arm, which drafts all positions:\n",
            results.table(columns, rows),
        ]
    for drafter in found.drafters:
        parts += [f"{drafter}:\n", results.table(*arm_rows(found, drafter))]
    parts += ["Requests whose greedy output is not plain decoding's:\n", results.table(*equality_rows(found))]
    return "\n".join(parts)


def command_of(form: str, passes: int) -> str:
    options = [OPTIONS[form], f"--passes {passes}" if passes != FORMS[form].passes else ""]
    arguments = " ".join(filter(None, options))
    return "make bench-serving" + (f" ARGS={shlex.quote(arguments)}" if arguments else "")


def publish_results(forms: dict[str, Results]) -> None:
    """The picture is that of the first form."""
    picture(ROOT / "docs/results-serving.png", next(iter(forms.values())))
    command = "`, `".join(command_of(form, found.plan.passes) for form, found in forms.items())
    parts = [ABOUT, "![Throughput against interactivity](results-serving.png)\n"]
    results.publish("serving", "Serving", command, "\n".join([*parts, *(page(*each) for each in forms.items())]))


def main(
    quick: Annotated[bool, typer.Option(help="Few arms and concurrencies, short outputs.")] = False,
    head: Annotated[
        bool, typer.Option(help="Adaptive verification with a head and without, after a long warm-up.")
    ] = False,
    passes: Annotated[
        int | None, typer.Option(min=1, help="How often every arm is measured; more narrow the intervals.")
    ] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="Only these: DFLASH, STANDALONE, DSPARK.")] = None,
    folder: Annotated[Path, typer.Option(help="What has been measured; it is not measured again.")] = Path(
        "build/bench-serving"
    ),
    measure: Annotated[bool, typer.Option(help="No: tables of what has been measured so far.")] = True,
    publish: Annotated[bool, typer.Option(help="Rewrite the section of docs/results.md and its picture.")] = True,
) -> None:
    """Throughput of every arm at every concurrency, and whether all of them decode the same text.

    Can be stopped and started again. Exit status 1 where an output differs from plain decoding's without a near tie.
    """
    known = {arm.drafter for arm in FULL.arms}
    unknown = set(drafter or ()) - known
    if unknown:
        raise typer.BadParameter(f"--drafter {', '.join(unknown)}: choose from {', '.join(sorted(known - {''}))}")
    if quick and head:
        raise typer.BadParameter("--quick and --head are two forms: give one of them")
    form = SHORT if quick else HEAD_FORM if head else WHOLE
    folder = folder.resolve()
    try:
        with ExitStack() as resources:
            benches = {name: Bench(each, folder, resources) for name, each in FORMS.items()}
            if passes is not None:
                benches[form].plan = benches[form].plan._replace(passes=passes)
            if measure:
                benches[form].measure(drafter or ())
            forms = {name: each for name, bench in benches.items() if (each := bench.results()) is not None}
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        # The running engine ends by itself after its point, which is kept.
        os._exit(130)
    found = forms.get(form)
    if found is None:
        console.print("nothing has been measured in this form: leave out --no-measure", style="red")
        raise typer.Exit(2)
    for name in found.drafters:
        show(name, *arm_rows(found, name))
    show("What an autoregressive drafter costs", *depth_rows(found))
    if head:
        show("Adaptive verification with a head, over that without", *head_rows(found))
    else:
        show("Adaptive verification", *adaptive_rows(found))
    show("Greedy output that is not plain decoding's", *equality_rows(found))
    if not head:
        console.print(claims(found))
    write_csv(folder / "points.csv", found)
    picture(folder / "serving.png", found)
    console.print(f"{folder}: points.csv, serving.png", highlight=False)
    if publish:
        publish_results(forms)
    raise typer.Exit(int(not all(each.good for each in found.equality.values())))


if __name__ == "__main__":
    typer.run(main)
