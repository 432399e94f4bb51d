"""Tiny random checkpoints: a two-layer Llama target and drafters for it whose drafts are accepted now and then.

The embeddings share a common direction, so that next tokens are peaked but depend on the last token; the drafters use
the target's embedding and head, so that their distribution resembles the target's.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 2, 1, 32, 128
Tensors = dict[str, Tensor]


def _config(vocab: int, **changes: Any) -> dict[str, Any]:
    base = {
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "torch_dtype": "float32",
        "initializer_range": 0.02,
        "use_cache": True,
    }
    return base | changes


def _layer(prefix: str, scale: float, qk_norm: bool = False, attention_inputs: int = HIDDEN) -> Tensors:
    """`scale` bounds what a layer adds to the residual stream."""
    width = HEADS * HEAD_DIM
    tensors = {
        "self_attn.q_proj": torch.randn(width, attention_inputs) / attention_inputs**0.5,
        "self_attn.k_proj": torch.randn(KV_HEADS * HEAD_DIM, attention_inputs) / attention_inputs**0.5,
        "self_attn.v_proj": torch.randn(KV_HEADS * HEAD_DIM, attention_inputs) / attention_inputs**0.5,
        "self_attn.o_proj": torch.randn(HIDDEN, width) / width**0.5 * scale,
        "mlp.gate_proj": torch.randn(FFN, HIDDEN) / HIDDEN**0.5,
        "mlp.up_proj": torch.randn(FFN, HIDDEN) / HIDDEN**0.5,
        "mlp.down_proj": torch.randn(HIDDEN, FFN) / FFN**0.5 * scale,
        "input_layernorm": torch.ones(HIDDEN),
        "post_attention_layernorm": torch.ones(HIDDEN),
    }
    if qk_norm:
        tensors |= {"self_attn.q_norm": torch.ones(HEAD_DIM), "self_attn.k_norm": torch.ones(HEAD_DIM)}
    return {f"{prefix}{name}.weight": value for name, value in tensors.items()}


def _write(path: Path, config: dict[str, Any], tensors: Tensors) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.contiguous().float() for name, value in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (path / "config.json").write_text(json.dumps(config, indent=1))


def _vocabulary(vocab: int) -> tuple[Tensor, Tensor]:
    """(embedding, head)"""
    torch.manual_seed(0)
    common = torch.randn(HIDDEN)
    return common + torch.randn(vocab, HIDDEN), torch.randn(vocab, HIDDEN) * 0.8


def _language_model(path: Path, vocab: int, layers: int, seed: int, scale: float = 0.3) -> None:
    embedding, head = _vocabulary(vocab)
    torch.manual_seed(seed)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    for index in range(layers):
        tensors |= _layer(f"model.layers.{index}.", scale)
    config = _config(vocab, architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=layers)
    _write(path, config, tensors)


def target(path: Path, vocab: int = 512) -> None:
    _language_model(path, vocab, layers=2, seed=1)


def standalone(path: Path, vocab: int = 512) -> None:
    """A one-layer language model with the target's embedding and head."""
    _language_model(path, vocab, layers=1, seed=5)


def mtp(path: Path, vocab: int = 512) -> None:
    """A target that brings its own drafter, one MTP layer (SGLang's algorithm NEXTN); MiMo's form, which is Qwen2's."""
    embedding, head = _vocabulary(vocab)
    torch.manual_seed(31)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    own = "model.mtp_layers.0."
    for prefix in ("model.layers.0.", "model.layers.1.", own):
        tensors |= _layer(prefix, 0.3)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(heads * HEAD_DIM)
    tensors[own + "input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{own}{name}.weight"] = torch.ones(HIDDEN)
    config = _config(
        vocab,
        architectures=["MiMoForCausalLM"],
        model_type="qwen2",
        num_hidden_layers=2,
        num_nextn_predict_layers=1,
        use_sliding_window=False,
    )
    _write(path, config, tensors)


def _block_drafter(
    path: Path, vocab: int, norm: float, tensors: Tensors, selector: dict[str, int] | None = None, **config: Any
) -> None:
    torch.manual_seed(7)
    tensors = tensors | _layer("layers.0.", 0.3, qk_norm=True)
    tensors |= {
        "fc.weight": torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5,
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.full((HIDDEN,), norm),
    }
    where = {"target_layer_ids": [0], "mask_token_id": 0}
    settings = _config(
        vocab,
        model_type="qwen3",
        num_hidden_layers=1,
        num_target_layers=2,
        dflash_config=where | (selector or {}),
        **where,
        **config,
    )
    _write(path, settings, tensors)


def dspark(path: Path, vocab: int = 512, gamma: int = 4) -> None:
    """A DSPARK drafter without confidence head; its Markov head is the target's bigram."""
    embedding, head = _vocabulary(vocab)
    tensors = {
        "markov_head.markov_w1.weight": embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt(),
        "markov_head.markov_w2.weight": head,
    }
    _block_drafter(
        path, vocab, 0.15, tensors,
        architectures=["Qwen3DSparkModel"], block_size=gamma, markov_rank=HIDDEN, markov_head_type="vanilla",
        enable_confidence_head=False,
    )  # fmt: skip


def dflash(path: Path, vocab: int = 512, block: int = 5) -> None:
    _block_drafter(path, vocab, 1.0, {}, architectures=["DFlashDraftModel"], block_size=block)


def dflash2(path: Path, vocab: int = 512, block: int = 5, candidates: int = 4) -> None:
    """DFlash2: a walk over the candidates of each position, each step of it scored by the target's bigram."""
    embedding, head = _vocabulary(vocab)
    common = embedding.mean(0)
    tensors = {
        "candidate_selector.predecessor_codebook": embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt(),
        "candidate_selector.successor_codebook": head,
        # The state that the codebooks meet in is about 1 everywhere: the hidden states share the common direction.
        "candidate_selector.hidden_projection.weight": (common / common.pow(2).sum()).expand(HIDDEN, -1),
    }
    _block_drafter(
        path, vocab, 0.5, tensors, {"selector_rank": HIDDEN, "selector_top_k": candidates},
        architectures=["DFlash2DraftModel"], block_size=block,
    )  # fmt: skip


def eagle(path: Path, vocab: int = 512) -> None:
    """EAGLE's first form: h' = fc(embedding, target's hidden), here the embedding passed through."""
    embedding, _ = _vocabulary(vocab)
    torch.manual_seed(21)
    tensors = _layer("layers.0.", 0.2)
    tensors |= {
        "fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1),
        "fc.bias": torch.zeros(HIDDEN),
        "embed_tokens.weight": embedding,
    }
    config = _config(vocab, architectures=["LlamaForCausalLMEagle"], model_type="llama", num_hidden_layers=1)
    _write(path, config, tensors)


def eagle3(path: Path, vocab: int = 512) -> None:
    _, head = _vocabulary(vocab)
    torch.manual_seed(22)
    tensors = _layer("midlayer.", 0.2, attention_inputs=2 * HIDDEN)
    tensors |= {
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) / (3 * HIDDEN) ** 0.5,
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    config = _config(
        vocab,
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        num_hidden_layers=1,
        draft_vocab_size=vocab,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 0, 0], "use_aux_hidden_state": True},
    )
    _write(path, config, tensors)


MAKERS = {
    "target": target,
    "standalone": standalone,
    "dspark": dspark,
    "dflash": dflash,
    "dflash2": dflash2,
    "eagle": eagle,
    "eagle3": eagle3,
    "mtp": mtp,
}


def make(name: str, folder: Path, **options: Any) -> Path:
    """The checkpoint of that name below `folder`, written at the first call."""
    path = folder / "-".join([name, *(f"{key}{value}" for key, value in sorted(options.items()))])
    if not (path / "config.json").exists():
        MAKERS[name](path, **options)
    return path


def add_tokenizer(model: Path, vocab: int = 512) -> None:
    """A byte-level tokenizer, so that the engine can constrain text by a grammar; the upper tokens are never text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<{index}>" for index in range(len(names), vocab)]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(model)


def first_layers(model: Path, layers: int, path: Path) -> Path:
    """A STANDALONE drafter made of the first layers of a language model."""
    tensors = load_file(model / "model.safetensors")
    kept = {
        name: value
        for name, value in tensors.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": layers}
    _write(path, config, kept)
    return path


HEADS_OF_TOKENS = ("lm_head.weight", "markov_w2.weight", "successor_codebook")


def flattened(model: Path, factor: float) -> Path:
    """A copy whose logits are multiplied by `factor`, below 1 for flatter next tokens."""
    path = model.with_name(f"{model.name}-times{factor}")
    tensors = load_file(model / "model.safetensors")
    scaled = {name: value * factor if name.endswith(HEADS_OF_TOKENS) else value for name, value in tensors.items()}
    _write(path, json.loads((model / "config.json").read_text()), scaled)
    return path
