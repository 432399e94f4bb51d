"""Runs a scenario with ours and with the released peer's rule, and sums up what they lost."""

import msgspec
import numpy as np
import numpy.typing as npt

from av_triton import Settings
from benchmarks.online.arms import Arm, Ours, Peer, predictions
from benchmarks.online.scenarios import Scenario, Stream
from benchmarks.peers.adaptive_rule import REFIT_INTERVAL
from benchmarks.traces.quality import SMALLEST, log_losses

Floats = npt.NDArray[np.float64]

ARMS = ("ours", "peer", "ours at the peer's refit interval")
WINDOW = 20  # steps of one point of a curve


class Run(msgspec.Struct):
    """One scenario with one seed. Losses are sums over labelled drafts, one per arm.

    by_cluster: (cluster, labels, *losses), scored drafts. observed: losses by the drawn verdicts, scored drafts.
    curve: (labels seen before, labels, *losses) of every window of steps. ticks: labels seen where something changed.
    """

    by_cluster: list[list[float]]
    observed: list[float]
    curve: list[list[float]]
    ticks: list[int]


def arms(scenario: Scenario, requests: int, positions: int) -> list[Arm]:
    """As `ARMS`, the third where the scenario asks for it. The budget is fixed, or decided by each one's own planner
    where the scenario has a cost."""
    if scenario.cost is None:
        fixed = round(scenario.budget * requests * positions)
        settings = Settings(policy="fixed", fixed_budget=fixed)
        found: list[Arm] = [Ours(requests, positions, settings), Peer(requests, positions, fixed=fixed)]
        if scenario.same_interval:
            slow = msgspec.structs.replace(settings, refit_interval=REFIT_INTERVAL)
            found.append(Ours(requests, positions, slow))
        return found
    dense = scenario.cost.dense(requests, requests * (positions + 1))
    costs = dense.draft[requests] + dense.verify[requests:]
    return [Ours(requests, positions, Settings(), scenario.cost), Peer(requests, positions, costs)]


def expected_log_losses(p: Floats, alpha: Floats) -> Floats:
    """-alpha log p - (1 - alpha) log(1 - p), nats; p is kept 1e-7 from 0 and 1."""
    p = p.clip(SMALLEST, 1 - SMALLEST)
    return -alpha * np.log(p) - (1 - alpha) * np.log1p(-p)


def run(scenario: Scenario, stream: Stream) -> Run:
    steps = stream.steps
    requests, positions = steps[0].features.shape
    p = [predictions(arm, steps).astype(np.float64) for arm in arms(scenario, requests, positions)]
    accepted = np.stack([step.accepted() for step in steps])[..., None]
    k = np.arange(positions)
    labelled = k <= accepted
    alpha = np.stack([step.alpha for step in steps]).astype(np.float64)
    losses = [np.where(labelled, expected_log_losses(each, alpha), 0.0).sum(2) for each in p]
    labels = labelled.sum(2)

    scored = slice(stream.scored.start, stream.scored.stop)
    ids, place = np.unique(np.stack([step.cluster for step in steps[scored]]), return_inverse=True)
    sums = [np.bincount(place.ravel(), values[scored].ravel()) for values in (labels, *losses)]
    seen = np.concatenate(([0], np.cumsum(labels.sum(1))))
    starts = np.arange(0, len(steps), WINDOW)
    curve = [np.add.reduceat(values.sum(1), starts) for values in (labels, *losses)]
    verdicts = (k < accepted)[scored][labelled[scored]].astype(np.float64)
    observed = [float(log_losses(each[scored][labelled[scored]], verdicts).sum()) for each in p]
    return Run(
        by_cluster=np.stack([ids, *sums], 1).tolist(),
        observed=observed,
        curve=np.stack([seen[starts], *curve], 1).tolist(),
        ticks=[int(seen[tick]) for tick in stream.ticks],
    )
