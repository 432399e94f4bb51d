"""Train the block drafter on the shards of generate.py by distillation from the target's own distribution."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from model import BLOCK, FEATURES, HIDDEN, VOCAB, Drafter, Shape
from safetensors.torch import load_file
from start import ridge_start
from torch import Tensor
from tqdm import tqdm

from av_triton.demo.model import load_weights

BLOCKS = (BLOCK, BLOCK, 6, 4)
"""Block sizes met in training: the rows of a block see each other, so a shorter block is a different input."""
HARD_LABEL = 0.2
MIN_ANSWER = 12


@dataclass
class Sequence:
    """One answer with its prompt. `hidden[t]` is what the target's head turns into the distribution of token t + 1."""

    ids: Tensor
    features: Tensor
    hidden: Tensor
    prompt_len: int
    greedy: bool


def load_shards(folder: Path) -> list[Sequence]:
    sequences = []
    for path in sorted(folder.glob("shard-*.safetensors")):
        shard = load_file(path)
        lengths = shard["length"].tolist()
        features, hidden = shard["rows"].split([FEATURES, HIDDEN], 1)
        texts = (x.split(lengths) for x in (shard["ids"].long(), features, hidden))
        scalars = shard["prompt_len"].tolist(), (shard["temperature"] == 0).tolist()
        sequences += [Sequence(*fields) for fields in zip(*texts, *scalars, strict=True)]
    return [s for s in sequences if len(s.ids) - s.prompt_len >= MIN_ANSWER]


@dataclass
class Batch:
    """Padded sequences with anchors; `label [S, A, block - 1]` is the position whose hidden state a row predicts."""

    ids: Tensor
    features: Tensor
    hidden: Tensor
    anchors: Tensor
    label: Tensor
    valid: Tensor

    @classmethod
    def draw(
        cls, sequences: list[Sequence], anchors: int, block: int, window: int, dtype: torch.dtype = torch.float32
    ) -> Batch:
        """Random anchors in a random window of each answer. The shapes are fixed: oneDNN compiles a kernel for each."""
        ids = torch.zeros(len(sequences), window, dtype=torch.long)
        features = torch.zeros(len(sequences), window, FEATURES, dtype=dtype)
        hidden = torch.zeros(len(sequences), window, HIDDEN)
        chosen = torch.zeros(len(sequences), anchors, dtype=torch.long)
        ends = torch.zeros(len(sequences), 1, 1, dtype=torch.long)
        for i, s in enumerate(sequences):
            end = random.randint(min(len(s.ids), s.prompt_len + 2 * MIN_ANSWER), len(s.ids))
            begin = max(0, end - window)
            n = ends[i] = end - begin
            ids[i, :n], features[i, :n], hidden[i, :n] = s.ids[begin:end], s.features[begin:end], s.hidden[begin:end]
            first = max(s.prompt_len - 1 - begin, min(MIN_ANSWER, n // 2))
            candidates = first + torch.randperm(n - first)
            chosen[i] = candidates.repeat(-(-anchors // len(candidates)))[:anchors]
        label = chosen[..., None] + torch.arange(block - 1)
        return cls(ids, features, hidden, chosen, label.clamp(max=window - 1), label < ends)

    def goal(self) -> Tensor:
        return self.hidden[torch.arange(len(self.ids))[:, None, None], self.label]


class Vocabulary:
    """The softmax of the loss: the frequent tokens, the rare ones of the batch, and random others for all the rest."""

    def __init__(self, sequences: list[Sequence], embedding: Tensor, frequent: int, negatives: int) -> None:
        weight = torch.zeros(VOCAB)
        for s in sequences:
            weight += torch.bincount(s.ids, minlength=VOCAB)
        states = torch.cat([s.hidden[s.prompt_len :: 64] for s in sequences])[:4000].float()
        for chunk in states.split(500):  # tokens that the target merely considers count as well
            weight += 3 * F.softmax(chunk @ embedding.T, -1).sum(0)
        order = weight.argsort(descending=True)
        self.frequent, self.rest = order[:frequent], order[frequent:]
        self.coverage = (weight[self.frequent].sum() / weight.sum()).item()
        self.embedding, self.negatives = embedding, negatives

    def draw(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and log weights of a training vocabulary: the frequent tokens, those of `ids`, random ones."""
        own = ids.unique()
        own = own[torch.isin(own, self.rest)][: self.negatives // 2]
        sampled = self.rest[torch.randint(len(self.rest), (self.negatives - len(own),))]
        vocabulary = torch.cat([self.frequent, own, sampled])
        weight = torch.zeros(len(vocabulary))
        weight[-len(sampled) :] = math.log((len(self.rest) - len(own)) / len(sampled))
        return self.embedding[vocabulary], weight


@torch.no_grad()
def held_out(drafter: Drafter, embedding: Tensor, sequences: list[Sequence]) -> dict[str, object]:
    """Greedy acceptance on held-out greedy text, every anchor alike (a decoding loop meets hard ones more often)."""
    states = random.getstate(), torch.get_rng_state()
    random.seed(1)
    torch.manual_seed(1)
    hits = []
    for s in sequences:
        batch = Batch.draw([s], 24, BLOCK, 352)
        predicted = drafter(embedding, batch.features, batch.ids, batch.anchors)
        drafted, best = ((x.flatten(0, 2) @ embedding.T).argmax(-1) for x in (predicted, batch.goal()))
        hits.append((drafted == best).view(batch.valid.shape)[batch.valid.all(-1)])
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    reached = torch.cat(hits).float().cumprod(-1).mean(0)
    conditional = (reached / torch.cat([torch.ones(1), reached[:-1]])).nan_to_num()
    return {
        "accept_length": round(1 + reached.sum().item(), 3),
        "conditional": [round(x, 3) for x in conditional.tolist()],
        "anchors": sum(map(len, hits)),
    }


def train(drafter: Drafter, sequences: list[Sequence], vocabulary: Vocabulary, args: argparse.Namespace) -> int:
    """AdamW on soft cross entropy, with a decaying pull towards the target's hidden state; returns the steps taken.

    A bf16 copy runs forward and backward (with AMX 1.5 times faster), the optimizer keeps fp32 weights. The schedules
    follow the clock, so a run ends well annealed whatever the speed of the machine.
    """
    copy = deepcopy(drafter).bfloat16()
    pairs = list(zip(drafter.parameters(), copy.parameters(), strict=True))
    groups = [
        {"params": [p for p in drafter.parameters() if p.ndim == 2], "weight_decay": args.weight_decay},
        {"params": [p for p in drafter.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    depth_weight = args.depth_decay ** torch.arange(BLOCK - 1)
    began, steps, order = time.monotonic(), 0, []
    with tqdm(mininterval=10, smoothing=0.02) as bar:
        while (progress := (time.monotonic() - began) / (60 * args.minutes)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1, (steps + 1) / 50) * min(1, (1 - progress) / 0.8)
            if len(order) < args.batch:
                order = random.sample(sequences, len(sequences))
            block = random.choice(BLOCKS)
            drawn = [order.pop() for _ in range(args.batch)]
            batch = Batch.draw(drawn, args.anchors, block, args.window, torch.bfloat16)
            predicted = copy(vocabulary.embedding, batch.features, batch.ids, batch.anchors, block).flatten(0, 2)
            goal = batch.goal().flatten(0, 2)
            weight = (depth_weight[: block - 1] * batch.valid).flatten()

            head, correction = vocabulary.draw(batch.ids)
            with torch.no_grad():  # in fp32: bf16 logits tie
                teacher = F.softmax(torch.addmm(correction, goal, head.T), -1)
                best = teacher.argmax(-1, keepdim=True)
                teacher.mul_(1 - HARD_LABEL).scatter_add_(1, best, torch.full(best.shape, HARD_LABEL))
            logits = (predicted @ head.T.bfloat16()).float() + correction
            pull = F.smooth_l1_loss(predicted.float(), goal, reduction="none").mean(-1)
            loss = F.cross_entropy(logits, teacher, reduction="none") + 0.5 * (1 - progress) * pull
            loss = (loss * weight).sum() / weight.sum()
            loss.backward()

            for master, working in pairs:
                master.grad, working.grad = working.grad.float(), None
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for master, working in pairs:
                    working.copy_(master)
            steps += 1
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the shards of generate.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--start", type=Path, help="checkpoint to go on from instead of the analytic start")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="of the feed-forward layers")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--window", type=int, default=128, help="tokens of a sequence that a step sees")
    parser.add_argument("--anchors", type=int, default=16, help="blocks per sequence and step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--depth-decay", type=float, default=0.7, help="loss weight of a draft over the one before")
    parser.add_argument("--frequent", type=int, default=3072, help="tokens that are in every softmax of the loss")
    parser.add_argument("--negatives", type=int, default=512, help="random tokens added to them")
    parser.add_argument("--holdout", type=int, default=48, help="greedy answers kept for validation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # AMX where there is one

    _, weights = load_weights("cpu")
    embedding, final_norm = weights["token_embd.weight"], weights["output_norm.weight"]
    sequences = load_shards(args.data)
    held = [s for s in sequences if s.greedy][: args.holdout]
    kept = {id(s) for s in held}
    sequences = [s for s in sequences if id(s) not in kept]
    tokens = sum(len(s.ids) - s.prompt_len for s in sequences)
    vocabulary = Vocabulary(sequences, embedding, args.frequent, args.negatives)
    print(f"{len(sequences)} answers, {tokens} tokens; the frequent tokens cover {vocabulary.coverage:.3f} of the text")

    before = torch.cat([s.features[s.prompt_len - 1 : -1] for s in sequences[:200]]).float()
    scale = 1 / (before.pow(2).mean(0).sqrt() + 1e-4)
    if args.start:
        drafter = Drafter.load(args.start).train().rescale(scale)
    else:
        drafter = Drafter(Shape(args.layers, args.width)).rescale(scale)
        anchors = torch.cat([embedding[s.ids[s.prompt_len :]] for s in sequences[:200]]).bfloat16().float()
        hidden = torch.cat([s.hidden[s.prompt_len :] for s in sequences[:200]]).float()
        explained = ridge_start(drafter, before, anchors, hidden, embedding, final_norm, vocabulary.frequent)
        print(f"analytic start explains {explained:.3f} of the variance")
    parameters = sum(p.numel() for p in drafter.parameters()) / 1e6
    print(f"{parameters:.2f} M parameters, held out before training {held_out(drafter, embedding, held[:8])}")

    steps = train(drafter, sequences, vocabulary, args)
    drafter.eval().save(args.out)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    result = held_out(Drafter.load(args.out), embedding, held)
    record = {"steps": steps, "answers": len(sequences), "tokens": tokens, "held_out": result}
    record["arguments"] = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{steps} steps, held out {result}")


if __name__ == "__main__":
    main()
