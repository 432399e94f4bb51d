"""What the additions to the score are worth, and where they could do harm.

    python -m benchmarks.score.report [FOLDER ...] [--seeds 3] [--publish]

Every folder has traces (benchmarks/traces/README.md); those with hidden states (`hid`) are joined by pair and
temperature, and so are those without. A published section is of the repository's traces alone.
"""

from pathlib import Path
from textwrap import fill
from typing import Annotated

import matplotlib
import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks import intervals, results
from benchmarks.resume import Store
from benchmarks.score import scenarios
from benchmarks.score.additions import EVIDENCE_FROM, HEAD_BOUND, OFFSET_BOUND, Additions, Restated
from benchmarks.score.arms import Estimator, Peer, Redrawn
from benchmarks.score.compare import SETTLED, SPANS, WINDOW, Make, Result, Run, run
from benchmarks.score.scenarios import FOLDS, ROWS, Scenario
from benchmarks.score.streams import Rounds, joined, load
from benchmarks.traces.replay import new_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
TRACES = HERE.parent / "traces/data"
FOLDERS = [HERE / "data", TRACES, TRACES / "collected"]
COMMAND = "make report-score"
SOURCES = [
    *(HERE / name for name in ("additions.py", "arms.py", "compare.py", "scenarios.py", "streams.py")),
    *(HERE.parent / name for name in ("peers/adaptive_rule.py", "online/scenarios.py", "traces/quality.py")),
]
WIDTH = 120  # of the text in docs/results.md
PRIOR = 16.0  # of the offset
TARGET, BOUND, ECE_BOUND = -0.015, 0.001, 0.005

console = Console()
if not console.is_terminal:
    console = Console(width=160)


def restated(**additions: object) -> Make:
    chosen = Additions(**additions)  # type: ignore[arg-type]
    return lambda slots, positions, width, greedy: Restated(slots, positions, width, chosen, greedy)


ARTICLE, EXACT, VERDICTS, ALL, OPEN = "article", "exact labels", "all, from verdicts", "all", "all, no gates"
LIBRARY = "the library, its defaults"  # head, with exact labels; no offset
RESTATED, HEADLESS, REDRAWN = "article, restated", "the library, no head", "article, other verdicts"
# The article's estimator first: differences are to it.
ARMS: dict[str, Make] = {
    ARTICLE: lambda slots, positions, width, greedy: Estimator(slots, positions),
    "vLLM 0.33.0": lambda slots, positions, width, greedy: Peer(positions),
    EXACT: restated(exact=True),
    "offset": restated(offset=PRIOR),
    "history": restated(history=True),
    "hidden state": restated(hidden=True),
    VERDICTS: restated(offset=PRIOR, history=True, hidden=True),
    ALL: restated(exact=True, offset=PRIOR, history=True, hidden=True),
    OPEN: restated(exact=True, offset=PRIOR, history=True, hidden=True, gated=False),
    LIBRARY: lambda slots, positions, width, greedy: Estimator(slots, positions, exact=True, width=width),
}


def some(*names: str) -> dict[str, Make]:
    return {name: ARMS[name] for name in (ARTICLE, *names)}


HELD_OUT = {name: make for name, make in ARMS.items() if name != "offset"}  # nothing is learned of the request either
WITHOUT_HIDDEN = some("vLLM 0.33.0", EXACT, "offset", "history", ALL)
HARM = {
    RESTATED: restated(),
    **{name: ARMS[name] for name in (EXACT, VERDICTS, ALL, OPEN, LIBRARY)},
    HEADLESS: lambda slots, positions, width, greedy: Estimator(slots, positions, exact=True),
    REDRAWN: lambda slots, positions, width, greedy: Redrawn(Restated(slots, positions, width, Additions(), greedy)),
}
# Who is compared with whom: other labels alone, then the same labels and the same arithmetic with and without the
# additions, for what the same score with other labels differs by is more. One in float32 and one in float64 differ
# where p is within a few roundings of 1, as on one-hot rows.
HARM_PAIRS = (
    (REDRAWN, RESTATED), (EXACT, RESTATED), (VERDICTS, RESTATED), (ALL, EXACT), (OPEN, EXACT), (LIBRARY, HEADLESS),
)  # fmt: skip
STATED_PAIRS = tuple(pair for pair in HARM_PAIRS if pair[0] not in (EXACT, OPEN))


def signed(gap: intervals.Interval) -> str:
    return "" if np.isnan(gap.value) else f"{gap.value:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"


def sets(folders: list[Path]) -> tuple[dict[str, Rounds], dict[str, Rounds]]:
    """The traces by pair and temperature: those with hidden states, of two workloads, and those without."""
    found: dict[str, list[Rounds]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.npz"))):
        rounds = load(path)
        pair, temperature = path.stem.split("_")[0], path.stem.split("_T")[-1]
        name = f"{pair}, T = {temperature}" + (", hidden states" if rounds.hidden.shape[-1] else "")
        found.setdefault(name, []).append(rounds)
    whole = {name: joined(parts) for name, parts in found.items()}
    with_hidden = {name: each for name, each in whole.items() if each.hidden.shape[-1]}
    for name, each in with_hidden.items():
        if len(np.unique(each.workload)) != 2:
            raise ValueError(f"{name}: {len(np.unique(each.workload))} workloads; give traces of two in one folder")
    return with_hidden, {name: each for name, each in whole.items() if name not in with_hidden}


def main_table(result: Result) -> list[tuple[str, ...]]:
    """Of arms on drafts that nobody learned from."""
    last = len(SPANS) - 1
    return [
        (
            name,
            f"{result.log_loss(arm, last):.4f}",
            signed(result.difference(arm, last)) if arm else "",
            f"{result.auc(arm):.4f}",
            f"{result.ece(arm):.4f}",
        )
        for arm, name in enumerate(HELD_OUT)
    ]


def curve_table(result: Result) -> list[tuple[str, ...]]:
    def row(arm: int) -> list[str]:
        return [f"{result.difference(arm, span, span).value:+.4f}" for span in range(len(SPANS))]

    return [(name, *row(arm)) for arm, name in enumerate(HELD_OUT) if arm]


def difference_table(found: dict[str, Result], arms: dict[str, Make]) -> list[tuple[str, ...]]:
    return [
        (name, f"{result.labels():,.0f}", *(signed(result.difference(arm)) for arm in range(1, len(arms))))
        for name, result in found.items()
    ]


def harm_row(name: str, result: Result) -> tuple[str, ...]:
    order = list(HARM)
    cells = []
    for each, other in HARM_PAIRS:
        arm, against = order.index(each), order.index(other)
        mean = result.difference(arm, against=against).value
        highest, window = result.highest_mean(arm, against), result.worst_window(arm, against)
        cells.append(f"{mean:+.4f} / {highest:+.4f} / {window:+.4f} / {result.deepest(arm, against):.1f}")
    return (name, f"{result.labels():,.0f}", *cells)


MAIN_COLUMNS = ("score", "log-loss", "above the article's", "AUC", "ECE")
CURVE_COLUMNS = ("score", *(f"from {edge:,}" for edge in SPANS))
HARM_COLUMNS = ("scenario", "labels", *(f"{each} - {other}" for each, other in HARM_PAIRS))


class Report:
    """All results: held out by prompt and by workload, and one pass, by set; other traces; harm, by scenario."""

    def __init__(self, folders: list[Path], seeds: int, store: Store, progress: Progress) -> None:
        with_hidden, without = sets(folders)
        harmful = scenarios.harmful(with_hidden, without)
        groups: list[tuple[str, str, list[Scenario], dict[str, Make]]] = []
        for name, rounds in with_hidden.items():
            groups.append(("prompt", name, scenarios.prompts_held_out(name, rounds), HELD_OUT))
            groups.append(("workload", name, scenarios.workloads_held_out(name, rounds), HELD_OUT))
            groups.append(("served", name, [scenarios.served(name, rounds)], ARMS))
        for name, rounds in without.items():
            groups.append(("traces", name, [scenarios.served(name, rounds, passes=4)], WITHOUT_HIDDEN))
        groups += [("harm", each.name, [each], HARM) for each in harmful]
        task = progress.add_task("", total=sum(len(each) * seeds for _, _, each, _ in groups))
        self.seeds = seeds
        self.found: dict[str, dict[str, Result]] = {}
        for kind, name, parts, makes in groups:
            runs = []
            progress.update(task, description=f"{kind}: {name}")
            for part in parts:
                for seed in range(seeds):
                    key = f"{kind}: {part.name}, seed {seed}, {', '.join(makes)}"
                    raw = store.get(key, lambda p=part, n=seed, m=makes: self.run(p, n, m))  # type: ignore[misc]
                    runs.append(msgspec.convert(raw, Run))
                    progress.advance(task)
            self.found.setdefault(kind, {})[name] = Result.of(runs)

    @staticmethod
    def run(scenario: Scenario, seed: int, makes: dict[str, Make]) -> Run:
        return run(scenario.stream(seed), list(makes.values()), scenario.rows, scenario.taught is not None)

    def tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """(title, columns, rows)"""
        found = []
        for kind, title in (("prompt", "prompts"), ("workload", "workload")):
            for name, result in self.found[kind].items():
                found.append((f"{name}: other {title}, after {SETTLED:,} labels", MAIN_COLUMNS, main_table(result)))
        for name, result in self.found["prompt"].items():
            found.append((f"{name}: other prompts, by labels learned from", CURVE_COLUMNS, curve_table(result)))
        for title, kind, arms in (
            ("One pass, every draft scored", "served", ARMS),
            ("Without hidden states, four passes", "traces", WITHOUT_HIDDEN),
        ):
            if kind in self.found:
                columns = ("traces", "labels", *list(arms)[1:])
                found.append((f"{title}: above the article's", columns, difference_table(self.found[kind], arms)))
        harm = [harm_row(name, result) for name, result in self.found["harm"].items()]
        title = (
            f"Where an addition could do harm: mean / highest mean so far from {WINDOW:,} labels on / worst {WINDOW:,} "
            "labels / largest sum that was lost, nats"
        )
        found.append((title, HARM_COLUMNS, harm))
        return found

    def picture(self, path: Path) -> None:
        """Above: learning curves on other prompts. Below: what was gained or lost so far, where it could harm."""
        names = list(self.found["prompt"])
        figure, panels = plt.subplots(2, len(names), figsize=(6 * len(names), 8.4), layout="constrained", squeeze=False)
        for panel, name in zip(panels[0], names, strict=True):
            result = self.found["prompt"][name]
            edges = [*SPANS[1:], 2 * SETTLED]
            for arm, label in enumerate(HELD_OUT):
                gaps = [result.difference(arm, span, span) for span in range(len(SPANS))]
                line = panel.plot(edges, [gap.value for gap in gaps], marker=".", label=label)
                if label == ALL:
                    low, high = [gap.low for gap in gaps], [gap.high for gap in gaps]
                    panel.fill_between(edges, low, high, alpha=0.15, color=line[0].get_color())
            panel.axhline(TARGET, color="grey", linestyle="--", linewidth=1)
            panel.set_title(f"{name}: other prompts", fontsize=10)
            panel.set(xlabel="labels learned from, up to", ylabel="log-loss above the article's")
            panel.legend(fontsize=7)
        arm, base = list(HARM).index(ALL), list(HARM).index(EXACT)
        for panel, name in zip(panels[1], names, strict=True):
            panel.set_prop_cycle(color=plt.get_cmap("tab20").colors)
            for each, result in self.found["harm"].items():
                if each.startswith(name):
                    steps = np.array(result.runs[0].steps)
                    lost = np.cumsum(steps[:, 1 + arm] - steps[:, 1 + base])
                    panel.plot(np.cumsum(steps[:, 0]), lost, linewidth=1.2, label=each.removeprefix(f"{name}: "))
            panel.axhline(0, color="grey", linestyle="--", linewidth=1)
            panel.set_title(f"{name}: where an addition could do harm", fontsize=10)
            panel.set(xlabel="labels", ylabel="loss above that without additions, so far (nats)")
            panel.legend(fontsize=6, loc="lower left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
        plt.close(figure)

    def outcome(self) -> list[str]:
        """Whether the bounds hold, in sentences."""
        lines = []
        arm = list(HELD_OUT).index(ALL)
        for kind, held in (("prompt", "other prompts"), ("workload", "the other workload")):
            for name, result in self.found[kind].items():
                gap = result.difference(arm, len(SPANS) - 1)
                more = result.ece(arm) - result.ece(0)
                reached = "" if gap.value <= TARGET else f" (the aim of {TARGET:+.3f} is missed)"
                raised = f", above the bound of {ECE_BOUND}" if more > ECE_BOUND else ""
                after = f"{name}, {held}, after {SETTLED:,} labels"
                lines.append(
                    f"{ALL} against {ARTICLE}, {after}: log-loss {signed(gap)}{reached}, ECE {more:+.4f}{raised}."
                )
        harm = self.found["harm"]
        for each, other in STATED_PAIRS:
            arm, against = list(HARM).index(each), list(HARM).index(other)
            so_far = {name: result.highest_mean(arm, against) for name, result in harm.items()}
            worse = [f"{name} ({value:+.4f})" for name, value in so_far.items() if value > BOUND]
            named = f": {'; '.join(worse)}" if worse and each != REDRAWN else ""
            window = {name: result.worst_window(arm, against) for name, result in harm.items()}
            above, worst = sum(value > BOUND for value in window.values()), max(window, key=lambda name: window[name])
            deepest = max(result.deepest(arm, against) for result in harm.values())
            why = (
                " That is the luck of the verdicts, so the additions below are compared with the same labels; exact "
                "labels by themselves cannot be."
            )
            lines.append(
                f"{each} against {other}, in the scenarios where an addition could do harm: the mean over all labels "
                f"so far is more than {BOUND} above at some point from {WINDOW:,} labels on, of any seed, in "
                f"{len(worse)} of {len(harm)}{named}; at its highest {max(so_far.values()):+.4f}. In windows of "
                f"{WINDOW:,} labels in {above}, most in {worst} ({window[worst]:+.4f}); the last table has all. The "
                f"largest sum that was lost: {deepest:.1f} nats.{why if each == REDRAWN else ''}"
            )
        return lines

    def body(self) -> str:
        """The section of docs/results.md."""
        what = (
            "What is added to the article's score sigmoid(w f + b_k), each by itself and all together: exact "
            "acceptance probabilities as labels; an offset for each request; and a linear head, learned online, on the "
            "drafted prefix (history) and on the drafter's last hidden state, behind a gate that is open while the "
            "addition has been ahead. `benchmarks/score/additions.py` has the formulas; it is a restatement in numpy. "
            f'"{ALL}" is all four; "{VERDICTS}" the same without exact labels; "{LIBRARY}" what `AdaptiveVerifier` '
            "does where it is given hidden states and exact labels, with no offset. "
            "The article's estimator is the project's `AcceptanceEstimator` taught by verdicts, vLLM's rule that of "
            "`benchmarks/peers/adaptive_rule.py`. Scored is every draft before its label is seen, by its expected "
            "log-loss under the exact acceptance probability, weighted by the probability that it gets a label (nats "
            "per label, lower is better). The traces are those of `benchmarks/score/data` (576 coordinates, T = 1) "
            f"and of `benchmarks/traces/data`; {ROWS} requests at a time, {self.seeds} orders of them. Intervals: "
            "95 %, bootstrap of whole prompts; they do not hold the luck of the order."
        )
        held = (
            f"Other prompts: {FOLDS} folds; the requests of one are served with the rest, and nothing is learned from "
            "them, no offset either: what that is worth shows in the pass where every draft is scored. Other workload: "
            "the same with one of the two workloads. The second of the two passes has new verdicts on the same drafts, "
            "which the head has seen then: more labels, not more drafts."
        )
        why = (
            f"A gate opens after {OFFSET_BOUND:g} (offset) or {HEAD_BOUND:g} nats (head) of evidence, counted from "
            f"{EVIDENCE_FROM:,} labels on, and closes when as much is lost again, by the labels: so a change of "
            "workload or a feature gone wrong costs about that much, however many requests there are. The largest sums "
            "are more than that where a gate opened again, where both were open, where many labels come in one step, "
            "and where a draft's expected loss is far from that of its label (one-hot rows). "
            f"Spread over {WINDOW:,} labels, {HEAD_BOUND:g} nats are {HEAD_BOUND / WINDOW:.3f}: no test on so few "
            "labels can keep a promise below that."
        )
        parts = [fill(what, WIDTH), fill(held, WIDTH), *(fill(line, WIDTH) for line in self.outcome())]
        parts += ["![Learning curves; sums of what was gained or lost](results-score.png)", fill(why, WIDTH)]
        for title, columns, rows in self.tables():
            parts += [f"### {title}", results.table(columns, rows).rstrip()]
        return "\n\n".join(parts)


def csv(tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]) -> str:
    lines = []
    for title, columns, rows in tables:
        lines += [",".join(f'"{cell}"' for cell in (title, *cells)) for cells in (columns, *rows)]
    return "\n".join(lines) + "\n"


def main(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders of .npz traces.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Orders of the requests.")] = 3,
    publish: Annotated[
        bool, typer.Option(help="Rewrite the section of docs/results.md; of the repository's traces only.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder of the tables (CSV) and the picture.")] = Path(
        "build/report-score"
    ),
) -> None:
    """What additions to the score are worth on recorded traces. Goes on where a stopped run of the same sources was."""
    chosen = folders or FOLDERS
    paths = [path for folder in chosen for path in sorted(folder.glob("*.npz"))]
    if not any(path.parent == folder for folder in chosen for path in paths):
        console.print(f"no .npz traces in {', '.join(map(str, chosen))}: give folders of them", style="red")
        raise typer.Exit(2)
    try:
        with Progress(console=console) as progress:
            report = Report(chosen, seeds, Store(output, [*paths, *SOURCES]), progress)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    tables = report.tables()
    for title, columns, rows in tables:
        table = new_table(title, *columns)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in report.outcome():
        console.print(line, highlight=False, soft_wrap=True)
    (output / "score.csv").write_text(csv(tables))
    report.picture(output / "score.png")
    console.print(f"written: {output / 'score.csv'}, {output / 'score.png'}", highlight=False)
    if publish and not folders:
        results.publish("score", "A better score", COMMAND, report.body())
        report.picture(results.PAGE.parent / "results-score.png")


if __name__ == "__main__":
    typer.run(main)
