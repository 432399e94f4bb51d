"""Timing grid of the ops against torch eager, `torch.compile` and the published form, on the device that there is.

Medians of device events, the L2 cache flushed before every call; on a CPU tiny shapes and the CPU's clock, so that the
same code is exercised. Every arm is checked against float64 first.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

import av_triton as av
from av_triton.ops.logit_max import logit_max_reference
from av_triton.ops.sample import sample_and_score_reference
from av_triton.ops.score import acceptance_score_reference
from benchmarks.kernels.compare import Comparison, compare, in_turns
from benchmarks.peers import confidence, estimation

GPU_SHAPES = ((64, 7, 129_280), (256, 7, 129_280), (64, 16, 129_280), (256, 7, 32_000))
CPU_SHAPES = ((4, 3, 5_000),)
PLAN_SHAPES = ((64, 7), (256, 7), (1024, 7), (1024, 16))
FLUSH_BYTES = 512 << 20


class Device(msgspec.Struct, frozen=True):
    """`bytes` by shape of the score; `skipped`: what was left out and why."""

    name: str
    comparisons: list[Comparison]
    skipped: list[str]


def timer(device: torch.device) -> Callable[[Callable[[], object], int], float]:
    """microseconds per call, cold."""
    if device.type != "cuda":

        def on_cpu(call: Callable[[], object], calls: int) -> float:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls * 1e6

        return on_cpu
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def on_gpu(call: Callable[[], object], calls: int) -> float:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
        for begin, end in pairs:
            flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sorted(begin.elapsed_time(end) for begin, end in pairs)[calls // 2] * 1e3

    return on_gpu


def off(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """What is wrong with `found`, or nothing."""
    worst = float((found.double() - expected.double()).abs().max()) if found.numel() else 0.0
    return "" if worst <= tolerance else f"{name} is off by {worst:.2g}"


def in_torch(form: Callable[..., Any], device: torch.device, *arguments: Any) -> dict[str, Callable[[], Any]]:
    """Arms of a peer in torch: eager, and on a GPU compiled (on a CPU that takes longer than all that is measured)."""
    arms = {"torch eager": partial(form, *arguments)}
    if device.type == "cuda":
        arms["torch.compile"] = partial(torch.compile(form, dynamic=False), *arguments)
    return arms


def logits_grid(
    device: torch.device, shapes: tuple[tuple[int, int, int], ...], rounds: int, calls: int, deadline: float
) -> Device:
    """What reads the logits: the score, and the score with the drawn token."""
    found: list[Comparison] = []
    skipped: list[str] = []
    on_gpu = device.type == "cuda"
    for rows, positions, vocab in shapes:
        shape = f"{rows} x {positions} x {vocab}"
        if time.monotonic() > deadline:
            skipped.append(f"score {shape}: out of time")
            continue
        generator = torch.Generator(device).manual_seed(vocab + rows)
        logits = torch.randn(rows, positions, vocab, generator=generator, device=device).mul_(3).bfloat16()
        slope, intercepts = torch.full((1,), 0.5, device=device), torch.full((positions,), -0.2, device=device)
        temperature = torch.full((rows,), 0.8, device=device)
        arguments = logits, slope, intercepts, temperature
        few = slice(0, 8)
        t = temperature[few, None].expand(-1, positions)
        features = logit_max_reference(logits[few].double(), t.double())
        expected = acceptance_score_reference(features, slope, intercepts)
        arms: dict[str, Callable[[], Any]] = {
            "av_triton": partial(av.score_logits, *arguments),
            **in_torch(confidence.score_torch, device, *arguments),
        }
        if on_gpu:
            arms["published form"] = partial(confidence.score_blocks, *arguments)
        wrong = {name: off("the score", arm()[1][few], expected, 1e-4) for name, arm in arms.items()}
        found += _compare("score", shape, arms, wrong, rounds, calls, device)

        seeds = torch.randint(1 << 62, (rows, positions), generator=generator, device=device)
        per_draft = temperature[:, None].expand(-1, positions).contiguous()
        arms = {
            "av_triton": partial(av.sample_and_score, logits, seeds, per_draft),
            **in_torch(confidence.sample_torch, device, *arguments),
        }
        drawn = sample_and_score_reference(logits[few].cpu(), seeds[few].cpu(), t.cpu())[0]
        wrong = {name: off("the feature", arm()[1][few], features, 1e-3) for name, arm in arms.items()}
        wrong["av_triton"] = wrong["av_triton"] or off("the token", arms["av_triton"]()[0][few].cpu(), drawn, 0)
        found += _compare("sample and score", shape, arms, wrong, rounds, calls, device)
        del logits, arguments, arms
    return Device(torch.cuda.get_device_name(device) if on_gpu else "CPU", found, skipped)


def _compare(
    what: str,
    shape: str,
    arms: dict[str, Callable[[], Any]],
    wrong: dict[str, str],
    rounds: int,
    calls: int,
    device: torch.device,
) -> list[Comparison]:
    """The first arm against the others."""
    ours, *peers = arms
    return compare(what, shape, in_turns(arms, rounds, calls, timer(device)), [(ours, peer) for peer in peers], wrong)


def topk_torch(survival: torch.Tensor, budget: int) -> torch.Tensor:
    """Drafts admitted per request, int32 [B], by torch's own top-k; ties as they fall."""
    flat = survival.flatten()
    won = torch.zeros_like(flat, dtype=torch.int32).index_fill_(0, flat.topk(budget).indices, 1)
    return won.view_as(survival).sum(1, dtype=torch.int32)


def plan_grid(device: torch.device, rounds: int, calls: int) -> list[Comparison]:
    """Segmented top-k against torch's and SGLang's, and `choose_budget` against the formula in float64 torch."""
    try:
        from benchmarks.peers.sglang import verify_lengths
    except ImportError:
        verify_lengths = None
    found: list[Comparison] = []
    for rows, positions in PLAN_SHAPES if device.type == "cuda" else PLAN_SHAPES[:1]:
        generator = torch.Generator(device).manual_seed(rows)
        scores = torch.rand(rows, positions, generator=generator, device=device)
        survival = av.survival(scores)
        drafts = torch.full((rows,), positions, dtype=torch.int32, device=device)
        many = rows * positions // 3
        budget = torch.full((1,), many, dtype=torch.int32, device=device)
        cost = torch.linspace(10, 30, rows * positions + 1, dtype=torch.float64, device=device)

        def formula(survival: torch.Tensor = survival, cost: torch.Tensor = cost, rows: int = rows) -> torch.Tensor:
            best_first = survival.double().flatten().sort(descending=True).values
            accepted = rows + torch.cat([best_first.new_zeros(1), best_first.cumsum(0)])
            return (accepted / cost).argmax().to(torch.int32)[None]

        def from_scores(
            scores: torch.Tensor = scores, drafts: torch.Tensor = drafts, budget: torch.Tensor = budget
        ) -> torch.Tensor:
            return av.segmented_topk(av.survival(scores), drafts, budget)

        cases: dict[str, dict[str, Callable[[], Any]]] = {
            "segmented_topk": {
                "av_triton": partial(av.segmented_topk, survival, drafts, budget),
                "torch eager": partial(topk_torch, survival, many),
            },
            "choose_budget": {
                "av_triton": partial(av.choose_budget, survival, drafts, cost),
                **in_torch(formula, device),
            },
        }
        if verify_lengths is not None:
            cases["survival, top-k"] = {"av_triton": from_scores, "SGLang": partial(verify_lengths, scores, many)}
        for what, arms in cases.items():
            ours, *peers = arms
            # SGLang counts the anchor.
            wrong = {name: off("the result", arms[name]() - int(name == "SGLang"), arms[ours](), 0) for name in peers}
            found += _compare(what, f"{rows} x {positions}", arms, wrong, rounds, calls, device)
    return found


def learn_grid(device: torch.device, rounds: int, calls: int) -> list[Comparison]:
    """`accumulate` with `refit` against the dense Newton step in torch."""
    found: list[Comparison] = []
    as_peer = {"damping": 0.0, "max_slope_step": 1e9, "max_intercept_step": 1e9}
    for rows, positions in PLAN_SHAPES if device.type == "cuda" else PLAN_SHAPES[:1]:
        generator = torch.Generator(device).manual_seed(rows)
        features = torch.randn(rows, positions, generator=generator, device=device)
        verdicts = torch.rand(rows, positions, generator=generator, device=device) < features.sigmoid()
        accepted = verdicts.int().cumprod(1).sum(1, dtype=torch.int32)
        labels = features, accepted, torch.full_like(accepted, positions)
        slope, intercepts = torch.full((1,), 0.5, device=device), torch.full((positions,), -0.2, device=device)

        def ours(
            labels: tuple[torch.Tensor, ...] = labels,
            slope: torch.Tensor = slope,
            intercepts: torch.Tensor = intercepts,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return av.refit(av.accumulate(*labels, slope, intercepts[None]), slope, intercepts[None], **as_peer)

        arms: dict[str, Callable[[], Any]] = {
            "av_triton": ours,
            **in_torch(estimation.newton_step, device, *labels, slope, intercepts),
        }
        exact = estimation.newton_step(features.double(), *labels[1:], slope.double(), intercepts.double())
        expected = torch.cat([each.flatten() for each in exact])
        wrong = {
            name: off("the step", torch.cat([each.flatten() for each in arm()]), expected, 1e-3)
            for name, arm in arms.items()
        }
        found += _compare("accumulate, refit", f"{rows} x {positions}", arms, wrong, rounds, calls, device)
    return found


def measure(device: torch.device, rounds: int, calls: int, seconds: float) -> Device:
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    grid = logits_grid(device, shapes, rounds, calls, time.monotonic() + seconds)
    others = plan_grid(device, rounds, calls) + learn_grid(device, rounds, calls)
    return Device(grid.name, grid.comparisons + others, grid.skipped)
