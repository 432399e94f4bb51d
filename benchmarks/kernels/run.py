"""The benchmarks of the kernels: tables on standard output, CSV files and a picture in a folder.

    python -m benchmarks.kernels.run [--out DIR] [--sglang-python PYTHON]

Without a GPU it reports what a CPU can: launches, instructions, floors, and what a step costs the host. With one, also
the timing grid. Status 1 where a kernel violates its limits or a result is wrong; no speed-up is printed for that one.
"""

import csv
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import rich.box
import rich.console
import rich.table
import torch
import typer

from benchmarks.kernels import device, host, roofline, static
from benchmarks.kernels.compare import Comparison

app = typer.Typer(add_completion=False)
console = rich.console.Console(width=140, highlight=False)


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], file: Path, note: str = "") -> None:
    """One table on standard output and in `file`."""
    rows = [[str(cell) for cell in row] for row in rows]
    table = rich.table.Table(*columns, title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, caption=note)
    table.caption_justify = "left"
    for row in rows:
        table.add_row(*row)
    console.print(table)
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])


def show_launches(out: Path) -> None:
    found = static.launches()
    rows = [[name, kernel, n] for name, kernels in found.items() for kernel, n in kernels.items()]
    show("Launches per step, counted (64 x 7)", ("step of a", "kernel", "launches"), rows, out / "launches.csv")


def show_static(out: Path, target: str) -> list[static.Static]:
    found = list(static.compiled(target))

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    show(
        f"Compiled for {target} ({static.version()})",
        ("kernel", "size", "registers", "spills", "16 B loads", "instructions", "per logit", "program", "violations"),
        [
            [
                *(s.report.kernel, s.name, s.report.registers, s.report.spilled, s.report.wide_loads),
                *(s.report.instructions, cell(s.in_loop), cell(s.per_logit), "; ".join(s.violations) or "none"),
            ]
            for s in found
        ],
        out / "compiled.csv",
        "per logit: of the loop over the vocabulary. program: all instructions of the program over its logits, as if "
        "each ran; ours has code for a partial block and for a row's last program, which most programs skip.",
    )
    return found


def show_floors(out: Path, kernels: list[static.Static], amd: float | None) -> None:
    ours = next(s for s in kernels if s.name == "score, ours").in_loop
    peer = next(s.per_logit for s in kernels if s.name == "score, published form" and s.per_logit)
    rows = []
    for requests, positions in roofline.SHAPES:
        size = roofline.score_bytes(requests, positions)
        logits = requests * positions * static.VOCAB
        row = [f"{requests} x {positions}", f"{size / 1e6:.1f}", f"{logits * (ours or 0) / 1e6:.0f}"]
        for gpu in roofline.GPUS:
            per = amd if gpu.name.startswith("MI") else ours
            issue = "?" if per is None else f"{roofline.issue_us(gpu, logits, per):.1f}"
            row.append(f"{roofline.memory_us(gpu, size):.1f} / {issue}")
        row.append(f"{roofline.issue_us(roofline.GPUS[0], logits, peer):.1f}")
        rows.append(row)
    show(
        f"Floor of the score: memory / issue, microseconds ({static.VOCAB} bfloat16 logits)",
        ("requests x K", "MB", "million instr.", *(gpu.name for gpu in roofline.GPUS), "published form, issue, H200"),
        rows,
        out / "floors.csv",
        "memory: bytes over the vendor's bandwidth. issue: instructions per logit over one per lane and boost clock; "
        "ours: of the loop; the published form has no loop, so its whole program counts.",
    )


def show_comparisons(title: str, found: list[Comparison], file: Path, note: str) -> None:
    show(
        title,
        ("what", "shape", "ours", "us", "against", "us", "times as fast"),
        [[c.what, c.shape, c.ours, f"{c.ours_us:.1f}", c.peer, f"{c.peer_us:.1f}", c.shown()] for c in found],
        file,
        note,
    )


def measure_host(sglang_python: Path | None, out: Path) -> host.Host:
    """In a process of its own: SGLang pins its own versions, so its planner runs where it is installed."""
    file = out / "host.json"
    python = sys.executable if sglang_python is None else str(sglang_python)
    command = [python, "-m", "benchmarks.kernels.host", str(file)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        console.print(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        raise typer.Exit(1)
    return msgspec.json.decode(file.read_bytes(), type=host.Host)


def show_roofline_of(found: list[Comparison], out: Path, name: str) -> None:
    """Achieved against the floor, for a GPU whose bandwidth is known."""
    gpu = next((gpu for gpu in roofline.GPUS if gpu.name in name), None)
    scores = {c.shape: c for c in found if c.what == "score" and not c.wrong}
    if gpu is None or not scores:
        return
    rows = []
    for shape, c in scores.items():
        size = roofline.score_bytes(*map(int, shape.split(" x ")))
        floor = roofline.memory_us(gpu, size)
        rows.append([shape, f"{size / 1e6:.1f}", f"{floor:.1f}", f"{c.ours_us:.1f}", f"{floor / c.ours_us:.0%}"])
    columns = ("score", "MB", "floor us", "achieved us", "of the bandwidth")
    show(f"Roofline on {name}", columns, rows, out / "roofline.csv")


def draw(found: list[Comparison], file: Path) -> str:
    """Bars of the host's microseconds; why there is no picture, or nothing."""
    try:
        import matplotlib
    except ImportError as error:
        return f"no picture: {error}"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not found:
        return "no picture: nothing was measured"
    arms: dict[str, dict[str, float]] = {}
    for c in found:
        arms.setdefault(c.ours, {})[c.shape] = c.ours_us
        arms.setdefault(c.peer, {})[c.shape] = c.peer_us
    shapes = list(dict.fromkeys(c.shape for c in found))
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for i, (name, at) in enumerate(arms.items()):
        axes.bar([x + i * 0.8 / len(arms) for x in range(len(shapes))], [at[s] for s in shapes], 0.8 / len(arms))
        axes.containers[-1].set_label(name)
    axes.set(yscale="log", ylabel="microseconds of the host per step", xlabel="requests x draft positions")
    axes.set_xticks([x + 0.4 - 0.4 / len(arms) for x in range(len(shapes))], shapes)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=150)
    return ""


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder for CSV files and the picture.")] = Path("build/bench"),
    sglang_python: Annotated[Path | None, typer.Option(help="Interpreter with SGLang and av_triton.")] = None,
    target: Annotated[str, typer.Option(help="GPU to compile for.")] = "sm_90",
    rounds: Annotated[int, typer.Option(help="Rounds of the timing grid.")] = 5,
    calls: Annotated[int, typer.Option(help="Calls per arm and round of the timing grid.")] = 10,
    seconds: Annotated[float, typer.Option(help="After this long the timing grid starts no further shape.")] = 120.0,
) -> None:
    """Measure, and print what was found."""
    out.mkdir(parents=True, exist_ok=True)
    show_launches(out)
    kernels = show_static(out, target)
    amd = next((s.in_loop for s in static.score("gfx942")), None)
    show_floors(out, kernels, amd)

    on_host = measure_host(sglang_python, out)
    show_comparisons(
        "Host time of a step (thread CPU time, medians in turns; kernels dropped by a stand-in driver)",
        on_host.comparisons,
        out / "host.csv",
        "graph: the step is in the runtime's captured graph, and the host only reads the proposal.",
    )
    if on_host.skipped:
        console.print(on_host.skipped, "(see --sglang-python)")

    wrong = [c for c in on_host.comparisons if c.wrong]
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timed = device.measure(place, rounds, calls, seconds)
    if place.type == "cuda":
        show_comparisons(f"Device time on {timed.name}, L2 cold", timed.comparisons, out / "device.csv", "")
        show_roofline_of(timed.comparisons, out, timed.name)
    else:
        console.print(
            f"No GPU: the timing grid ran {len(timed.comparisons)} comparisons on the CPU at small shapes, for their "
            "correctness only; its times mean nothing and are not shown."
        )
    wrong += [c for c in timed.comparisons if c.wrong]
    for text in filter(None, (*timed.skipped, draw(on_host.comparisons, out / "host.png"))):
        console.print(text)
    violated = [s for s in kernels if s.violations]
    console.print(f"{len(wrong)} wrong results, {len(violated)} kernels beyond their limits; files in {out}")
    for c in wrong:
        console.print(f"wrong: {c.what} {c.shape}, {c.ours} against {c.peer}: {c.wrong}")
    if wrong or violated:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
