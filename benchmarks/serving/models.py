"""Checkpoints in SGLang's form: SmolLM2-135M-Instruct (fp32) as the target, and drafters for it."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from av_triton.demo.cli import encode, read_prompts, shipped
from av_triton.demo.drafters import LAYER_SKIP
from av_triton.demo.model import LAYER_PARTS, Shape, load_tokenizer, load_weights

# Names of a layer's tensors in GGUF files -> in Llama checkpoints.
PARTS = dict(
    zip(
        LAYER_PARTS,
        (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        ),
        strict=True,
    )
)  # fmt: skip


def current(folder: Path) -> Path:
    """Below `folder`, where checkpoints of the present sources are: of this file, and of the demo's layers, drafter and
    prompts."""
    parts = hashlib.sha256(repr(LAYER_SKIP).encode())
    for path in (Path(__file__), *sorted(shipped("drafter").iterdir()), shipped("prompts", "prompts.jsonl")):
        parts.update(path.read_bytes())
    return folder / parts.hexdigest()[:12]


def _write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The configuration last: a folder that has one is complete."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=1))


def _llama(path: Path, shape: Shape, weights: dict[str, Tensor], layers: Sequence[int]) -> None:
    """The target with these of its layers."""
    tensors = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    for place, layer in enumerate(layers):
        tensors |= {
            f"model.layers.{place}.{name}.weight": weights[f"blk.{layer}.{part}.weight"].contiguous()
            for part, name in PARTS.items()
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": len(layers),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    _write(path, config, tensors)


def _dspark(path: Path) -> None:
    """The demo's block drafter in DSPARK's form, without a confidence head.

    Row 0 is the anchor, as in DFlash (`sample_from_anchor` false). DSPARK requires a Markov head; this one adds 0, so
    that both forms draft the same tokens.
    """
    drafter = shipped("drafter")
    config = json.loads((drafter / "config.json").read_text())
    vocab, rank = config["vocab_size"], 1
    tensors = load_file(drafter / "model.safetensors")
    tensors |= {f"markov_head.markov_{name}.weight": torch.zeros(vocab, rank) for name in ("w1", "w2")}
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config["block_size"] - 1,
        "sample_from_anchor": False,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
    _write(path, config, tensors)


def target(folder: Path) -> Path:
    """The target and STANDALONE's drafter below `folder`, written at the first call; returns the target's path."""
    path = current(folder) / "target"
    if not (path / "config.json").exists():
        shape, weights = load_weights("cpu")
        _llama(path.with_name("standalone"), shape, weights, LAYER_SKIP)
        _llama(path, shape, weights, range(shape.layers))
    return path


def drafter(folder: Path, algorithm: str) -> Path:
    """STANDALONE: the target with 20 of its 30 layers, those of the demo's layer-skip drafter. DFLASH: the demo's block
    drafter. DSPARK: the same in that form."""
    if algorithm == "STANDALONE":
        return target(folder).with_name("standalone")
    if algorithm == "DFLASH":
        return shipped("drafter")
    path = current(folder) / "dspark"
    if not (path / "config.json").exists():
        _dspark(path)
    return path


def prompts(folder: Path, count: int) -> list[list[int]]:
    """The demo's first prompts in the target's chat template, as token ids; kept below `folder`."""
    path = current(folder) / "prompts.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = read_prompts(shipped("prompts", "prompts.jsonl"))
        path.write_text(json.dumps(encode(load_tokenizer(), texts)))
    ids: list[list[int]] = json.loads(path.read_text())
    if count > len(ids):
        raise ValueError(f"{count} requests are wanted, the demo has {len(ids)} prompts: ask for fewer")
    return ids[:count]
