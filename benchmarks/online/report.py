"""The online estimator against the released peer's rule, on the same streams.

    python -m benchmarks.online.report [DIR] [--steps 400] [--seeds 3] [--publish]

What is scored: every draft that carries a label when all drafts are verified, whether or not the arm had it verified,
in the scored steps of the stream. Its loss is the expected log-loss by the exact acceptance probability alpha,

    -alpha log p - (1 - alpha) log(1 - p)        nats; p the prediction made before the verdict

which has no label noise. The difference of the two arms has a 95 % bootstrap interval in which all drafts of a prompt
(synthetic: of a row of the batch) are drawn together. It does not hold the luck of the verdicts that the arms learned
from; how often each seed agrees is printed beside it.
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

from av_triton import GREEDY, Settings
from benchmarks import intervals, results
from benchmarks.online import compare, scenarios
from benchmarks.online.compare import ARMS, Run
from benchmarks.online.scenarios import Scenario
from benchmarks.resume import Store
from benchmarks.traces.quality import load
from benchmarks.traces.replay import new_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parents[1]
DATA = HERE / "traces/data"
DEFAULTS = Settings()
USUAL = {"steps": 400, "seeds": 3}
# What the stored results depend on.
SOURCES = [
    *(HERE / "online/arms.py", HERE / "online/compare.py", HERE / "online/scenarios.py"),
    *(HERE / "peers/adaptive_rule.py", HERE / "peers/budget.py", HERE / "traces/quality.py"),
]
WIDTH = 120  # of the text in docs/results.md
UNDRAWN = ("at rest", "4 rows", "budget")  # no more to see in their curves than in those of the cold start

console = Console()
if not console.is_terminal:
    console = Console(width=150)


class Result:
    """A scenario over all its seeds; log-losses in nats per labelled draft, one per arm."""

    def __init__(self, scenario: Scenario, runs: list[Run]) -> None:
        self.scenario, self.runs = scenario, runs
        clusters = np.concatenate([np.array(each.by_cluster) for each in runs])
        self.cluster, self.counts, self.sums = clusters[:, 0].astype(int), clusters[:, 1], clusters[:, 2:]
        self.labels = int(self.counts.sum())
        self.losses = self.sums.sum(0) / self.labels
        by_seed = np.array([np.array(each.by_cluster)[:, 2:].sum(0) for each in runs])
        self.better_seeds = int((by_seed[:, 0] < by_seed[:, 1]).sum())
        self.difference = self.minus_peer(0)
        gap = self.difference
        self.verdict = "better" if gap.high < 0 else "worse" if gap.low > 0 else "level"
        self.holds = self.verdict == "better" if scenario.strict else self.verdict != "worse"

    def minus_peer(self, arm: int) -> intervals.Interval:
        gap = self.sums[:, arm] - self.sums[:, 1]
        return intervals.of(lambda at: float(gap[at].sum() / self.counts[at].sum()), self.cluster, resamples=1000)


COLUMNS = ("scenario", "labels", "ours", "peer", "ours - peer", "better with", "verdict")


def signed(gap: intervals.Interval) -> str:
    return f"{gap.value:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"


def row(result: Result) -> tuple[str, ...]:
    return (
        result.scenario.name,
        f"{result.labels:,}",
        f"{result.losses[0]:.4f}",
        f"{result.losses[1]:.4f}",
        signed(result.difference),
        f"{result.better_seeds} of {len(result.runs)} seeds",
        result.verdict + ("" if result.holds else ", not as it should be"),
    )


def csv(found: list[Result]) -> str:
    lines = ["scenario,seed,arm,labels,log_loss,log_loss_by_verdicts"]
    for result in found:
        for seed, each in enumerate(result.runs):
            _, count, *sums = np.array(each.by_cluster).sum(0)
            for arm, losses in zip(ARMS, zip(sums, each.observed, strict=True), strict=False):
                values = ",".join(f"{value / count:.6f}" for value in losses)
                lines.append(f'"{result.scenario.name}",{seed},{arm},{count:.0f},{values}')
    return "\n".join(lines) + "\n"


def picture(path: Path, found: list[Result]) -> None:
    """Log-loss in windows of 20 steps over the labels seen, the mean of the seeds."""
    shown = [result for result in found if not result.scenario.name.startswith(UNDRAWN)] or found
    columns = 4
    lines = -(-len(shown) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3 * lines), layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(shown) :]:
        panel.axis("off")
    for panel, result in zip(panels.flat, shown, strict=False):
        windows = min(len(each.curve) for each in result.runs)
        sums = np.array([each.curve[:windows] for each in result.runs]).sum(0)
        middle = (sums[:, 0] + sums[:, 1] / 2) / len(result.runs)
        for column, (name, style) in enumerate((("ours", "-"), ("peer", "--"))):
            panel.plot(middle, sums[:, 2 + column] / sums[:, 1], style, label=name)
        for each in result.runs:
            for tick in each.ticks:
                panel.axvline(tick, color="grey", linewidth=0.6)
        panel.set_title(result.scenario.name, fontsize=9)
        panel.set(xlabel="labels", ylabel="log-loss (nats)")
        if (sums[:, 2:4].max(1) / sums[:, 1]).max() > 3:
            panel.set_yscale("log")
    panels[0][0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def behind(found: list[Result]) -> list[str]:
    """Where the peer is ahead, and what is left of it at its own refit interval."""
    worse = [result for result in found if result.verdict == "worse" and result.scenario.same_interval]
    if not worse:
        return []
    rows = [(result.scenario.name, signed(result.difference), signed(result.minus_peer(2))) for result in worse]
    text = (
        "Where the peer is ahead: its cycle of 100 steps has three times the labels of ours of "
        f"{DEFAULTS.refit_interval}; ours is a running mean over {DEFAULTS.memory:g} cycles, which weighs the last "
        "steps more. With the peer's refit interval ours differs by:"
    )
    return [fill(text, WIDTH), results.table(("scenario", "ours - peer", "ours at its interval - peer"), rows)]


def body(found: list[Result], seeds: int) -> str:
    """The section of docs/results.md."""
    verdicts = [result.verdict for result in found]
    missed = [result.scenario.name for result in found if not result.holds]
    what = (
        "The online estimator against the rule of vLLM 0.33.0, restated from its source "
        "(`benchmarks/peers/adaptive_rule.py`), on the same streams. Scored is every draft that carries a label when "
        "all drafts are verified, by its expected log-loss under the exact acceptance probability (nats per draft, "
        "lower is better). The 95 % bootstrap intervals draw all drafts of a prompt together; they do not hold the "
        "luck of the verdicts that were learned from, so it is printed how many seeds agree (a greedy trace has no "
        "such luck: its seeds differ in the step at which they begin). The traces are those of "
        "`benchmarks/traces/data`. At rest: the second half of three times as many steps as a cold start has. 4 rows: "
        "batches of 4 requests, from a cold start. Budget: that share of the drafts is verified, the others teach "
        "nothing. Starved position: positions 2 to 5 are all but never accepted, then nearly always; each rule "
        'decides by its own planner. Verdicts: "better" and "worse" where the interval of the difference excludes '
        '0, however small the difference is; "level" elsewhere. "Not as it should be": worse, or no more than level '
        "where ours was built to be better."
    )
    outcome = (
        f"Of {len(found)} scenarios ours is better in {verdicts.count('better')}, level in {verdicts.count('level')}, "
        f"worse in {verdicts.count('worse')} ({seeds} seeds). "
    ) + (f"Not as it should be: {'; '.join(missed)}." if missed else "")
    why = (
        f"Where ours is ahead: its first refit comes after {DEFAULTS.refit_interval} steps instead of 100 (cold start, "
        "budget, switch); greedy requests have coefficients of their own (greedy and sampled), which begin at a slope "
        f"of {DEFAULTS.initial_slopes[GREEDY]:g} instead of .5 (every scenario of a greedy trace); a refit moves the "
        "slope by at most .1 and an intercept by at most 2, where the peer has no bound (one-hot rows: in float32 "
        "their weight p (1 - p) is 0, their residual is not); and one draft in a hundred is verified at full depth "
        "whatever its score, without which the estimate of a position that is not verified stays where it is (starved "
        "position). Requests that are new count as certain with the peer, so it does verify all of them where the "
        "workload changes with the requests; its steps from the few labels without much weight have no bound, though, "
        "and throw the intercept away (then all requests new). Log-loss is not all: with a third of the rows one-hot "
        "our slope falls to 0, the best that one line can do for all rows, so that the others are no longer ranked; "
        "the peer keeps their ranking, and the one-hot rows first."
    )
    parts = [
        fill(what, WIDTH),
        fill(outcome, WIDTH),
        results.table(COLUMNS, map(row, found)),
        "![Log-loss over the labels seen](results-online.png)",
        fill(why, WIDTH),
        *behind(found),
    ]
    return "\n\n".join(part.rstrip() for part in parts)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of .npz traces.")] = DATA,
    steps: Annotated[int, typer.Option(min=100, help="Steps of a cold start.")] = USUAL["steps"],
    seeds: Annotated[int, typer.Option(min=1, help="Streams of each scenario.")] = USUAL["seeds"],
    only: Annotated[str, typer.Option(help="Only scenarios whose name has this in it.")] = "",
    publish: Annotated[
        bool, typer.Option(help="Rewrite the section of docs/results.md; needs all scenarios on the default traces.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder of the table (CSV) and the picture.")] = Path(
        "build/report-online"
    ),
) -> None:
    """Log-loss of the online estimator and of the released peer's rule on the same streams. Goes on where a stopped run
    of the same sources was."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        console.print(f"{folder} has no .npz traces: give a folder of them (benchmarks/traces/README.md)", style="red")
        raise typer.Exit(2)
    try:
        traces = [load(path) for path in paths]
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    wanted = [each for each in scenarios.all_of(traces, steps) if only in each.name]
    if not wanted:
        console.print(f"no scenario has {only!r} in its name: give another --only", style="red")
        raise typer.Exit(2)
    store = Store(output, [*paths, *SOURCES])
    found = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(wanted) * seeds)
        for scenario in wanted:
            runs = []
            progress.update(task, description=scenario.name)
            for seed in range(seeds):
                key = f"{scenario.name}, {steps} steps, seed {seed}"
                raw = store.get(key, lambda s=scenario, n=seed: compare.run(s, s.make(n)))  # type: ignore[misc]
                runs.append(msgspec.convert(raw, Run))
                progress.advance(task)
            found.append(Result(scenario, runs))
    table = new_table("Expected log-loss, nats per labelled draft", *COLUMNS)
    for result in found:
        table.add_row(*row(result), style=None if result.holds else "red")
    console.print(table)
    (output / "online.csv").write_text(csv(found))
    picture(output / "online.png", found)
    console.print(f"written: {output / 'online.csv'}, {output / 'online.png'}", highlight=False)
    if publish and folder == DATA and not only:
        command = results.command("report-online", USUAL, {"steps": steps, "seeds": seeds})
        results.publish("online", "Learning online, against the peer's rule", command, body(found, seeds))
        picture(results.PAGE.parent / "results-online.png", found)
    elif publish:
        console.print("docs/results.md is left as it is: it has all scenarios, on the default traces")


if __name__ == "__main__":
    typer.run(main)
