"""What every way to verify would serve at large deployments' step costs, replayed on acceptance traces.

    python -m benchmarks.serving.simulate [TRACE.npz ...] [--steps 400] [--seeds 3] [--quick] [--publish]

The server, its costs and what counts as served are in server.py. Throughput is over the last two thirds of the steps,
for the arms that learn start cold. Arms: every fixed length, and not drafting at all (plain); ours; ours with the
coefficients of an offline fit of the same trace; the released peer's rule (benchmarks/peers/adaptive_rule.py); the
oracle, which knows the true acceptance probabilities of the current step (a bound, not lossless).

Where ours is below the best fixed length by more than the interval, it runs again with parts of it changed, to say why.
"""

from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Annotated

import matplotlib
import typer
from rich.console import Console
from rich.progress import Progress
from scipy import stats

from benchmarks import results
from benchmarks.resume import Store
from benchmarks.serving.server import DEPLOYMENTS, Floats, Server, settings_for
from benchmarks.serving.simulation import VARIANTS, Simulation, Speeds, place_of
from benchmarks.traces.replay import new_table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parents[1]
TRACES = [HERE / "traces/data/A_gsm8k_T1.npz", HERE / "traces/data/B_humaneval_T1.npz"]
# What the stored results depend on.
SOURCES = [
    *(HERE / "serving/simulation.py", HERE / "serving/server.py", HERE / "online/arms.py", HERE / "traces/quality.py"),
    *(HERE / "peers/adaptive_rule.py", HERE / "peers/budget.py"),
]
USUAL = {"steps": 400, "seeds": 3, "most": 512, "variants": True}
CONCURRENCY = ((1, 4, 16, 64, 256, 512), (1, 16, 64, 256))  # by deployment
VARIED = 16  # requests at which settings are varied
PARITY = 0.98  # of the throughput with the offline fit
WIDTH = 120  # of the text in docs/results.md

console = Console()
if not console.is_terminal:
    console = Console(width=150)


class Ratio:
    """Mean of the ratios of two throughputs, and half the width of its 95 % interval over seeds (Student's t)."""

    def __init__(self, above: Floats, below: Floats) -> None:
        values = above / below
        self.mean = float(values.mean())
        self.half = float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))

    def __str__(self) -> str:
        return f"{100 * (self.mean - 1):+.1f} ± {100 * self.half:.1f} %"


def best_fixed(speeds: Speeds) -> str:
    return max((name for name in speeds if name.startswith("fixed")), key=lambda name: float(speeds[name].mean()))


CAUSES = ("exploration 0",)  # of VARIANTS
AGAINST = ("best fixed", "fixed K", "plain", "offline fit", "peer", "oracle")
Found = list[tuple[Server, Speeds]]


def compared(server: Server, speeds: Speeds) -> list[str]:
    """Ours against each of `AGAINST`."""
    best = best_fixed(speeds)
    fixed = {"best fixed": best, "fixed K": f"fixed {server.positions}"}
    ratios = [str(Ratio(speeds["ours"], speeds[fixed.get(name, name)])) for name in AGAINST]
    return [str(server.requests), f"{speeds['ours'].mean():,.0f}", best.removeprefix("fixed "), *ratios]


COLUMNS = ("requests", "tokens/s", "best K", *(f"ours / {name}" for name in AGAINST))


def below(speeds: Speeds, other: str) -> bool:
    """Ours is below the other by more than the interval."""
    ratio = Ratio(speeds["ours"], speeds[other])
    return ratio.mean + ratio.half < 1 - 1e-6


def behind(found: Found) -> Found:
    """The points at which ours is below the best fixed length."""
    return [(server, speeds) for server, speeds in found if below(speeds, best_fixed(speeds))]


def causes(simulation: Simulation, server: Server, speeds: Speeds, tick: Callable[[], object]) -> list[str]:
    """Arms against the best fixed length, from ours to what the true probabilities would give."""
    best = speeds[best_fixed(speeds)]
    changes = [str(Ratio(simulation.varied(server, name, True, tick), best)) for name in CAUSES]
    shown = [str(Ratio(speeds[name], best)) for name in ("ours", "offline fit")]
    bounds = [str(Ratio(speeds[name], best)) for name in ("oracle step by step", "oracle")]
    return [server.trace.name, server.deployment.name, str(server.requests), *shown, *changes, *bounds]


CAUSE_COLUMNS = (
    "trace", "deployment", "requests", "ours", "offline fit", *(f"offline fit, {name}" for name in CAUSES),
    "oracle step by step", "oracle",
)  # fmt: skip


def csv(found: Found) -> str:
    lines = ["trace,deployment,requests,arm,seed,tokens_per_second"]
    for server, speeds in found:
        point = f"{server.trace.name},{server.deployment.name},{server.requests}"
        for name, values in speeds.items():
            lines += [f"{point},{name},{seed},{value:.2f}" for seed, value in enumerate(values)]
    return "\n".join(lines) + "\n"


def picture(path: Path, found: Found) -> None:
    """Throughput over that of the best fixed length, by concurrency."""
    names = list(dict.fromkeys(server.trace.name for server, _ in found))
    places = list(dict.fromkeys(server.deployment.name for server, _ in found))
    figure, panels = plt.subplots(
        len(places), len(names), figsize=(5 * len(names), 3.6 * len(places)), layout="constrained", squeeze=False
    )
    for line, place in zip(panels, places, strict=True):
        for panel, name in zip(line, names, strict=True):
            points = [each for each in found if (each[0].deployment.name, each[0].trace.name) == (place, name)]
            positions = points[0][0].positions
            fixed = [f"fixed {n}" for n in sorted({1, 3, positions}) if n <= positions]
            for arm in (*fixed, "plain", "peer", "offline fit", "ours", "oracle"):
                heights = [speeds[arm].mean() / speeds[best_fixed(speeds)].mean() for _, speeds in points]
                style = {"ours": "-", "oracle": ":"}.get(arm, "--")
                panel.plot([server.requests for server, _ in points], heights, style, marker=".", label=arm)
            panel.axhline(1, color="grey", linewidth=0.8)
            panel.set(title=f"{name}, {place}", xscale="log", xlabel="requests", ylabel="× best fixed length")
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def outcome(found: Found, seeds: int) -> str:
    """Whether what has to hold does."""
    parity = [(server, Ratio(speeds["ours"], speeds["offline fit"])) for server, speeds in found]
    fixed = [Ratio(speeds["ours"], speeds[best_fixed(speeds)]).mean for _, speeds in found]
    unsure = [place_of(server) for server, ratio in parity if ratio.mean - ratio.half < PARITY]
    short = [place_of(server) for server, _ in behind(found)]
    means = [ratio.mean for _, ratio in parity]

    def named(points: list[str]) -> str:
        return f"{len(points)} of them" + (f" ({'; '.join(points)})" if points else "")

    return (
        f"{len(found)} points, {seeds} seeds. Against the same planner with the offline fit ours serves "
        f"{100 * min(means) - 100:+.1f} to {100 * max(means) - 100:+.1f} %, and the interval reaches below "
        f"{100 * PARITY - 100:.0f} % at {named(unsure)}; against the best fixed length, not known beforehand, "
        f"{100 * min(fixed) - 100:+.1f} to {100 * max(fixed) - 100:+.1f} %, below it by more than the interval at "
        f"{named(short)}."
    )


def body(found: Found, seeds: int, why: list[list[str]], varied: list[list[str]], names: list[str]) -> str:
    """The section of docs/results.md."""
    what = (
        "Recorded acceptance (`benchmarks/traces/data`: A an autoregressive drafter, which pays per position, "
        "B a block drafter) replayed against the step costs of two deployments "
        "(`benchmarks/serving/server.py`): the sizes that SGLang prints when it profiles its steps at "
        "start-up, and one whose verification costs the same up to 256 tokens. Simulated: no kernel, "
        "scheduler or trimming overhead is in it. Throughput, over the last two thirds of the steps, ours "
        "starting cold, relative to: the best fixed length of each point, the fixed length K = 7, plain decoding, "
        "the same planner with an offline fit of the trace, the rule of vLLM 0.33.0, and an oracle that knows "
        "the true acceptance probabilities (a bound, not lossless). Mean and 95 % interval over seeds."
    )
    parts = [fill(what, WIDTH), fill(outcome(found, seeds), WIDTH)]
    for name, place in dict.fromkeys((server.trace.name, server.deployment.name) for server, _ in found):
        rows = [
            compared(server, speeds)
            for server, speeds in found
            if (server.trace.name, server.deployment.name) == (name, place)
        ]
        parts += [f"{name}, {place}:", results.table(COLUMNS, rows)]
    parts.append("![Throughput over that of the best fixed length](results-simulation.png)")
    for name, text in (
        ("peer", "The peer, which does not explore, serves more at"),
        (
            "plain",
            "Plain decoding serves more than ours, which never switches a block drafter off, and one that pays per "
            "position only but for exploration, at",
        ),
    ):
        points = [place_of(server) for server, speeds in found if below(speeds, name)]
        if points:
            parts.append(fill(f"{text}: {'; '.join(points)}.", WIDTH))
    if why:
        text = (
            "Where ours is below the best fixed length, against that length. From left to right: ours and the "
            "offline fit differ by what learning costs; the next takes out what exploration costs. The two oracles "
            "differ by what the planner's criterion costs, tokens per millisecond of each step alone. What is left "
            "is the feature and the lag: budget and draft depth come from the scores of the step before, and a fixed "
            "length has no scores to be misled by."
        )
        parts += [fill(text, WIDTH), results.table(CAUSE_COLUMNS, why)]
    if varied:
        title = f"Ours with other settings, against ours; {DEPLOYMENTS[0].name}, {VARIED} requests:"
        parts += [title, results.table(("change", *names), varied)]
    return "\n\n".join(part.rstrip() for part in parts)


def main(
    traces: Annotated[list[Path], typer.Argument(help="Traces (.npz); default: one of each drafter.")] = TRACES,
    steps: Annotated[int, typer.Option(min=60, help="Steps of each run.")] = USUAL["steps"],
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each arm.")] = USUAL["seeds"],
    quick: Annotated[
        bool, typer.Option(help="2 seeds, 200 steps, 3 concurrencies, 1 deployment, no variants.")
    ] = False,
    most: Annotated[int, typer.Option(min=1, help="Only points of up to so many requests.")] = USUAL["most"],
    variants: Annotated[bool, typer.Option(help="Other settings and misjudged costs, too.")] = USUAL["variants"],
    publish: Annotated[
        bool, typer.Option(help="Rewrite the section of docs/results.md; needs a full run on the default traces.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder of the table (CSV) and the picture.")] = Path("build/simulate"),
) -> None:
    """Throughput of every way to verify, simulated on recorded acceptance at large deployments' step costs. Goes on
    where a stopped run of the same sources was."""
    missing = [str(path) for path in traces if not path.is_file()]
    if missing:
        console.print(
            f"no such trace: {', '.join(missing)}; give .npz files (benchmarks/traces/README.md)", style="red"
        )
        raise typer.Exit(2)
    points = [
        (where, requests)
        for where, levels in zip(DEPLOYMENTS, CONCURRENCY, strict=True)
        for requests in levels
        if requests <= most
    ]
    if quick:
        steps, seeds, points = 200, 2, [(DEPLOYMENTS[0], requests) for requests in (1, 16, 256)]
    try:
        simulation = Simulation(Store(output, [*traces, *SOURCES]), traces, steps, seeds)
        settings = [settings_for(trace) for trace in simulation.traces]
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    servers = [
        Server(trace, where, requests, each)
        for trace, each in zip(simulation.traces, settings, strict=True)
        for where, requests in points
    ]
    found: Found = []
    why: list[list[str]] = []
    varied: list[list[str]] = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(servers) * seeds)

        def tick() -> None:
            progress.advance(task)

        for server in servers:
            progress.update(task, description=place_of(server))
            found.append((server, simulation.speeds(server, tick)))
        if not quick:
            short = behind(found)
            bases = [each for each in servers if each.requests == VARIED and each.deployment is DEPLOYMENTS[0]]
            progress.update(
                task, description="variants",
                total=seeds * (len(servers) + len(short) * len(CAUSES) + variants * len(bases) * len(VARIANTS)),
            )  # fmt: skip
            why = [causes(simulation, *each, tick) for each in short]
            plain = [next(speeds["ours"] for each, speeds in found if each is base) for base in bases]
            for name in VARIANTS if variants and bases else ():
                ratios = [
                    Ratio(simulation.varied(base, name, False, tick), before)
                    for base, before in zip(bases, plain, strict=True)
                ]
                varied.append([name, *map(str, ratios)])
    for name, place in dict.fromkeys((server.trace.name, server.deployment.name) for server, _ in found):
        table = new_table(f"{name}, {place}", *COLUMNS)
        for server, speeds in found:
            if (server.trace.name, server.deployment.name) == (name, place):
                table.add_row(*compared(server, speeds))
        console.print(table)
    names = [trace.name for trace in simulation.traces]
    for title, columns, rows in (
        ("Below the best fixed length, against it", CAUSE_COLUMNS, why),
        (f"Ours with other settings, against ours, {VARIED} requests", ("change", *names), varied),
    ):
        if rows:
            table = new_table(title, *columns)
            for each in rows:
                table.add_row(*each)
            console.print(table)
    console.print(outcome(found, seeds), highlight=False)
    (output / "simulate.csv").write_text(csv(found))
    picture(output / "simulate.png", found)
    console.print(f"written: {output / 'simulate.csv'}, {output / 'simulate.png'}", highlight=False)
    if publish and traces == TRACES and not quick:
        given = {"steps": steps, "seeds": seeds, "most": most, "variants": variants}
        command = results.command("simulate", USUAL, given)
        results.publish("simulation", "At scale, simulated", command, body(found, seeds, why, varied, names))
        picture(results.PAGE.parent / "results-simulation.png", found)
    elif publish:
        console.print("docs/results.md is left as it is: it has a full run on the default traces")


if __name__ == "__main__":
    typer.run(main)
