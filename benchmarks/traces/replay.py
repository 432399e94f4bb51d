"""Replays acceptance traces through the online estimator and prints how good its predictions are.

python -m benchmarks.traces.replay [DIR] [--passes 50]
"""

import itertools
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from av_triton import Settings
from benchmarks.traces.quality import Report, load, reliability, replay, workload_name

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BOUND = 0.01  # nats per label
METRICS = {"AUC": "auc", "log-loss": "log_loss", "ECE": "ece"}
LEFT = ("trace", "workload", "predictor", "")

DEFAULTS = Settings()

console = Console()


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    return table


def number(value: float) -> str:
    return "" if value != value else f"{value:.4f}"


def workload_table(reports: list[Report]) -> Table:
    table = new_table("By trace and workload", "trace", "workload", "labels", "accept", "predictor", *METRICS)
    for report in reports:
        for code in sorted(set(report.labels.workload.tolist())):
            inside = report.labels.workload == code
            observed = report.labels.observed[inside]
            shown = [report.replay.trace.name, workload_name(code), str(len(observed)), f"{observed.mean():.3f}"]
            for predictor, quality in report.quality(inside).items():
                values = [number(getattr(quality, field)) for field in METRICS.values()]
                table.add_row(*shown, predictor, *values, end_section=predictor == list(report.predictions)[-1])
                shown = [""] * len(shown)
    return table


def position_table(report: Report) -> Table:
    trace, fitted, labels = report.replay.trace, report.replay.coefficients, report.labels
    stratum = int(trace.greedy)
    masks = [labels.position == k for k in range(trace.features.shape[-1])]
    table = new_table(
        f"{trace.name} by draft position", "", "predictor", *(str(k + 1) for k in range(len(masks)))
    )  # fmt: skip
    table.add_row("labels", "", *(str(mask.sum()) for mask in masks))
    shares = [labels.observed[mask].mean() if mask.any() else float("nan") for mask in masks]
    table.add_row("accepted", "", *map(number, shares), end_section=True)
    qualities = [report.quality(mask) for mask in masks]
    for metric, field in METRICS.items():
        for predictor in report.predictions:
            values = [number(getattr(quality[predictor], field)) for quality in qualities]
            table.add_row(metric, predictor, *values, end_section=predictor == list(report.predictions)[-1])
    table.add_row("intercept", "online", *(f"{b:+.3f}" for b in fitted.intercepts[stratum]))
    table.add_row("", "offline", *(f"{b:+.3f}" for b in report.theta[1:]))
    table.caption = (
        f"{fitted.strata[stratum]} stratum, {fitted.refits} refits: "
        f"slope {fitted.slopes[stratum]:.3f} online, {report.theta[0]:.3f} offline"
    )
    return table


def cold_start_table(reports: list[Report]) -> Table:
    title = "Cold start: log-loss online, and in brackets above the offline fit"
    table = new_table(title, "from label", *(report.replay.trace.name for report in reports))
    curves = [report.cold_start() for report in reports]
    for spans in itertools.zip_longest(*curves):
        first = max(span[0] for span in spans if span)
        text = ["" if span is None else f"{span[1]:.3f} ({span[1] - span[2]:+.3f})" for span in spans]
        table.add_row(str(first), *text)
    return table


def picture(path: Path, reports: list[Report]) -> None:
    """Left: log-loss above the offline fit by labels seen. Then online and q_max against what was observed."""
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for report in reports:
        name = report.replay.trace.name
        curve = report.cold_start()
        middle = [max(2 * first, 250) / 1.5 for first, _, _ in curve]
        panels[0].plot(middle, [online - offline for _, online, offline in curve], marker=".", label=name)
        for panel, predictor in zip(panels[1:], ("online", "q_max"), strict=True):
            bins = list(reliability(report.predictions[predictor], report.labels.observed))
            panel.plot([b[0] for b in bins], [b[1] for b in bins], marker=".", linewidth=1, label=name)
    panels[0].axhline(BOUND, color="grey", linestyle="--", linewidth=1)
    panels[0].set(
        title="log-loss above the offline fit", xlabel="labels seen", ylabel="nats per label", xscale="log"
    )  # fmt: skip
    panels[0].legend(fontsize=7)
    for panel, predictor in zip(panels[1:], ("online estimator", "raw q_max"), strict=True):
        panel.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)
        panel.set(title=predictor, xlabel="predicted acceptance", ylabel="observed", aspect="equal")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of .npz traces.")] = Path(__file__).parent / "data",
    passes: Annotated[int, typer.Option(min=2, help="Passes over a trace; verdicts are redrawn from the second.")] = 50,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows per step; default: those recorded.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the redrawn verdicts.")] = 0,
    refit_interval: Annotated[int, typer.Option(min=1, help="Steps between refits.")] = DEFAULTS.refit_interval,
    damping: Annotated[float, typer.Option(min=0, help="Labels that earn half a step.")] = DEFAULTS.damping,
    output: Annotated[Path, typer.Option(help="The picture to write.")] = Path("build/traces.png"),
) -> None:
    """AUC, log-loss and ECE of the online estimator, an offline fit and raw q_max, on recorded acceptance traces.

    All but the cold start is over the last half of the passes. Exit status 1 where the online log-loss is more than
    .01 above that of the offline fit, 2 where a trace cannot be read.
    """
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        console.print(f"{folder} has no .npz traces: give a folder of them (benchmarks/traces/README.md)", style="red")
        raise typer.Exit(2)
    try:
        traces = [load(path) if rows is None else load(path).in_batches(rows) for path in paths]
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    settings = Settings(refit_interval=refit_interval, damping=damping)
    reports = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=passes * len(traces))
        for trace in traces:
            progress.update(task, description=trace.name)
            reports.append(Report.of(replay(trace, passes, seed, settings, lambda: progress.advance(task))))
    console.print(workload_table(reports))
    for report in reports:
        console.print(position_table(report))
    for first in range(0, len(reports), 4):
        console.print(cold_start_table(reports[first : first + 4]))
    picture(output, reports)
    console.print(f"picture: {output}", highlight=False)
    for report in reports:
        verdict, style = ("good", "green") if report.excess <= BOUND else ("MISSED", "red")
        line = f"{report.replay.trace.name}: online log-loss {report.excess:+.4f} against the offline fit"
        console.print(f"{line}, bound {BOUND}: {verdict}", soft_wrap=True, style=style, highlight=False)
    raise typer.Exit(int(any(report.excess > BOUND for report in reports)))


if __name__ == "__main__":
    typer.run(main)
