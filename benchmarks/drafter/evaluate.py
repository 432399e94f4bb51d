"""Measure the drafter in the demo's speculative loop, on the demo's prompts; none of them was trained on.

The accept length is 1 + the drafts accepted per verify step; the rates are each draft's, given that the one before it
was accepted.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from av_triton.demo.cli import encode, shipped
from av_triton.demo.drafters import BlockDrafter
from av_triton.demo.engine import Arm, Prompts
from av_triton.demo.model import Linear, Model, load_tokenizer, load_weights
from av_triton.demo.sampling import Sampler, Verdicts


class CountingSampler(Sampler):
    """Remembers how many verify steps accepted 0, 1, ... drafts."""

    steps: Tensor | None = None

    def verify(self, logits: Tensor, offsets: Tensor, drafts: Tensor, *rest: Tensor) -> Verdicts:
        verdicts = super().verify(logits, offsets, drafts, *rest)
        counts = torch.bincount(verdicts.accepted, minlength=drafts.shape[1] + 1)
        self.steps = counts if self.steps is None else self.steps + counts
        return verdicts


def summary(steps: Tensor) -> dict[str, Any]:
    reached = steps.flip(0).cumsum(0).flip(0).tolist()
    return {
        "accept_length": round(sum(reached) / reached[0], 3),
        "verify_steps": reached[0],
        "rates": [round(b / a, 3) for a, b in pairwise(reached) if a],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--drafter", type=Path, default=shipped("drafter"), help="folder of the checkpoint")
    parser.add_argument("--count", type=int, default=16, help="prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--draft-vocab", type=int, default=49152, help="the drafter proposes token ids below this")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    sets: dict[str, list[str]] = {}
    for record in map(json.loads, shipped("prompts", "prompts.jsonl").open()):
        sets.setdefault(record["source"], []).append(record["prompt"])
    tokenizer, total = load_tokenizer(), torch.zeros(args.drafts + 1, dtype=torch.long)
    with torch.inference_mode():
        shape, weights = load_weights("cpu")
        model = Model(shape, weights, 512 + args.new_tokens)
        head = Linear(model.embedding[: args.draft_vocab])
        drafter = BlockDrafter.load(args.drafter, model, head, 512 + args.new_tokens)
        for name, texts in sets.items():
            ids = encode(tokenizer, texts[: args.count])
            sampler = CountingSampler(args.temperature, args.top_p, args.seed)
            prompts = Prompts(model, ids, tokenizer.eos_token_id, drafter.taps)
            how = {"drafter": drafter, "depth": args.drafts, "admit": args.drafts}
            arm = Arm(name, model, prompts, sampler, len(ids), args.new_tokens, **how)
            with tqdm(total=len(ids), desc=name, leave=False) as bar:
                while not arm.finished:
                    arm.step()
                    bar.update(len(ids) - len(arm.running) - bar.n)
            assert sampler.steps is not None
            total += sampler.steps
            print(f"{name:12}{json.dumps(summary(sampler.steps))}", flush=True)
    print(f"{'all':12}{json.dumps(summary(total))}")


if __name__ == "__main__":
    main()
