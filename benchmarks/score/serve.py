"""What the head is worth in throughput: simulated serving with it and without, on prompts that nobody learned from.

    python -m benchmarks.score.serve [TRACE.npz ...] [--publish]

The server and its costs are those of benchmarks/serving/server.py. Ours learns from half of a trace's rows (24 of 48
prompts), with a head and exact labels or without either; then it serves the other half with what it has learned, and
learns no more: a recorded round comes up many times, and a head would know it by then.
"""

from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated

import matplotlib
import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks import results
from benchmarks.resume import Store
from benchmarks.serving.server import DEPLOYMENTS, Fixed, Server, settings_for, traffic
from benchmarks.serving.simulate import Ratio
from benchmarks.traces.quality import Trace, load
from benchmarks.traces.replay import new_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SOURCES = [
    Path(__file__),
    *(HERE.parent / each for each in ("online/arms.py", "serving/server.py", "traces/quality.py")),
]
REQUESTS = (4, 16, 64, 256)
LEARNED = 8000  # requests' steps to learn from, at the least, so that the head's gate can open
WIDTH = 120  # of the text in docs/results.md
ARMS = ("article's score", "with the head", "best fixed", "oracle")
COLUMNS = ("trace", "requests", "tokens/s", "head / article's score", "head / best fixed", "oracle / article's score")

console = Console(width=140, highlight=False)


def speeds(trace: Trace, requests: int, steps: int, seed: int) -> dict[str, float]:
    """Tokens per second over the second half's steps; which half is learned from changes with the seed."""
    learned, served = (trace.of_rows(slice(each, None, 2)) for each in (seed % 2, 1 - seed % 2))
    first = list(traffic(learned, requests, max(steps // 2, LEARNED // requests), seed))
    then = list(traffic(served, requests, steps, seed + 1000))
    server = Server(served, DEPLOYMENTS[0], requests, settings_for(trace))
    found = {}
    for name, head in zip(ARMS, (False, True), strict=False):
        arm = server.ours(head=head)
        server.serve(arm, first)
        arm.learns = False
        found[name] = server.serve(arm, then)
    found["best fixed"] = max(server.serve(Fixed(n), then) for n in range(1, server.positions + 1))
    found["oracle"] = server.oracle(then)[0]
    return found


def main(
    traces: Annotated[list[Path] | None, typer.Argument(help="Traces with hidden states; default: those here.")] = None,
    steps: Annotated[int, typer.Option(min=100, help="Steps that are served.")] = 200,
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each point.")] = 4,
    publish: Annotated[bool, typer.Option(help="Rewrite the section of docs/results.md.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the table (CSV) and the picture.")] = Path("build/score"),
) -> None:
    """Throughput with the head and without it, simulated; a stopped run goes on."""
    paths = traces or sorted((HERE / "data").glob("*.npz"))
    store = Store(output, [*paths, *SOURCES])
    rows, heights = [], {}
    jobs = [(path, requests) for path in paths for requests in REQUESTS]
    loaded: dict[Path, Trace] = {}
    for path, requests in track(jobs, "serving", console=console):
        if path not in loaded:
            loaded = {path: load(path)}
        runs = [
            store.get(
                f"{path.name}, {requests} requests, {steps} steps, seed {seed}",
                partial(speeds, loaded[path], requests, steps, seed),
            )
            for seed in range(seeds)
        ]
        base, head, fixed, oracle = (np.array([run[arm] for run in runs]) for arm in ARMS)
        ratios = [Ratio(head, base), Ratio(head, fixed), Ratio(oracle, base)]
        rows.append([path.stem, str(requests), f"{head.mean():,.0f}", *map(str, ratios)])
        heights[path.stem, requests] = ratios[0]
    table = new_table("Throughput on prompts that nobody learned from", *COLUMNS)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    output.mkdir(parents=True, exist_ok=True)
    (output / "serve.csv").write_text("\n".join(",".join(row) for row in [list(COLUMNS), *rows]) + "\n")
    picture(output / "serve.png", heights)
    if publish and not traces:
        text = (
            "The head with exact labels against the article's score, both learned on half of the prompts and then "
            f"serving the other half without learning: simulated at the step costs of `{DEPLOYMENTS[0].name}` "
            f"(`benchmarks/serving/server.py`), {seeds} runs, mean and 95 % interval. The oracle knows the true "
            "acceptance probabilities (a bound, not lossless)."
        )
        gains = [100 * (each.mean - 1) for each in heights.values()]
        more, less = (sum(sign * (each.mean - 1) > each.half for each in heights.values()) for sign in (1, -1))
        outcome = (
            f"With the head {min(gains):+.1f} to {max(gains):+.1f} % at {len(gains)} points: above the article's score "
            f"by more than the interval at {more}, below at {less}."
        )
        parts = [fill(text, WIDTH), fill(outcome, WIDTH), results.table(COLUMNS, rows).rstrip()]
        parts.append("![Throughput with the head](results-score-serving.png)")
        results.publish("score_serving", "The head in serving, simulated", "make report-score", "\n\n".join(parts))
        picture(results.PAGE.parent / "results-score-serving.png", heights)


def picture(path: Path, heights: dict[tuple[str, int], Ratio]) -> None:
    """Gain in per cent by requests, a line for each trace."""
    figure, panel = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name in dict.fromkeys(name for name, _ in heights):
        points = [(requests, ratio) for (trace, requests), ratio in heights.items() if trace == name]
        panel.errorbar(
            [requests for requests, _ in points],
            [100 * (ratio.mean - 1) for _, ratio in points],
            [100 * ratio.half for _, ratio in points],
            marker=".",
            capsize=3,
            label=name,
        )
    panel.axhline(0, color="grey", linewidth=0.8)
    panel.set(xscale="log", xlabel="requests", ylabel="throughput, % over the article's score")
    panel.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
