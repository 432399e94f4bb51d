"""Two drafters: one that predicts a whole block in parallel, one that skips layers of the target, token by token.

Their `head` may cover the first token ids only (byte-pair ids are roughly ordered by frequency): that makes drafting
cheaper, and verification keeps the output law for any draft distribution.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from av_triton.demo.model import Cache, Linear, Model, Rope, TokenList

LAYER_SKIP = (0, 1, 2, 8, 13, *range(15, 30))

Choose = Callable[[Tensor, int | None], Tensor]
"""(draft logits [B, K, V], None) -> tokens [B, K], or (draft logits [B, V], position) -> tokens [B]."""


class Drafter(ABC):
    """Proposes tokens for requests with `lengths` verified tokens in the cache and a next token `pending`."""

    name: str
    most: int = 16
    """Drafts per step, at most."""
    taps: Sequence[int] = ()
    """Target layers whose outputs `extend` wants for every verified token."""

    @abstractmethod
    def cache(self, target: Cache) -> Cache:
        """The cache it drafts from, for the slots of the target's cache."""

    @abstractmethod
    def draft(
        self, pending: Tensor, slots: Tensor, lengths: Tensor, depth: int, cache: Cache, choose: Choose
    ) -> Tensor:
        """pending, slots, lengths int64 [B] -> drafts int64 [B, depth]."""

    @abstractmethod
    def extend(self, taps: list[Tensor], tokens: TokenList, cache: Cache) -> None:
        """Takes in the target's layer outputs for tokens that it has just processed; rejected ones are overwritten."""


class LayerSkipDrafter(Drafter):
    """The target without some of its layers. It reads the target's keys and values for verified tokens; those that it
    writes for its own drafts are overwritten by the target's at verification."""

    name = "layer-skip"

    def __init__(self, model: Model, head: Linear, layers: Sequence[int] = LAYER_SKIP) -> None:
        self.model, self.head, self.layers = model, head, layers

    def cache(self, target: Cache) -> Cache:
        return target

    def extend(self, taps: list[Tensor], tokens: TokenList, cache: Cache) -> None:
        """Nothing to do: verification has written the target's keys and values."""

    def draft(
        self, pending: Tensor, slots: Tensor, lengths: Tensor, depth: int, cache: Cache, choose: Choose
    ) -> Tensor:
        drafts, ids, one = [], pending, torch.ones_like(slots)
        for position in range(depth):
            tokens = TokenList(cache, slots, lengths + position, one)
            hidden, _ = self.model.forward(ids, tokens, self.layers)
            ids = choose(self.head(hidden), position)
            drafts.append(ids)
        return torch.stack(drafts, 1)


@dataclass(frozen=True)
class BlockLayer:
    input_norm: Tensor
    qkv: Linear
    kv: Linear
    q_norm: Tensor
    k_norm: Tensor
    output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


class BlockDrafter(Drafter):
    """DFlash's form: a few layers over [pending token, mask, mask, ...]; each row predicts the token of its position.

    A block attends to itself in both directions and to one context row per verified token, made from the target's
    hidden states: context = norm(fc(concatenated outputs of the tapped layers)); its keys and values come from the
    layers' own projections without the input norm.
    """

    name = "block"

    def __init__(
        self, model: Model, head: Linear, weights: dict[str, Tensor], config: dict[str, Any], max_length: int
    ) -> None:
        def weight(*names: str) -> Tensor:
            return torch.cat([weights[f"{name}.weight"] for name in names]).float().to(model.device)

        self.model, self.head = model, head
        self.head_dim, self.heads = config["head_dim"], config["num_attention_heads"]
        self.norm_eps = config["rms_norm_eps"]
        self.most = config["block_size"] - 1
        self.mask = config["dflash_config"]["mask_token_id"]
        self.taps = config["dflash_config"]["target_layer_ids"]
        self.rope = Rope(self.head_dim, config["rope_theta"], max_length, model.device)
        self.fc, self.context_norm, self.final_norm = Linear(weight("fc")), weight("hidden_norm"), weight("norm")
        self.layers = []
        for i in range(config["num_hidden_layers"]):
            attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
            q, k, v = (f"{attention}.{x}_proj" for x in "qkv")
            self.layers.append(
                BlockLayer(
                    input_norm=weight(f"layers.{i}.input_layernorm"),
                    qkv=Linear(weight(q, k, v)),
                    kv=Linear(weight(k, v)),
                    q_norm=weight(f"{attention}.q_norm"),
                    k_norm=weight(f"{attention}.k_norm"),
                    output=Linear(weight(f"{attention}.o_proj")),
                    ffn_norm=weight(f"layers.{i}.post_attention_layernorm"),
                    gate_up=Linear(weight(f"{mlp}.gate_proj", f"{mlp}.up_proj")),
                    down=Linear(weight(f"{mlp}.down_proj")),
                )
            )

    @classmethod
    def load(cls, folder: Path, model: Model, head: Linear, max_length: int) -> BlockDrafter:
        from safetensors.torch import load_file

        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"drafter weights: {folder / name} not found; give a folder in DFlash's form")
        config = json.loads((folder / "config.json").read_text())
        if config.get("hidden_size") != model.shape.hidden or "dflash_config" not in config:
            raise ValueError(
                f"drafter weights: {folder} has hidden_size {config.get('hidden_size')}, the target has"
                f" {model.shape.hidden}; give a DFlash drafter that was trained for this target"
            )
        return cls(model, head, load_file(folder / "model.safetensors"), config, max_length)

    def cache(self, target: Cache) -> Cache:
        _, slots, _, length, _ = target.keys.shape
        return Cache(len(self.layers), slots, self.heads, length, self.head_dim, device=self.model.device)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.norm_eps)

    def extend(self, taps: list[Tensor], tokens: TokenList, cache: Cache) -> None:
        context = self._norm(self.fc(torch.cat(taps, -1)), self.context_norm)
        for i, layer in enumerate(self.layers):
            key, value = layer.kv(context).view(len(context), 2, self.heads, self.head_dim).unbind(1)
            key = self.rope(self._norm(key, layer.k_norm), tokens.positions)
            cache.keys[i, tokens.slots, :, tokens.positions] = key
            cache.values[i, tokens.slots, :, tokens.positions] = value

    def draft(
        self, pending: Tensor, slots: Tensor, lengths: Tensor, depth: int, cache: Cache, choose: Choose
    ) -> Tensor:
        rows = len(slots)
        tokens = TokenList(cache, slots, lengths, torch.full_like(slots, depth + 1), block=True)
        ids = torch.full((rows, depth + 1), self.mask, device=slots.device)
        ids[:, 0] = pending
        # The drafter was trained on embeddings rounded to bfloat16.
        x = self.model.embedding[ids.view(-1)].bfloat16().float()
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm)).view(len(x), 3, self.heads, self.head_dim)
            query = self.rope(self._norm(qkv[:, 0], layer.q_norm), tokens.positions)
            key = self.rope(self._norm(qkv[:, 1], layer.k_norm), tokens.positions)
            x = x + layer.output(tokens.attend(query, key, qkv[:, 2], i))
            gate, up = layer.gate_up(self._norm(x, layer.ffn_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        hidden = self._norm(x, self.final_norm).view(rows, depth + 1, -1)[:, 1:].reshape(rows * depth, -1)
        return choose(self.head(hidden).view(rows, depth, -1), None)
