"""Records acceptance traces: the demo's model and drafters decode real prompts, and every draft is verified.

    python -m benchmarks.traces.collect [--out build/traces]

One .npz per drafter, workload and temperature (format: README.md). A trace that is there already is kept, so the same
command goes on where it was stopped. `settings.json` beside them says with which options they were made.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from av_triton import logit_max
from av_triton.demo.cli import MAX_PROMPT, encode, shipped
from av_triton.demo.drafters import BlockDrafter, Drafter, LayerSkipDrafter
from av_triton.demo.engine import Arm, Prompts
from av_triton.demo.model import Linear, Model, load_tokenizer, load_weights
from av_triton.demo.sampling import Sampler, Verdicts
from av_triton.files import write_atomic
from av_triton.ops.logit_max import argmax
from benchmarks.traces.quality import WORKLOADS

Columns = dict[str, npt.NDArray[Any]]

K = 7
TOP_P = 0.95
TEMPERATURES = (0.0, 0.7, 1.0)
SUMMARIES = Path(__file__).with_name("summaries.jsonl")
SOURCES = {"gsm8k": "gsm8k_test", "humaneval": "humaneval", "mt-bench": "mt_bench", "summaries": "summaries"}
SMALL = dict.fromkeys(("workload", "gen", "row", "pos", "is_top1", "accept", "observed"), np.uint8)
MEDIUM = dict.fromkeys(("prompt", "round", "step", "ctx"), np.uint16)
TYPES = SMALL | MEDIUM

console = Console()


def describe(
    draft_logits: Tensor, target_logits: Tensor, drafts: Tensor, temperature: float, law: Tensor | None
) -> dict[str, Tensor]:
    """What a trace says of each draft's distribution and of its acceptance, [B, K] each.

    draft_logits [B, K, V'], target_logits [B, K, V] with V' <= V (q is 0 for the tokens beyond V'), drafts [B, K].
    law [B, K, V]: p, the nucleus of softmax(target_logits / T); None at T = 0.

    q = softmax(draft_logits / T) is what was sampled from. At T = 0 the features are those of the softmax at 1, p is 1
    for the most likely token, and the draft is accepted if it is that.
    """
    scale = temperature or 1.0
    log_q = torch.log_softmax(draft_logits / scale, -1)
    q, chosen = log_q.exp(), drafts[..., None]
    log_q_sampled = log_q.gather(-1, chosen)[..., 0]
    q_sampled = log_q_sampled.exp()
    top = log_q.topk(2, -1).values
    f = logit_max(draft_logits, temperature)
    p_raw = torch.softmax(target_logits / scale, -1).gather(-1, chosen)[..., 0]
    if law is None:
        p_sampled = alpha = expected = (argmax(target_logits) == drafts).float()
    else:
        p_sampled = law.gather(-1, chosen)[..., 0]
        alpha = (p_sampled / q_sampled).clamp(max=1)
        expected = torch.minimum(law[..., : q.shape[-1]], q).sum(-1).clamp(max=1)
    return {
        "f": f,
        "q_max": f.sigmoid(),
        "q_sampled": q_sampled,
        "log_q_sampled": log_q_sampled,
        "entropy": torch.special.entr(q).sum(-1),
        "gap": top[..., 0] - top[..., 1],
        "is_top1": argmax(draft_logits) == drafts,
        "p_sampled": p_sampled,
        "p_raw": p_raw,
        "alpha": alpha,
        "exp_acc": expected,
    }


class Recorder(Sampler):
    """The demo's sampler; `columns` describes the drafts of the last step, [B, K] each."""

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        super().__init__(temperature, top_p, seed)
        self.drawn_from: list[Tensor] = []
        self.law: Tensor | None = None
        self.columns: dict[str, Tensor] = {}

    def target_law(self, logits: Tensor) -> Tensor:
        self.law = super().target_law(logits)
        return self.law

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        self.drawn_from.append(logits)
        return super().draw(logits)

    def verify(
        self,
        logits: Tensor,
        offsets: Tensor,
        drafts: Tensor,
        admitted: Tensor,
        draft_logits: Tensor,
        log_normalisers: Tensor,
    ) -> Verdicts:
        verdicts = super().verify(logits, offsets, drafts, admitted, draft_logits, log_normalisers)
        rows, depth = drafts.shape
        seen = torch.cat([x.view(rows, -1, x.shape[-1]) for x in self.drawn_from], 1)
        self.drawn_from.clear()

        def without_bonus(x: Tensor) -> Tensor:
            return x.view(rows, depth + 1, -1)[:, :-1]

        law = None if self.law is None else without_bonus(self.law)
        self.columns = describe(seen, without_bonus(logits), drafts, self.temperature, law)
        # The verdicts up to the first rejection are those of the decoding; the later ones are independent of them.
        place, last = torch.arange(depth), verdicts.accepted[:, None]
        hypothetical = torch.rand(drafts.shape, generator=self.generator) < self.columns["alpha"]
        self.columns["accept"] = (place < last) | (place > last) & hypothetical
        self.columns["observed"] = place <= last
        return verdicts


def record(
    model: Model,
    drafter: Drafter,
    prompts: Prompts,
    recorder: Recorder,
    labels: int,
    *,
    batch: int,
    max_new: int,
    depth: int = K,
    advance: Callable[[int], object] = lambda count: None,
) -> Columns:
    """Decodes until the trace holds `labels` labelled drafts; `advance` gets those of each step.

    Flat columns in the order step, row, position. `prompt` is the prompt's place in `prompts`.
    """
    arm = Arm("trace", model, prompts, recorder, batch, max_new, drafter=drafter, depth=depth)
    rounds = [0] * batch
    steps: list[Columns] = []
    seen = 0
    while seen < labels:
        running, lengths = list(arm.running), arm.lengths
        arm.step()
        of_rows = {
            "prompt": np.array(running) % len(prompts.ids),
            "gen": np.array(running) // len(prompts.ids),
            "row": np.arange(batch),
            "round": np.array(rounds),
            "step": np.full(batch, len(steps)),
            "ctx": lengths.numpy(),
        }
        columns = {name: values.repeat(depth) for name, values in of_rows.items()}
        columns["pos"] = np.tile(np.arange(1, depth + 1), batch)
        columns |= {name: values.flatten().numpy() for name, values in recorder.columns.items()}
        steps.append(columns)
        rounds = [r + 1 if now == was else 0 for r, now, was in zip(rounds, arm.running, running, strict=True)]
        added = int(columns["observed"].sum())
        advance(min(added, labels - seen))
        seen += added
    trace = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    return {name: values.astype(TYPES.get(name, np.float32)) for name, values in trace.items()}


def file_name(drafter: str, workload: str, temperature: float) -> str:
    return f"{drafter}_{workload}_T{temperature:g}.npz"


def save(path: Path, columns: Columns) -> None:
    """The trace as .npz, whole or not at all."""
    data = BytesIO()
    np.savez_compressed(data, **columns)
    write_atomic(path, data.getvalue())


def read_prompts(workload: str) -> tuple[list[int], list[str]]:
    """(numbers, texts) of a workload's prompts: the demo's, and the summaries of this folder."""
    lines = (SUMMARIES if workload == "summaries" else shipped("prompts", "prompts.jsonl")).read_text().splitlines()
    found = [entry for entry in map(json.loads, lines) if entry["source"] == SOURCES[workload]]
    numbers = [int(str(entry["id"]).rpartition("/")[2]) for entry in found]
    return numbers, [entry["prompt"] for entry in found]


def load_models(
    draft_vocab: int, length: int, track: Callable[[Sequence[Any]], Iterator[Any]]
) -> tuple[Model, list[Drafter]]:
    """The target and both drafters, for requests of up to `length` tokens."""
    model = Model(*load_weights("cpu", track), length)
    head = model.head if draft_vocab >= model.shape.vocab else Linear(model.embedding[:draft_vocab])
    return model, [LayerSkipDrafter(model, head), BlockDrafter.load(shipped("drafter"), model, head, length)]


def summary(folder: Path) -> Table:
    table = Table("trace", "rounds", "labelled", "accepted", "KB", title=str(folder), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    totals: dict[str, int] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            observed, accept, first = file["observed"] != 0, file["accept"], file["pos"] == 1
        labelled = int(observed.sum())
        drafter = path.stem.partition("_")[0]
        totals[drafter] = totals.get(drafter, 0) + labelled
        share = accept[observed].mean()
        table.add_row(path.stem, str(first.sum()), str(labelled), f"{share:.3f}", f"{path.stat().st_size / 1024:.0f}")
    table.caption = "labelled drafts: " + ", ".join(f"{name} {count:,}" for name, count in totals.items())
    return table


def main(
    out: Annotated[Path, typer.Option(help="Folder of the traces.")] = Path("build/traces"),
    labels: Annotated[int, typer.Option(min=1, help="Labelled drafts of each trace, at least.")] = 1700,
    batch: Annotated[int, typer.Option(min=1, max=256, help="Requests decoded together.")] = 32,
    max_new: Annotated[int, typer.Option(min=1, max=2048, help="New tokens per answer.")] = 160,
    draft_vocab: Annotated[int, typer.Option(min=256, help="The drafters propose token ids below this.")] = 49152,
    seed: Annotated[int, typer.Option(help="Seed of drafts and verdicts.")] = 0,
) -> None:
    """Traces of two drafters on four workloads at temperatures 0, .7 and 1 (target top-p .95), every draft verified."""
    out.mkdir(parents=True, exist_ok=True)
    settings = {"labels": labels, "batch": batch, "max_new": max_new, "draft_vocab": draft_vocab, "seed": seed}
    kept = out / "settings.json"
    if kept.exists() and (made := json.loads(kept.read_text())) != settings:
        console.print(f"{out} has traces made with {made}, not {settings}: give another --out", style="red")
        raise typer.Exit(2)
    kept.write_text(json.dumps(settings))
    bar = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with torch.inference_mode(), Progress(TextColumn("{task.description}"), *bar, console=console) as progress:

        def track(items: Sequence[Any]) -> Iterator[Any]:
            return iter(progress.track(items, description="loading"))

        task = progress.add_task("labelled drafts", total=2 * len(SOURCES) * len(TEMPERATURES) * labels)
        model, drafters = load_models(draft_vocab, MAX_PROMPT + max_new + K + 1, track)
        tokenizer = load_tokenizer()
        for workload in SOURCES:
            numbers, texts = read_prompts(workload)
            prompts = None
            for drafter in drafters:
                for temperature in TEMPERATURES:
                    path = out / file_name(drafter.name, workload, temperature)
                    progress.update(task, description=path.stem)
                    if path.exists():
                        progress.advance(task, labels)
                        continue
                    prompts = prompts or Prompts(
                        model, encode(tokenizer, texts), tokenizer.eos_token_id, [t for d in drafters for t in d.taps]
                    )
                    recorder = Recorder(temperature, TOP_P, zlib.crc32(f"{path.stem} {seed}".encode()))
                    columns = record(
                        model, drafter, prompts, recorder, labels,
                        batch=batch, max_new=max_new, advance=lambda count: progress.advance(task, count),
                    )  # fmt: skip
                    columns["prompt"] = np.array(numbers, np.uint16)[columns["prompt"]]
                    columns["workload"] = np.full_like(columns["row"], WORKLOADS.index(workload))
                    save(path, columns)
    console.print(summary(out))


if __name__ == "__main__":
    typer.run(main)
