"""Let the target answer the training prompts and keep, per token, what the drafter sees and what it has to predict.

Most answers are greedy, because greedy speculation runs on such text; the sampled ones show the drafter other prefixes.
Shards are self-contained, and a restart skips the prompts that are in one.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from model import FEATURE_LAYERS
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from av_triton.demo.model import Model, TokenList, load_tokenizer, load_weights

HERE = Path(__file__).parent
FP16_MAX = 6e4
TEMPERATURES, TEMPERATURE_WEIGHTS = (0.0, 0.8, 1.0), (0.7, 0.15, 0.15)
TOP_P, TOP_K = 0.95, 256


def encode(tokenizer: Any, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return ids


def code_prompts(task: dict[str, str]) -> list[str]:
    """A question and, if the reference solution shows the signature, the same task as a function to complete."""
    text, code = (task[name].replace("\r", "") for name in ("text", "code"))
    prompts = [text, "Write a Python program. " + text]
    for signature in [line.rstrip() for line in code.split("\n") if line.startswith("def ")][:1]:
        prompts.append(f'Complete the following Python function.\n```python\n{signature}\n    """{text}"""\n```')
    return prompts


def training_prompts(data: Path, seed: int) -> list[str]:
    """Prompts in a fixed random order that takes the three sources in turn until the shortest is used up."""
    rng = random.Random(seed)
    topics, templates = ((HERE / f"{name}.txt").read_text().splitlines() for name in ("topics", "templates"))
    tasks = [json.loads(line) for line in (data / "mbpp.jsonl").open()]
    sources = [
        [json.loads(line)["question"] for line in (data / "gsm8k_train.jsonl").open()],
        [prompt for task in tasks for prompt in code_prompts(task)],
        [template.format(topic) for template in templates for topic in topics],
    ]
    for source in sources:
        rng.shuffle(source)
    return [prompt for turn in zip(*sources, strict=False) for prompt in turn]


@dataclass
class Answer:
    """A prompt with its answer so far, and rows [features | normed hidden state] of the `seen` first positions."""

    index: int
    ids: list[int]
    temperature: float
    prompt_len: int
    seen: int = 0
    rows: list[Tensor] = field(default_factory=list)


def save_shard(path: Path, answers: list[Answer]) -> None:
    """Answers back to back; `length` splits them again. The last token of each has no row and is left out."""
    tensors = {
        "ids": torch.cat([torch.tensor(a.ids[: a.seen], dtype=torch.int32) for a in answers]),
        "rows": torch.cat([row for a in answers for row in a.rows]),
        "length": torch.tensor([a.seen for a in answers]),
        "prompt_len": torch.tensor([a.prompt_len for a in answers]),
        "temperature": torch.tensor([a.temperature for a in answers]),
        "index": torch.tensor([a.index for a in answers]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


def sample(logits: Tensor, temperature: Tensor) -> Tensor:
    """Greedy where the temperature is zero, elsewhere from the nucleus of the TOP_K likeliest tokens."""
    token = logits.argmax(-1)
    hot = temperature.nonzero()[:, 0]
    if len(hot):
        scaled = logits[hot] / temperature[hot, None]
        top, index = scaled.topk(TOP_K)
        p = (top - scaled.logsumexp(-1, keepdim=True)).exp()
        p = p * (p.cumsum(-1) - p < TOP_P)
        token[hot] = index.gather(1, torch.multinomial(p, 1))[:, 0]
    return token


@torch.inference_mode()
def answers(model: Model, stop: int, prompts: Iterator[Answer], args: argparse.Namespace) -> Iterator[Answer]:
    """Continuous batching: a finished answer's slot takes the next prompt, whose prefill joins the next step."""
    running = dict(zip(range(args.batch), prompts, strict=False))
    cache = model.cache(args.batch, args.max_prompt + args.max_new)
    stop_at = time.monotonic() + 60 * args.minutes
    with tqdm(unit=" tokens", mininterval=5) as bar:
        while running and time.monotonic() < stop_at:
            slots = sorted(running)
            batch = [running[slot] for slot in slots]
            feeds = [answer.ids[answer.seen :] for answer in batch]
            counts = torch.tensor([len(feed) for feed in feeds])
            starts = torch.tensor([answer.seen for answer in batch])
            tokens = TokenList(cache, torch.tensor(slots), starts, counts)
            hidden, taps = model.forward(torch.tensor(list(chain(*feeds))), tokens, taps=FEATURE_LAYERS)
            rows = torch.cat([*taps, hidden], -1).clamp(-FP16_MAX, FP16_MAX).half().split(counts.tolist())
            temperature = torch.tensor([answer.temperature for answer in batch])
            following = sample(model.head(hidden[tokens.offsets[1:] - 1]), temperature).tolist()
            for slot, answer, row, token in zip(slots, batch, rows, following, strict=True):
                answer.rows.append(row.clone())
                answer.seen += len(row)
                answer.ids.append(token)
                if token == stop or len(answer.ids) - answer.prompt_len >= args.max_new:
                    yield answer
                    del running[slot]
                    running.update(zip([slot], prompts, strict=False))
            bar.update(len(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with gsm8k_train.jsonl and mbpp.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--minutes", type=float, default=60, help="unfinished answers are dropped after this time")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--max-prompt", type=int, default=160, help="longer prompts are skipped")
    parser.add_argument("--max-new", type=int, default=192)
    parser.add_argument("--shard-size", type=int, default=128, help="answers per shard")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    shards, done = sorted(args.out.glob("shard-*.safetensors")), set()
    for path in shards:
        with safe_open(path, "pt") as shard:
            done.update(shard.get_tensor("index").tolist())
    rng = random.Random(args.seed + len(shards))
    torch.manual_seed(args.seed + len(shards))

    tokenizer = load_tokenizer()
    model = Model(*load_weights("cpu"), args.max_prompt + args.max_new)
    todo = ((i, text) for i, text in enumerate(training_prompts(args.prompts, args.seed)) if i not in done)
    encoded = ((i, encode(tokenizer, text)) for i, text in todo)
    prompts = (
        Answer(i, ids, rng.choices(TEMPERATURES, TEMPERATURE_WEIGHTS)[0], len(ids))
        for i, ids in encoded
        if len(ids) <= args.max_prompt
    )
    finished: list[Answer] = []
    for answer in answers(model, tokenizer.eos_token_id, prompts, args):
        finished.append(answer)
        if len(finished) == args.shard_size:
            save_shard(args.out / f"shard-{len(shards):04d}.safetensors", finished)
            shards.append(args.out)
            finished = []
    if finished:
        save_shard(args.out / f"shard-{len(shards):04d}.safetensors", finished)


if __name__ == "__main__":
    main()
