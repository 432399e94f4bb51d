"""Timing grid of the ops against torch eager, `torch.compile` and the published form, on the device that there is.

Medians of device events, the L2 cache flushed before every call; on a CPU tiny shapes and the CPU's clock, so that the
same code is exercised. Every arm is checked against float64 first.
"""

import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

import av_triton as av
from av_triton.ops.logit_max import logit_max_reference
from av_triton.ops.score import acceptance_score_reference
from benchmarks.kernels.compare import Comparison, compare, in_turns
from benchmarks.peers import confidence

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


def score_grid(
    device: torch.device, shapes: tuple[tuple[int, int, int], ...], rounds: int, calls: int, deadline: float
) -> Device:
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
        ours = partial(av.score_logits, logits, slope, intercepts, temperature)
        few = slice(0, 8)
        t = temperature[few, None].expand(-1, positions).double()
        expected = acceptance_score_reference(logit_max_reference(logits[few].double(), t), slope, intercepts)
        arms: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
            "av_triton": ours,
            "torch eager": partial(confidence.score_torch, logits, slope, intercepts, temperature),
        }
        if on_gpu:
            arms["published form"] = partial(confidence.score_blocks, logits, slope, intercepts, temperature)
            arms["torch.compile"] = partial(
                torch.compile(confidence.score_torch, dynamic=False), logits, slope, intercepts, temperature
            )
        wrong = {name: off("the score", arm()[1][few], expected, 1e-4) for name, arm in arms.items()}
        samples = in_turns(arms, rounds, calls, timer(device))
        pairs = [("av_triton", name) for name in arms if name != "av_triton"]
        found += compare("score", shape, samples, pairs, wrong)
        del logits, ours, arms
    return Device(torch.cuda.get_device_name(device) if on_gpu else "CPU", found, skipped)


def topk_torch(survival: torch.Tensor, budget: int) -> torch.Tensor:
    """Drafts admitted per request, int32 [B], by torch's own top-k; ties as they fall."""
    flat = survival.flatten()
    won = torch.zeros_like(flat, dtype=torch.int32).index_fill_(0, flat.topk(budget).indices, 1)
    return won.view_as(survival).sum(1, dtype=torch.int32)


def plan_grid(device: torch.device, rounds: int, calls: int) -> list[Comparison]:
    """Segmented top-k against torch's, and `choose_budget` against the formula in float64 torch."""
    found: list[Comparison] = []
    for rows, positions in PLAN_SHAPES if device.type == "cuda" else PLAN_SHAPES[:1]:
        generator = torch.Generator(device).manual_seed(rows)
        survival = av.survival(torch.rand(rows, positions, generator=generator, device=device))
        drafts = torch.full((rows,), positions, dtype=torch.int32, device=device)
        many = rows * positions // 3
        budget = torch.full((1,), many, dtype=torch.int32, device=device)
        cost = torch.linspace(10, 30, rows * positions + 1, dtype=torch.float64, device=device)

        def formula(survival: torch.Tensor = survival, cost: torch.Tensor = cost, rows: int = rows) -> torch.Tensor:
            best_first = survival.double().flatten().sort(descending=True).values
            accepted = rows + torch.cat([best_first.new_zeros(1), best_first.cumsum(0)])
            return (accepted / cost).argmax().to(torch.int32)[None]

        arms: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
            "segmented_topk": (
                partial(av.segmented_topk, survival, drafts, budget),
                partial(topk_torch, survival, many),
            ),
            "choose_budget": (partial(av.choose_budget, survival, drafts, cost), formula),
        }
        for what, (ours, peer) in arms.items():
            wrong = {"torch eager": off("the result", peer(), ours(), 0)}
            samples = in_turns({"av_triton": ours, "torch eager": peer}, rounds, calls, timer(device))
            found += compare(what, f"{rows} x {positions}", samples, [("av_triton", "torch eager")], wrong)
    return found


def measure(device: torch.device, rounds: int, calls: int, seconds: float) -> Device:
    grid = score_grid(
        device, GPU_SHAPES if device.type == "cuda" else CPU_SHAPES, rounds, calls, time.monotonic() + seconds
    )
    return Device(grid.name, grid.comparisons + plan_grid(device, rounds, calls), grid.skipped)
