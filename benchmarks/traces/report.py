"""The estimator on acceptance traces: which feature, by position, by workload, what a shared slope costs, calibration.

    python -m benchmarks.traces.report [DIR ...]

docs/results.md is written from the committed traces alone; every given folder is reported on its own.
"""

import csv
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import rich.box
import rich.table
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks import results
from benchmarks.intervals import Interval
from benchmarks.traces.features import (
    ESTIMATOR,
    FEWEST,
    FOLDS,
    RAW,
    RESAMPLES,
    Drafts,
    Fit,
    Group,
    Row,
    correlation_rows,
)  # fmt: skip

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DATA = Path(__file__).parent / "data"

console = Console(width=150, highlight=False)


@dataclass(frozen=True)
class Table:
    """name: of the CSV file. Cells are text, numbers or intervals; the first column says which traces."""

    name: str
    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[Row]
    split: bool = False
    """Shown as one table for each value of the first column, with the columns that are not empty there."""

    def parts(self) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """(value of the first column where split, columns, text of the rows)."""
        text = [[shown(cell) for cell in row] for row in self.rows]
        if not self.split:
            yield "", self.columns, text
            return
        for first, rows in itertools.groupby(text, lambda row: row[0]):
            filled = [column for column in zip(self.columns, *rows, strict=True) if any(column[1:])]
            columns, *lines = zip(*filled[1:], strict=True)
            yield first, columns, lines

    def print(self) -> None:
        for part, columns, rows in self.parts():
            title = f"{self.title}: {part}" if part else self.title
            table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
            for i, name in enumerate(columns):
                table.add_column(name, justify="right" if i else "left")
            for row in rows:
                table.add_row(*row)
            console.print(table)

    def markdown(self) -> str:
        lines = [f"### {self.title}\n", f"{self.note}\n"]
        for part, columns, rows in self.parts():
            lines += [f"#### {part}\n"] * bool(part) + [results.table(columns, rows)]
        return "\n".join(lines)

    def save(self, folder: Path) -> None:
        """As CSV; an interval becomes three columns."""
        ranged = [any(isinstance(row[i], Interval) for row in self.rows) for i in range(len(self.columns))]
        ends = [("", " low", " high") if three else ("",) for three in ranged]
        with (folder / f"{self.name}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(name + end for name, some in zip(self.columns, ends, strict=True) for end in some)
            for row in self.rows:
                cells: list[object] = []
                for cell, some in zip(row, ends, strict=True):
                    whole = [cell.value, cell.low, cell.high] if isinstance(cell, Interval) else [cell, "", ""]
                    cells += whole[: len(some)]
                writer.writerow(cells)


def shown(cell: object) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def features_table(groups: Sequence[Group], advance: Callable[[], object] = lambda: None) -> Table:
    rows = []
    for group in groups:
        rows += group.feature_rows()
        advance()
    note = (
        f"K + 1 parameters, fitted and judged on different prompts ({FOLDS} folds); raw q_max and the head as trained "
        "are taken as they are. Log-loss in nats, ECE over 15 bins of equal width."
    )
    columns = ("traces", "feature", "AUC", f"above {ESTIMATOR}", "log-loss", f"above {ESTIMATOR}", "ECE")
    return Table("features", "Features", note, columns, rows, split=True)


def positions_table(groups: Sequence[Group]) -> Table:
    note = f"{ESTIMATOR}, and the trained confidence head where the traces have one."
    columns = ("traces", "position", "labels", "accepted", ESTIMATOR, "head", f"head above {ESTIMATOR}")
    rows = [row for group in groups for row in group.position_rows()]
    return Table("positions", "AUC by draft position", note, columns, rows, split=True)


def coefficients_table(fits: Sequence[Fit]) -> Table:
    note = (
        "A fit of its own for each trace, and one for each pair and temperature. Entropy: mean over the drafts of "
        f"position 1, nats. Positions with fewer than {FEWEST} labels have no intercept here."
    )
    most = max(fit.drafts.positions for fit in fits)
    columns = ("traces", "workload", "labels", "entropy", "slope", *(f"b{k + 1}" for k in range(most)))
    rows = [(*row, *[""] * (len(columns) - len(row))) for row in (fit.row() for fit in fits)]
    return Table("coefficients", "Slope and intercepts by pair and workload", note, columns, rows)


def entropy_table(fits: Sequence[Fit]) -> Table:
    note = (
        "Pearson's correlation over workloads, between the two columns of the table above. The intervals are over the "
        "prompts, with the workloads as they are: other workloads may have another correlation."
    )
    columns = ("traces", "number", "correlation of b1 and entropy")
    return Table("entropy", "First intercept and draft entropy", note, columns, correlation_rows(fits))


def sharing_table(groups: Sequence[Group]) -> Table:
    note = "One slope for all positions (K + 1 parameters) against one for each (2 K), on held-out prompts."
    columns = (
        "traces",
        *(f"{name} {kind}" for name in ("AUC", "log-loss") for kind in ("shared", "own", "difference")),
    )
    return Table("sharing", "Cost of the shared slope", note, columns, [group.sharing_row() for group in groups])


def reliability_table(groups: Sequence[Group]) -> Table:
    columns = ("traces", "predictor", "labels", "predicted", "observed")
    rows = [row for group in groups for row in group.reliability_rows()]
    return Table("reliability", "Reliability", "Bins of equal width.", columns, rows)


def picture(path: Path, tables: dict[str, Table], fits: Sequence[Fit]) -> None:
    """Calibration of the estimator and of raw q_max, AUC by position (at T = 1), first intercepts against entropy."""
    names = list(dict.fromkeys(row[0] for row in tables["reliability"].rows))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    names = [name for name in names if name.endswith("T = 1")] or names
    figure, panels = plt.subplots(1, 4, figsize=(19, 4.6), layout="constrained")

    def draw(panel: plt.Axes, x: Sequence[float], y: Sequence[Interval], **style: object) -> None:
        ends = [[cell.value - cell.low for cell in y], [cell.high - cell.value for cell in y]]
        # The quantiles of resampled AUCs need not hold the value itself.
        panel.errorbar(x, [cell.value for cell in y], np.maximum(ends, 0), linewidth=1, capsize=2, **style)

    for panel, predictor in zip(panels[:2], (ESTIMATOR, RAW), strict=True):
        for name in names:
            rows = [row for row in tables["reliability"].rows if row[:2] == (name, predictor) and row[2] >= FEWEST]
            x, y = [row[3] for row in rows], [row[4] for row in rows]
            draw(panel, x, y, marker=".", label=name, color=colours[name])
        panel.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1)
        panel.set(title=f"calibration of {predictor}", xlabel="predicted acceptance", ylabel="observed", aspect="equal")
    for name in names:
        rows = [row for row in tables["positions"].rows if row[0] == name and row[1].isdigit() and row[2] >= FEWEST]
        for column, label, line in ((4, name, "-"), (5, f"{name}, head", "--")):
            some = [(int(row[1]), row[column]) for row in rows if row[column]]
            if some:
                draw(panels[2], *zip(*some, strict=True), ls=line, label=label, color=colours[name])
    panels[2].set(title=f"AUC of {ESTIMATOR} by position", xlabel="draft position", ylabel="AUC")
    for name, colour in colours.items():
        some = [fit for fit in fits if fit.drafts.group == name]
        x, y = [fit.entropy for fit in some], [fit.first_intercept for fit in some]
        draw(panels[3], x, y, ls="", marker="o", label=name, color=colour)
    panels[3].set(title="first intercept by trace", xlabel="mean entropy of the first draft, nats", ylabel="b1")
    for panel in (panels[0], *panels[2:]):
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read(folder: Path) -> list[list[Drafts]]:
    """The traces of a folder and its subfolders by pair and temperature; ValueError where there are none."""
    groups: dict[str, list[Drafts]] = {}
    for path in sorted(folder.rglob("*.npz")):
        drafts = Drafts.read(path)
        groups.setdefault(drafts.group, []).append(drafts)
    if not groups:
        raise ValueError(f"{folder} has no .npz traces: give a folder of them (benchmarks/traces/README.md)")
    for name, part in groups.items():
        prompts = len({number for drafts in part for number in drafts.cluster})
        if prompts < FOLDS:
            raise ValueError(f"{folder}: {name} has {prompts} prompts, {FOLDS} folds need as many; collect more")
    return list(groups.values())


def report(traces: list[list[Drafts]], title: str, out: Path) -> dict[str, Table]:
    """Prints the tables of traces by pair and temperature, and writes them and the picture to `out`."""
    groups, fits, joint = [], [], []
    with Progress(console=console) as progress:
        task = progress.add_task(title, total=2 * len(traces) + sum(map(len, traces)))

        def advance() -> None:
            progress.advance(task)

        for part in traces:
            groups.append(Group.of(Drafts.join(part)))
            advance()
            for drafts in part:
                fits.append(Fit.of(drafts, seed=len(fits)))
                advance()
            if len(part) > 1:
                joint.append(Fit.of(groups[-1].drafts, seed=len(fits)))
        tables = [coefficients_table([*fits, *joint]), entropy_table(fits)]
        tables += [make(groups) for make in (sharing_table, reliability_table, positions_table)]
        tables.append(features_table(groups, advance))
    out.mkdir(parents=True, exist_ok=True)
    for table in tables:
        table.save(out)
        if table.name != "reliability":
            table.print()
    found = {table.name: table for table in tables}
    picture(out / "estimator.png", found, fits)
    console.print(f"{out}: {', '.join(f'{name}.csv' for name in found)}, estimator.png\n")
    return found


def findings(tables: dict[str, Table]) -> str:
    """Where the estimator's feature or the shared slope is beaten: the interval of the difference excludes 0."""

    def places(table: str, column: int, sign: int) -> str:
        found: dict[str, list[str]] = {}
        for row in tables[table].rows:
            beaten = isinstance(row[column], Interval) and min(sign * row[column].low, sign * row[column].high) > 0
            if beaten and "not lossless" not in row[1]:
                found.setdefault(row[0], []).append(row[1])
        return "; ".join(f"{group} ({', '.join(names)})" for group, names in found.items()) or "none"

    own = ", ".join(row[0] for row in tables["sharing"].rows if row[6].low > 0) or "none"
    return "\n".join(
        [
            "Where the interval of the difference excludes 0 (on this side, as one in forty does by chance):\n",
            f"- another lossless feature ranks better than {ESTIMATOR}: {places('features', 3, 1)};",
            f"- another lossless feature has the lower log-loss: {places('features', 5, -1)};",
            f"- the head ranks better at a position: {places('positions', 6, 1)};",
            f"- a slope for each position has the lower log-loss: {own}.\n",
        ]
    )


def section(traces: list[list[Drafts]], tables: dict[str, Table]) -> str:
    """The text of the section in docs/results.md."""
    every = [drafts for part in traces for drafts in part]
    labels, prompts = sum(len(drafts.observed) for drafts in every), {c for drafts in every for c in drafts.cluster}
    at_one = [row for row in tables["positions"].rows if str(row[0]).endswith("T = 1")]
    shown = replace(tables["positions"], rows=at_one), *(tables[x] for x in ("coefficients", "entropy", "sharing"))
    return "\n".join(
        [
            f"{labels:,} labelled drafts of {len(every)} traces on {len(prompts)} prompts, those of "
            "`benchmarks/traces/data`; its README says how they were made and which pair is which. In brackets: 95 % "
            f"bootstrap intervals from {RESAMPLES} resamples of whole prompts; the folds are not fitted anew in them. "
            "ECE grows with noise, and a resample is noisier than the sample: its intervals reach too high.\n",
            "![Calibration, AUC by position, first intercepts](results-estimator.png)\n",
            findings(tables),
            *(table.markdown() for table in (tables["features"], *shown)),
        ]
    )


def main(
    folders: Annotated[list[Path] | None, typer.Argument(help="More folders of traces.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of CSV files and pictures.")] = Path("build/report-estimator"),
    page: Annotated[Path, typer.Option(help="The page whose section is rewritten.")] = results.PAGE,
) -> None:
    """Features, positions, workloads, slope and calibration of the committed traces, and of more folders of them."""
    try:
        traces = read(DATA)
        given = {folder: read(folder) for folder in folders or []}
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    tables = report(traces, "committed traces", out)
    results.publish("estimator", "Estimator", "make report-estimator", section(traces, tables), page)
    shutil.copy(out / "estimator.png", page.parent / "results-estimator.png")
    console.print(f"{page}: section Estimator\n")
    for folder, some in given.items():
        report(some, str(folder), out / "-".join(folder.resolve().parts[-2:]))


if __name__ == "__main__":
    typer.run(main)
