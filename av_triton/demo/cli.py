"""`av-triton demo`: real prompts, a real model, and every way to verify next to each other in one run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from av_triton import GREEDY, SAMPLED, AdaptiveVerifier, Settings
from av_triton.demo import report
from av_triton.demo.drafters import BlockDrafter, Drafter, LayerSkipDrafter
from av_triton.demo.engine import Arm, Prompts, choose_threads, first_differences, measure_costs, run
from av_triton.demo.model import Linear, Model, load_tokenizer, load_weights
from av_triton.demo.sampling import Sampler

MAX_PROMPT = 256
# Two target logits this close may be ordered either way by fp32 sums of another batch shape.
TIE = 1e-3

app = typer.Typer(add_completion=False)
console = Console()


class Which(StrEnum):
    block = "block"
    layer_skip = "layer-skip"
    both = "both"


def shipped(*parts: str) -> Path:
    return Path(str(files("av_triton.demo").joinpath(*parts)))


def read_prompts(path: Path) -> list[str]:
    """Prompts from a file: JSON lines with a string `prompt`, or else plain text with one prompt a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: cannot be read ({error}); give a UTF-8 text or .jsonl file") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt: Any = line
        if path.suffix == ".jsonl":
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise typer.BadParameter(f"{path}, line {number}: not JSON ({error}); one object a line") from error
            prompt = record.get("prompt") if isinstance(record, dict) else None
            if not isinstance(prompt, str) or not prompt.strip():
                raise typer.BadParameter(f'{path}, line {number}: no "prompt"; write {{"prompt": "..."}}')
        prompts.append(prompt)
    if not prompts:
        raise typer.BadParameter(f"{path}: holds no prompt; write one a line")
    return prompts


def encode(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt in the chat template."""
    ids = []
    for number, prompt in enumerate(prompts, 1):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids.append(tokenizer(chat, add_special_tokens=False)["input_ids"])
        if len(ids[-1]) > MAX_PROMPT:
            raise typer.BadParameter(
                f"prompt {number} has {len(ids[-1])} tokens, at most {MAX_PROMPT} are supported; shorten it"
            )
    return ids


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip


def _tracked(items: Sequence[Any], description: str) -> Iterator[Any]:
    with _progress() as progress:
        yield from progress.track(items, description=description)


def decode(arms: Sequence[Arm], title: str, batch: int) -> None:
    """Runs the arms in turns, under a progress bar."""
    total = sum(len(arm.prompts.ids) * arm.max_new for arm in arms)
    with _progress() as progress:
        task = progress.add_task(title, total=total)
        run(arms, 4 * batch, lambda arm, n: progress.update(task, advance=n, description=f"{title}: {arm.name}"))
        progress.update(task, completed=total, description=title)


def check_greedy(model: Model, plain: Arm, arms: Sequence[Arm]) -> bool:
    """Whether every arm's output is plain decoding's, but for ties; prints each first difference."""
    equal = True
    for arm in arms:
        for prompt, position, gap in first_differences(model, plain, arm):
            tie = gap < TIE
            equal &= tie
            console.print(
                f"{arm.name}: prompt {prompt} differs from plain decoding at token {position}, target logits"
                f" {gap:.2e} apart: " + ("a tie in fp32" if tie else "[bold red]a real difference[/]")
            )
    if equal:
        console.print("[green]greedy output of every arm equals plain decoding[/]")
    return equal


@app.command()
def demo(
    prompts: Annotated[Path | None, typer.Option(help="Text, one prompt a line, or .jsonl with `prompt`.")] = None,
    drafter: Annotated[Which, typer.Option(help="Which drafter.")] = Which.both,
    drafter_weights: Annotated[Path | None, typer.Option(help="Folder of a DFlash drafter for the target.")] = None,
    draft_vocab: Annotated[int, typer.Option(min=256, help="The drafters propose token ids below this.")] = 8192,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy, and is checked against plain decoding.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Nucleus of the target when sampling.")] = 0.95,
    batch: Annotated[int, typer.Option(min=1, max=256, help="Requests decoded together.")] = 96,
    k: Annotated[int, typer.Option(min=1, max=16, help="Drafts per step.")] = 3,
    max_new: Annotated[int, typer.Option(min=1, max=2048, help="New tokens per prompt.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    device: Annotated[str, typer.Option(help="Where the models run.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the two pictures.")] = Path("demo-out"),
    quick: Annotated[bool, typer.Option(help="8 prompts, 24 tokens each: a look, not a measurement.")] = False,
) -> None:
    """Decode real prompts with plain, fixed and adaptive verification, and compare them."""
    texts = read_prompts(prompts or shipped("prompts", "prompts.jsonl"))
    if quick:
        texts, batch, max_new = texts[:8], min(batch, 8), min(max_new, 24)
    batch = min(batch, len(texts))
    out.mkdir(parents=True, exist_ok=True)
    equal = True
    results: dict[str, tuple[Arm, Sequence[Arm]]] = {}
    with torch.inference_mode():
        tokenizer = load_tokenizer()
        ids = encode(tokenizer, texts)
        length = max(map(len, ids)) + max_new + 17
        model = Model(*load_weights(device, lambda x: _tracked(x, "dequantising")), length)
        head = model.head if draft_vocab >= model.shape.vocab else Linear(model.embedding[:draft_vocab])
        drafters: list[Drafter] = []
        if drafter in (Which.block, Which.both):
            drafters.append(BlockDrafter.load(drafter_weights or shipped("drafter"), model, head, length))
        if drafter in (Which.layer_skip, Which.both):
            drafters.append(LayerSkipDrafter(model, head))
        threads = choose_threads(model, batch, sum(map(len, ids)) // len(ids))
        console.print(f"{threads} threads, {len(ids)} prompts, {max_new} new tokens each")
        filled = Prompts(model, ids, tokenizer.eos_token_id, drafters[0].taps, lambda x: _tracked(x, "prefilling"))
        for each in drafters:
            if k > each.most:
                raise typer.BadParameter(f"--k {k}: the {each.name} drafter predicts {each.most} tokens at most")
            context = sum(map(len, ids)) // len(ids) + max_new // 2
            cost = measure_costs(model, each, batch, k, context, Sampler(temperature, top_p, seed, device))
            curve = ", ".join(f"{tokens}: {ms:.0f}" for tokens, ms in cost.verify)
            console.print(f"costs in ms: draft {cost.draft[-1][1]:.0f}; verify by tokens {curve}")
            # Both drafters cost less when they draft less. A step that explores drafts to full depth: keep these few.
            settings = Settings(refit_interval=8, exploration=0.0025, autoregressive=True)
            verifier = AdaptiveVerifier(batch, k, device, cost=cost, settings=settings)

            def arm(name: str, **how: Any) -> Arm:
                return Arm(name, model, filled, Sampler(temperature, top_p, seed, device), batch, max_new, **how)

            plain = arm("plain")
            arms = [
                *(arm(f"fixed {n}", drafter=each, depth=n) for n in range(1, k + 1)),
                arm("adaptive", drafter=each, depth=k, verifier=verifier),
            ]
            decode([plain, *arms], each.name, batch)
            results[each.name] = plain, arms
            console.print(report.throughput_table(f"{each.name} drafter, batch {batch}", plain, arms))
            best = max(arms[:-1], key=report.speed)
            for other in dict.fromkeys((arms[-2], best, plain)):
                console.print(
                    f"adaptive is {report.ratio(arms[-1], other):.3f} × as fast as {other.name} (median of the paired"
                    f" rounds), {report.speed(arms[-1]) / report.speed(other):.3f} × in total"
                )
            stratum = SAMPLED if temperature else GREEDY
            console.print(report.calibration_table(report.Labels(arms[-1]), verifier.coefficients(), stratum))
            if not temperature:
                equal &= check_greedy(model, plain, arms)
    report.reliability_picture(
        out / "reliability.png", {name: report.Labels(arms[-1]) for name, (_, arms) in results.items()}
    )
    report.throughput_picture(out / "throughput.png", results)
    console.print(f"pictures: {out / 'reliability.png'}, {out / 'throughput.png'}")
    raise typer.Exit(0 if equal else 1)
