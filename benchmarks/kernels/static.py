"""What can be known of a GPU's work without one: launches per step, and what the compiler made of every kernel."""

from collections import Counter
from collections.abc import Iterator
from functools import partial

import msgspec
import torch
import triton

import av_triton as av
from av_triton import aot
from av_triton.ops.logit_max import launch_shape
from benchmarks.peers import confidence

VOCAB = 129_280


class Static(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled kernel. in_loop: instructions per logit of the loop over the vocabulary, None without such a loop.
    per_logit: upper bound over the whole program, which adds what comes before and after the loop."""

    name: str
    report: aot.Report
    violations: list[str]
    in_loop: float | None = None
    per_logit: float | None = None


def launches(rows: int = 64, positions: int = 7, steps: int = 20) -> dict[str, Counter[str]]:
    """Launches per step, counted: {"block drafter": {kernel: launches}, ...}."""
    counts: Counter[str] = Counter()

    def launched(name: str) -> None:
        counts[name] += 1

    found: dict[str, Counter[str]] = {}
    cost = av.CostTable(draft=[(1, 1.0)], verify=[(1, 1.0), (1024, 9.0)])
    slots, accepted = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    logits = torch.zeros(rows, positions, 1024, dtype=torch.bfloat16)
    with aot.stand_in(aot.StandInDriver("sm_90", launched)):
        for name, autoregressive in (("block drafter", False), ("autoregressive drafter", True)):
            settings = av.Settings(autoregressive=autoregressive)
            verifier = av.AdaptiveVerifier(rows, positions, cost=cost, settings=settings)
            verifier.reset(slots)
            counts.clear()
            for _ in range(steps):
                if autoregressive:
                    for k in range(positions):
                        verifier.score(logits[:, k], slots, position=k)
                else:
                    verifier.score(logits, slots)
                verifier.plan(slots)
                verifier.observe(slots, accepted)
            found[name] = Counter({kernel: n // steps for kernel, n in counts.items()})
        counts.clear()
        confidence.score_blocks(logits, torch.zeros(1), torch.zeros(positions), torch.ones(rows))
        found["published form: score alone"] = Counter(counts)
    return found


def compiled(target: str = "sm_90") -> Iterator[Static]:
    """Ours at one size each, then both forms of the score at 129,280 bfloat16 logits."""
    for work in aot.workloads():
        if work.quick:
            for case in aot.record(work.run, target):
                if case.name not in ("logit_max_kernel", "sample_kernel"):
                    report = aot.compile_case(case, work.name)
                    yield Static(name=work.name, report=report, violations=aot.check(report, case.limits()))
    yield from score(target)
    yield from published_score(target)


def _score_arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty(8, 7, VOCAB, dtype=torch.bfloat16), torch.empty(1), torch.empty(7), torch.empty(8)


def score(target: str) -> Iterator[Static]:
    """The score alone, its feature with the entropy, and the score with the argmax and with a drawn token."""
    logits, *others = _score_arguments()
    seeds = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    for name, run in (
        ("score, ours", partial(av.score_logits, logits, *others)),
        ("feature and entropy, ours", partial(av.logit_max_and_entropy, logits)),
        ("score and argmax, ours", partial(av.sample_and_score, logits, None)),
        ("score and draw, ours", partial(av.sample_and_score, logits, seeds)),
    ):
        (case,) = aot.record(run, target)
        report = aot.compile_case(case)
        total = None
        if report.per_logit is not None and case.name == "logit_max_kernel":
            _, chunk, block, warps = launch_shape(VOCAB, 2, target)
            lanes = warps * aot.TARGETS[target].warp_size
            body = report.per_logit * block / lanes
            total = (report.instructions + body * (chunk / block - 1)) / (chunk / lanes)
        violations = aot.check(report, case.limits())
        yield Static(name=name, report=report, violations=violations, in_loop=report.per_logit, per_logit=total)


def published_score(target: str) -> Iterator[Static]:
    for case in aot.record(partial(confidence.score_blocks, *_score_arguments()), target):
        report = aot.compile_case(case)
        logits = confidence.BLOCK / (confidence.WARPS * aot.TARGETS[target].warp_size)
        per = report.instructions / logits if "logits" in case.signature else None
        yield Static(name="score, published form", report=report, violations=[], per_logit=per)


def version() -> str:
    return f"triton {triton.__version__}, torch {torch.__version__}"
