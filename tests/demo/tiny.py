"""A small random target and small random drafters, with the runtime's own classes."""

import torch

from av_triton.demo.drafters import BlockDrafter, Drafter, LayerSkipDrafter
from av_triton.demo.engine import Prompts
from av_triton.demo.model import LAYER_PARTS, Linear, Model, Shape

SHAPE = Shape(vocab=11, hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=48)
LENGTH = 128
BLOCK = {
    "head_dim": 8,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "block_size": 6,
    "num_hidden_layers": 2,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]},
}


def target_weights(shape: Shape = SHAPE, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) / size[-1] ** 0.5

    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    sizes = {
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_gate": (shape.ffn, hidden),
        "ffn_up": (shape.ffn, hidden),
        "ffn_down": (hidden, shape.ffn),
    }
    weights = {"token_embd.weight": draw(shape.vocab, hidden), "output_norm.weight": 1 + draw(hidden)}
    for i in range(shape.layers):
        for name in LAYER_PARTS:
            weights[f"blk.{i}.{name}.weight"] = draw(*sizes[name]) if name in sizes else 1 + draw(hidden)
    return weights


def target(seed: int = 0) -> Model:
    return Model(SHAPE, target_weights(seed=seed), LENGTH)


def block_weights(seed: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, tuple[int, ...]] = {"fc": (32, 64), "hidden_norm": (32,), "norm": (32,)}
    for i in range(BLOCK["num_hidden_layers"]):  # type: ignore[call-overload]
        at = f"layers.{i}"
        sizes |= {f"{at}.{x}": (32,) for x in ("input_layernorm", "post_attention_layernorm")}
        sizes |= {f"{at}.self_attn.{x}_proj": (32, 32) for x in "qkvo"}
        sizes |= {f"{at}.self_attn.{x}_norm": (8,) for x in "qk"}
        sizes |= {f"{at}.mlp.gate_proj": (40, 32), f"{at}.mlp.up_proj": (40, 32), f"{at}.mlp.down_proj": (32, 40)}
    return {
        f"{name}.weight": torch.randn(size, generator=generator) / size[-1] ** 0.5 + (len(size) == 1)
        for name, size in sizes.items()
    }


def drafter(kind: str, model: Model, vocab: int = SHAPE.vocab) -> Drafter:
    head = Linear(model.embedding[:vocab])
    if kind == "block":
        return BlockDrafter(model, head, block_weights(), BLOCK, LENGTH)
    return LayerSkipDrafter(model, head, layers=(0, 1, 3))


def prompts(model: Model, lengths: list[int], stop: int = -1, seed: int = 0) -> Prompts:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, SHAPE.vocab, (n,), generator=generator).tolist() for n in lengths]
    return Prompts(model, ids, stop, BLOCK["dflash_config"]["target_layer_ids"])  # type: ignore[index]
