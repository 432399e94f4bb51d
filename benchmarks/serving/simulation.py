"""What every arm serves at a point of the simulation, computed once and kept: nothing here says how it is shown."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.online.arms import Step
from benchmarks.resume import Store
from benchmarks.serving.server import Fixed, Floats, Server, misjudged, traffic
from benchmarks.traces.quality import Report, Trace, load, replay

Speeds = dict[str, Floats]  # tokens per second by arm, one per seed
Change = Callable[[Server], Server]


def changed(**settings: object) -> Change:
    return lambda base: replace(base, settings=msgspec.structs.replace(base.settings, **settings))


def believing(factor: float) -> Change:
    return lambda base: replace(base, planned=misjudged(base.deployment.table, factor))


VARIANTS: dict[str, Change] = {
    "exploration 0": changed(exploration=0.0),
    "exploration .04": changed(exploration=0.04),
    "minimum gain .04": changed(minimum_gain=0.04),
    "a refit every 8 steps": changed(refit_interval=8),
    "a refit every 128 steps": changed(refit_interval=128),
    "the budget of two steps before": changed(lag=2),
    "costs rise half as steeply as believed": believing(2.0),
    "costs rise twice as steeply as believed": believing(0.5),
}


def place_of(server: Server) -> str:
    return f"{server.trace.name}, {server.deployment.name}, {server.requests} requests"


class Simulation:
    """Throughputs by (trace, deployment, requests, seed), computed once and kept in the store."""

    def __init__(self, store: Store, paths: list[Path], steps: int, seeds: int) -> None:
        self.store, self.steps, self.seeds = store, steps, seeds
        self.traces = [load(path) for path in paths]
        names = [trace.name for trace in self.traces]
        if len(set(names)) < len(names):
            raise ValueError(f"traces of equal names, {', '.join(names)}: results are kept by name; rename one")
        self.theta = {t.name: np.array(store.get(f"fit {t.name}", lambda t=t: offline(t))) for t in self.traces}  # type: ignore[misc]

    def cell(
        self,
        server: Server,
        name: str,
        run: Callable[[list[Step], int], dict[str, float]],
        tick: Callable[[], object],
    ) -> Speeds:
        """`run` on the stream of every seed; it gets the steps and the first that counts."""
        found = []
        for seed in range(self.seeds):
            key = f"{name}: {place_of(server)}, {self.steps} steps, seed {seed}"

            def make(seed: int = seed) -> dict[str, float]:
                steps = list(traffic(server.trace, server.requests, self.steps, seed))
                return run(steps, self.steps // 3)

            found.append(self.store.get(key, make))
            tick()
        return {arm: np.array([each[arm] for each in found]) for arm in found[0]}

    def speeds(self, server: Server, tick: Callable[[], object]) -> Speeds:
        """Of all arms."""

        def run(steps: list[Step], first: int) -> dict[str, float]:
            most, stepwise = server.oracle(steps[first:])
            served = {f"fixed {n}": server.serve(Fixed(n), steps, first) for n in range(1, server.positions + 1)}
            return served | {
                "plain": server.serve(Fixed(0), steps, first),
                "ours": server.serve(server.ours(), steps, first),
                "offline fit": server.serve(server.ours(self.theta[server.trace.name]), steps, first),
                "peer": server.serve(server.peer(), steps, first),
                "oracle": most,
                "oracle step by step": stepwise,
            }

        return self.cell(server, "arms", run, tick)

    def varied(self, server: Server, name: str, offline: bool, tick: Callable[[], object]) -> Floats:
        """Of ours after a change, learning or with the offline fit."""
        other = VARIANTS[name](server)
        theta = self.theta[server.trace.name] if offline else None

        def run(steps: list[Step], first: int) -> dict[str, float]:
            return {"ours": other.serve(other.ours(theta), steps, first)}

        return self.cell(server, f"{name}{', offline fit' if offline else ''}", run, tick)["ours"]


def offline(trace: Trace) -> list[float]:
    """Slope and intercepts of least log-loss, for the trace's own stratum and positions."""
    return Report.of(replay(trace, 20)).theta.tolist()
