"""The block drafter: a plain-torch twin of SGLang's DFlashDraftModel, batched over many anchors for training.

A block is the last known token (the anchor) followed by mask tokens; row j of it predicts the j-th token after the
anchor. All rows see the target's features of every position before the anchor, and each other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TEMPLATE = Path(__file__).parents[2] / "av_triton/demo/drafter/config.json"
HIDDEN, HEADS, HEAD_DIM, VOCAB = 576, 9, 64, 49152
EPS, ROPE_THETA, MAX_POSITIONS = 1e-5, 10000.0, 4096
BLOCK, MASK_TOKEN, FEATURE_LAYERS = 8, 4, (10, 20, 28)
FEATURES = HIDDEN * len(FEATURE_LAYERS)


def _rope_tables() -> tuple[Tensor, Tensor]:
    inv = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angle = (torch.arange(MAX_POSITIONS, dtype=torch.float64)[:, None] * inv).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


COS, SIN = _rope_tables()


def rope(x: Tensor, position: Tensor) -> Tensor:
    """Rotate `x [..., heads, HEAD_DIM]` to `position [...]`, pairing the two halves of a head."""
    first, second = x.chunk(2, -1)
    cos, sin = (table.to(x.dtype)[position][..., None, :] for table in (COS, SIN))
    return x * cos + torch.cat([-second, first], -1) * sin


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(HIDDEN, HIDDEN) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM, EPS), nn.RMSNorm(HEAD_DIM, EPS)

    def keys_values(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (proj(x).unflatten(-1, (HEADS, HEAD_DIM)) for proj in (self.k_proj, self.v_proj))
        return rope(self.k_norm(keys), position), values

    def forward(self, x: Tensor, context: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        query = rope(self.q_norm(self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM))), position)
        context_kv = self.keys_values(context, torch.arange(context.shape[1]).expand(context.shape[:2]))
        block_kv = self.keys_values(x, position)
        keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(context_kv, block_kv, strict=True))
        out = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, width), linear(HIDDEN, width)
        self.down_proj = linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS), nn.RMSNorm(HIDDEN, EPS)
        self.self_attn, self.mlp = Attention(), MLP(width)

    def forward(self, x: Tensor, context: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, position, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    width: int = 1024


class Drafter(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc, self.hidden_norm = linear(FEATURES, HIDDEN), nn.RMSNorm(HIDDEN, EPS)
        self.layers = nn.ModuleList(Layer(shape.width) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        self.register_buffer("feature_scale", torch.ones(FEATURES))  # evens out the channels; folded into fc when saved

    def forward(self, embedding: Tensor, features: Tensor, ids: Tensor, anchors: Tensor, block: int = BLOCK) -> Tensor:
        """Normed hidden states `[S, A, block - 1, HIDDEN]` for the positions after each of the `anchors [S, A]`.

        `features [S, T, FEATURES]` and `ids [S, T]` belong to the sequences; only what lies before an anchor is visible
        to its block. SGLang rounds the input embeddings to bf16, so the rounding is part of the model.
        """
        count = anchors.shape[1]
        tokens = torch.full((*anchors.shape, block), MASK_TOKEN)
        tokens[..., 0] = ids.gather(1, anchors)
        position = (anchors[..., None] + torch.arange(block)).flatten(1)
        before = torch.arange(features.shape[1]) < anchors[..., None]
        own = torch.eye(count, dtype=torch.bool).repeat_interleave(block, 1).expand(len(anchors), -1, -1)
        mask = torch.cat([before, own], -1).repeat_interleave(block, 1)[:, None]

        context = self.hidden_norm(self.fc(features * self.feature_scale))
        x = embedding[tokens.flatten(1)].bfloat16().to(features.dtype)
        for layer in self.layers:
            x = layer(x, context, position, mask)
        return self.norm(x).unflatten(1, (count, block))[:, :, 1:]

    @torch.no_grad()
    def rescale(self, scale: Tensor) -> Drafter:
        """Apply `scale` to the channels of the features and its inverse to `fc`, which leaves the function as it is."""
        self.fc.weight *= self.feature_scale / scale
        self.feature_scale.copy_(scale)
        return self

    def save(self, folder: Path) -> None:
        """Write the checkpoint in bf16, with the shipped one's config (SGLang loads it) but for the sizes."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.detach().clone() for name, w in self.state_dict().items()}
        weights["fc.weight"] *= weights.pop("feature_scale")
        weights = {name: w.bfloat16().contiguous() for name, w in weights.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads(TEMPLATE.read_text())
        config |= {"num_hidden_layers": self.shape.layers, "intermediate_size": self.shape.width}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Drafter:
        config = json.loads((folder / "config.json").read_text())
        drafter = cls(Shape(config["num_hidden_layers"], config["intermediate_size"]))
        weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
        drafter.load_state_dict({**weights, "feature_scale": torch.ones(FEATURES)})
        return drafter.eval()
