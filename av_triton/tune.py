"""`av-triton bench`: which launch parameters the kernels over logits want on this GPU, written as a launch table.

Candidates are tried on rows of real vocabularies, cold in L2, each checked against its torch reference first. The one
with the smallest sum of log times over the shapes wins. Without a GPU nothing can be timed: the candidates are compiled
for a target, their registers and spills are shown, and no table is written.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import rich.box
import rich.console
import rich.progress
import rich.table
import torch
import triton
import typer

import av_triton as av
from av_triton import aot
from av_triton.backend import architecture, use_triton
from av_triton.files import write_atomic
from av_triton.launches import OTHERS, TABLE, Launches, LogitMaxLaunch, SampleLaunch, read, trial
from av_triton.ops.sample import sample_and_score_reference

VOCABULARIES = (32_000, 129_280, 151_936)
ROWS = (7, 64 * 7, 256 * 7)
CHECKED = 4  # rows

app = typer.Typer(add_completion=False)
console = rich.console.Console(width=120, highlight=False)


Reference = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Candidate(msgspec.Struct, frozen=True):
    """An entry in which one kernel's parameters are tried."""

    kernel: str  # field of Launches
    entry: Launches

    @property
    def parameters(self) -> dict[str, int]:
        return msgspec.structs.asdict(getattr(self.entry, self.kernel))

    def call(self, logits: torch.Tensor, seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is timed: the drawn tokens, or for `logit_max` the argmax, with feature and log-normaliser."""
        with trial(self.entry):
            return av.sample_and_score(logits, seeds if self.kernel == "sample" else None)


def candidates(now: Launches) -> list[Candidate]:
    """Those of each kernel, what is in force first."""
    found = [Candidate("logit_max", now)]
    for block_bytes, logits, warps in itertools.product((4096, 8192, 16384), (8192, 16384, 32768), (4, 8, 16)):
        tried = LogitMaxLaunch(block_bytes=block_bytes, logits=logits, warps=warps)
        found.append(Candidate("logit_max", msgspec.structs.replace(now, logit_max=tried)))
    found.append(Candidate("sample", now))
    for logits, warps in itertools.product((8192, 16384, 32768), (4, 8, 16)):
        found.append(Candidate("sample", msgspec.structs.replace(now, sample=SampleLaunch(logits=logits, warps=warps))))
    return list(dict.fromkeys(found))


def wrong(candidate: Candidate, logits: torch.Tensor, seeds: torch.Tensor, expected: Reference) -> str:
    """What a candidate gets wrong, in words; empty if nothing."""
    token, feature, normaliser = candidate.call(logits[:CHECKED], seeds[:CHECKED])
    if not torch.equal(token.cpu(), expected[0]):
        return f"tokens {token.tolist()}, should be {expected[0].tolist()}"
    pairs = zip((feature, normaliser), expected[1:], strict=True)
    worst = float(torch.cat([(a.cpu() - b).abs() for a, b in pairs]).max())  # NaN if any is
    return "" if worst < 1e-4 else f"off by {worst:.2g}"


def on_gpu(call: Callable[[], object]) -> float:
    """Median milliseconds, L2 cold; replayed from a graph, for a large row takes less time than the host needs."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return float(triton.testing.do_bench(graph.replay, warmup=5, rep=30, return_mode="median"))


def measure(
    tried: list[Candidate],
    device: str,
    milliseconds: Callable[[Callable[[], object]], float],
    shapes: list[tuple[int, int]],
) -> tuple[dict[Candidate, float], dict[Candidate, str]]:
    """(sum over the shapes of log milliseconds, what is wrong), by candidate."""
    score, faults = dict.fromkeys(tried, 0.0), dict.fromkeys(tried, "")
    for rows, vocab in rich.progress.track(shapes, "timing", console=console, transient=True):
        logits = torch.randn(rows, vocab, device=device).bfloat16()
        seeds = torch.arange(rows, device=device)
        first, drawn = logits[:CHECKED].cpu(), seeds[:CHECKED].cpu()
        expected = {
            "logit_max": sample_and_score_reference(first, None),
            "sample": sample_and_score_reference(first, drawn),
        }
        for candidate in tried:
            try:
                faults[candidate] = faults[candidate] or wrong(candidate, logits, seeds, expected[candidate.kernel])
                if not faults[candidate]:
                    score[candidate] += math.log(milliseconds(partial(candidate.call, logits, seeds)))
            except triton.runtime.errors.OutOfResources as error:
                faults[candidate] = str(error)
    return score, faults


def best(tried: list[Candidate], score: dict[Candidate, float], faults: dict[Candidate, str], kernel: str) -> Candidate:
    right = [each for each in tried if each.kernel == kernel and not faults[each]]
    if not right:
        raise RuntimeError(f"no candidate for {kernel} gave right results: {[faults[each] for each in tried][:3]}")
    return min(right, key=lambda each: score[each])


def write(table: dict[str, Launches], file: Path) -> None:
    write_atomic(file, msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n")


def show_compiled(target: str, now: Launches) -> None:
    out = rich.table.Table("kernel", "parameters", "registers", "spills", "per logit", box=rich.box.SIMPLE_HEAD)
    tried = candidates(now)
    logits, seeds = torch.empty(8, VOCABULARIES[1], dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64)
    for each in rich.progress.track(tried, "compiling", console=console, transient=True):
        (case,) = aot.record(partial(each.call, logits, seeds), target)
        report = aot.compile_case(case)
        per = "" if report.per_logit is None else f"{report.per_logit:.1f}"
        out.add_row(each.kernel, str(each.parameters), str(report.registers), str(report.spilled), per)
    console.print(out)


@app.command()
def bench(
    table: Annotated[Path, typer.Option(help="Launch table to write the entry into.")] = Path("launches.json"),
    target: Annotated[str, typer.Option(help="Without a GPU: compile the candidates for this one.")] = "sm_90",
) -> None:
    """Time the candidates on the GPU at hand and write the best into a launch table (AV_TRITON_LAUNCHES).

    A table that is not there begins as a copy of the shipped one.
    """
    try:
        entries = read(table if table.exists() else TABLE)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--table") from error
    if not torch.cuda.is_available():
        if target not in aot.TARGETS:
            raise typer.BadParameter(f"{target}: known are {', '.join(aot.TARGETS)}", param_hint="--target")
        show_compiled(target, entries.get(target, entries[OTHERS]))
        console.print(f"no GPU: nothing was timed and {table} was not written; compiled for {target}")
        return
    if not use_triton(torch.device("cuda")) or triton.knobs.runtime.interpret:
        console.print("the kernels do not run here: unset AV_TRITON_BACKEND and TRITON_INTERPRET")
        raise typer.Exit(1)
    gpu = architecture()
    now = entries.get(gpu, entries[OTHERS])
    write(entries, table)  # fails now rather than after all the timing
    tried = candidates(now)
    score, faults = measure(tried, "cuda", on_gpu, list(itertools.product(ROWS, VOCABULARIES)))
    chosen = {kernel: best(tried, score, faults, kernel) for kernel in Launches.__struct_fields__}
    out = rich.table.Table("kernel", "parameters", "relative time", "", box=rich.box.SIMPLE_HEAD)
    shapes = len(ROWS) * len(VOCABULARIES)
    for each in sorted(tried, key=lambda each: (each.kernel, score[each])):
        ratio = math.exp((score[each] - score[chosen[each.kernel]]) / shapes)
        now_in_force = "in force" if getattr(now, each.kernel) == getattr(each.entry, each.kernel) else ""
        out.add_row(each.kernel, str(each.parameters), faults[each] or f"{ratio:.3f}", now_in_force)
    console.print(out)
    entry = Launches(**{kernel: getattr(each.entry, kernel) for kernel, each in chosen.items()})
    write(entries | {gpu: entry}, table)
    console.print(f"{gpu}: written to {table}; put it in force with AV_TRITON_LAUNCHES={table}")
