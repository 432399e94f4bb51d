"""What a step costs the host: ours, SGLang's planner where it is installed, and the published formula in numpy.

    python -m benchmarks.kernels.host OUT.json        with any interpreter that has av_triton; SGLang's own to compare

Kernels are compiled for sm_90 under a stand-in driver and dropped, so what is timed is what a serving process's Python
does: checks, Triton's dispatch up to the driver call, and torch. "graph": the whole step was captured in the runtime's
own graph, and what is left to the host is to read the proposal, one pinned integer.
"""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

import av_triton as av
from av_triton.aot import StandInDriver, stand_in
from benchmarks.kernels.compare import Comparison, compare, in_turns
from benchmarks.peers.budget import budget as numpy_budget

SHAPES = ((64, 7), (256, 7), (1024, 7), (64, 16), (256, 16), (1024, 16))
VOCAB = 1024  # the host does not see it
ROUNDS, CALLS = 15, 10

EAGER, GRAPH = "eager: score, plan, observe, read", "graph: read"
NUMPY, SGLANG, SGLANG_ALL = "numpy budget", "SGLang budget", "SGLang budget and schedule"


class Host(msgspec.Struct, frozen=True):
    """`skipped`: why a peer is missing, or empty."""

    comparisons: list[Comparison]
    skipped: str


def staircase(rows: int, positions: int) -> list[tuple[int, float]]:
    """(tokens, milliseconds) of a target that is bound by memory first and by compute later: 40 steps."""
    most = rows * (positions + 1)
    return [(n, 10.0 + 20.0 * n / most) for n in np.unique(np.linspace(1, most, 40).astype(int)).tolist()]


def dense(steps: list[tuple[int, float]], rows: int, drafts: int) -> np.ndarray:
    """Cost of rows + n tokens, n = 0 .. drafts, float64: the last step at or below the count holds."""
    tokens, ms = (np.array(column) for column in zip(*steps, strict=True))
    return ms[np.searchsorted(tokens, rows + np.arange(drafts + 1), side="right") - 1]


class Step:
    """A decode step of a verifier as an overlapped runtime runs it."""

    def __init__(self, rows: int, positions: int) -> None:
        cost = av.CostTable(draft=[(1, 1.0)], verify=staircase(rows, positions))
        settings = av.Settings(lag=2, exploration=0.0, minimum_gain=0.01)
        self.verifier = av.AdaptiveVerifier(rows, positions, cost=cost, settings=settings, max_rows=rows)
        self.slots = torch.arange(rows, dtype=torch.int32)
        generator = torch.Generator().manual_seed(rows + positions)
        self.logits = 4 * torch.randn(rows, positions, VOCAB, generator=generator, dtype=torch.bfloat16)
        self.accepted = torch.zeros(rows, dtype=torch.int32)
        self.temperature = torch.ones(rows)
        self.verifier.reset(self.slots)

    def __call__(self) -> int:
        self.verifier.score(self.logits, self.slots, temperature=self.temperature)
        self.plan = self.verifier.plan(self.slots)
        self.verifier.observe(self.slots, self.accepted)
        return self.read()

    def read(self) -> int:
        return int(self.plan.proposal[0])


def check_verifier(rows: int, positions: int) -> str:
    """The verifier's proposal against the formula on the survivals that it stored; what is wrong, or nothing."""
    step = Step(rows, positions)
    planner = step.verifier.planner
    scores = step.verifier.score(step.logits, step.slots, temperature=step.temperature).numpy().copy()
    step.verifier.plan(step.slots)
    step.verifier.plan(step.slots)
    proposed = int(planner._out.proposal[0])
    table = av.CostTable(draft=[(1, 1.0)], verify=staircase(rows, positions)).dense(rows, rows * (positions + 1))
    expected = numpy_budget(scores, table.draft[rows] + table.verify[rows:])
    return "" if proposed == expected else f"the verifier proposes {proposed}, the formula {expected}"


def check_ops(confidence: torch.Tensor, cost: np.ndarray, budget: int, lengths: torch.Tensor | None) -> str:
    """A peer's budget and lengths against `choose_budget` and `segmented_topk`; what is wrong, or nothing."""
    rows, positions = confidence.shape
    drafts = torch.full((rows,), positions, dtype=torch.int32)
    survival = av.survival(confidence)
    expected = av.choose_budget(survival, drafts, torch.from_numpy(cost))
    if int(expected) != budget:
        return f"budget {budget}, ours {int(expected)}"
    if lengths is not None and not torch.equal(av.segmented_topk(survival, drafts, expected), lengths.to(torch.int32)):
        return "other lengths than ours"
    return ""


def measure(shapes: tuple[tuple[int, int], ...] = SHAPES, rounds: int = ROUNDS, calls: int = CALLS) -> Host:
    torch.set_num_threads(1)
    try:
        from benchmarks.peers.sglang import SGLangPlanner, verify_lengths
    except ImportError as error:
        planner, skipped = None, f"SGLang's planner is not compared: {error}"
    else:
        planner, skipped = SGLangPlanner, ""
    comparisons: list[Comparison] = []
    for rows, positions in shapes:
        confidence = torch.rand(rows, positions, generator=torch.Generator().manual_seed(1))
        steps = staircase(rows, positions)
        cost = dense(steps, rows, rows * positions)
        wrong = {EAGER: check_verifier(rows, positions)}
        wrong[GRAPH] = wrong[EAGER]
        wrong[NUMPY] = check_ops(confidence, cost, numpy_budget(confidence.numpy(), cost), None)
        arms: dict[str, Callable[[], object]] = {NUMPY: partial(numpy_budget, confidence.numpy(), cost)}
        if planner is not None:
            peer = planner(confidence, steps)
            wrong[SGLANG] = check_ops(confidence, cost, peer.budget(), verify_lengths(confidence, peer.budget()) - 1)
            wrong[SGLANG_ALL] = wrong[SGLANG]
            arms[SGLANG] = peer.budget
            arms[SGLANG_ALL] = lambda peer=peer: peer.schedule(peer.budget())
        with stand_in(StandInDriver("sm_90")):
            step = Step(rows, positions)
            step()
            samples = in_turns({EAGER: step, GRAPH: step.read, **arms}, rounds, calls)
        pairs = [(ours, peer) for peer in arms for ours in (GRAPH, EAGER)]
        comparisons += compare("host", f"{rows} x {positions}", samples, pairs, wrong)
    return Host(comparisons, skipped)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = measure()
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(result))
