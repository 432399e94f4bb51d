"""The target and the block drafter against other implementations, and ragged lists against dense ones."""

import pytest
import torch
import torch.nn.functional as F

from av_triton.demo.model import Cache, TokenList
from tests.demo import tiny


def forward(model, cache, slots, starts, counts, ids):
    tokens = TokenList(cache, *(torch.tensor(x) for x in (slots, starts, counts)))
    return model.forward(torch.tensor(ids), tokens)[0]


@torch.inference_mode()
def test_logits_equal_transformers():
    transformers = pytest.importorskip("transformers")
    s, weights = tiny.SHAPE, tiny.target_weights()
    config = transformers.LlamaConfig(
        vocab_size=s.vocab, hidden_size=s.hidden, num_hidden_layers=s.layers, num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads, head_dim=s.head_dim, intermediate_size=s.ffn, rms_norm_eps=s.norm_eps,
        rope_theta=s.rope_theta, rope_parameters={"rope_type": "default", "rope_theta": s.rope_theta},
        tie_word_embeddings=True,
    )  # fmt: skip
    other = transformers.LlamaForCausalLM(config).eval()
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    for name, weight in weights.items():
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            state[f"model.layers.{layer}.{names[part]}.weight"] = weight
    missing = other.load_state_dict(state, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    assert not missing.unexpected_keys
    other.tie_weights()
    ids = torch.randint(0, s.vocab, (40,), generator=torch.Generator().manual_seed(3))
    expected = other(ids[None]).logits[0]
    model = tiny.target()
    hidden = forward(model, model.cache(2, 40), [1], [0], [40], ids.tolist())
    torch.testing.assert_close(model.head(hidden), expected, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [3, 3, 3, 3], [1, 6, 1, 1], [2, 1, 9, 4]])
def test_ragged_list_equals_one_token_at_a_time(counts):
    model, slots, starts = tiny.target(), [0, 2, 3, 6], [5, 9, 1, 12]
    together, apart = model.cache(8, 32), model.cache(8, 32)
    generator = torch.Generator().manual_seed(0)
    for slot, start in zip(slots, starts, strict=True):
        for cache in (together, apart):
            forward(model, cache, [slot], [0], [start], [(7 * slot + i) % 11 for i in range(start)])
    ids = torch.randint(0, 11, (sum(counts),), generator=generator).tolist()
    hidden = forward(model, together, slots, starts, counts, ids)
    at = 0
    for slot, start, count in zip(slots, starts, counts, strict=True):
        for i in range(count):
            alone = forward(model, apart, [slot], [start + i], [1], ids[at : at + 1])
            torch.testing.assert_close(hidden[at : at + 1], alone, atol=1e-5, rtol=1e-5)
            at += 1
    torch.testing.assert_close(together.keys, apart.keys, atol=1e-5, rtol=1e-5)


def test_a_list_holds_only_the_tokens_it_was_given():
    tokens = TokenList(Cache(1, 5, 1, 10, 2), torch.tensor([0, 4]), torch.tensor([3, 8]), torch.tensor([2, 1]))
    assert tokens.slots.tolist() == [0, 0, 4]
    assert tokens.positions.tolist() == [3, 4, 8]
    assert tokens.offsets.tolist() == [0, 2, 3]


def reference_block_logits(weights, embedding, features, anchor, depth):
    """The DFlash form, dense and for one request: features [P, taps * hidden] of positions 0..P-1."""

    def lin(x, name):
        return F.linear(x, weights[f"{name}.weight"])

    def rms(x, name):
        return F.rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"], 1e-5)

    def rope(x, positions):
        angle = positions[:, None].double() * 1e4 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        cos, sin = (f(angle).float().repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

    past = len(features)
    context = rms(lin(features, "fc"), "hidden_norm")
    x = embedding[torch.tensor([anchor] + [4] * depth)].bfloat16().float()
    at = torch.arange(past + depth + 1)
    for i in range(2):
        name = f"layers.{i}.self_attn"
        h = rms(x, f"layers.{i}.input_layernorm")
        q = rope(rms(lin(h, f"{name}.q_proj").view(-1, 4, 8), f"{name}.q_norm"), at[past:])
        rows = torch.cat([context, h])
        k = rope(rms(lin(rows, f"{name}.k_proj").view(-1, 4, 8), f"{name}.k_norm"), at)
        v = lin(rows, f"{name}.v_proj").view(-1, 4, 8)
        weight = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / 8**0.5, -1)
        x = x + lin(torch.einsum("hqk,khd->qhd", weight, v).reshape(depth + 1, -1), f"{name}.o_proj")
        h = rms(x, f"layers.{i}.post_attention_layernorm")
        mlp = f"layers.{i}.mlp"
        x = x + lin(F.silu(lin(h, f"{mlp}.gate_proj")) * lin(h, f"{mlp}.up_proj"), f"{mlp}.down_proj")
    return rms(x, "norm")[1:] @ embedding.T


@torch.inference_mode()
def test_block_drafter_equals_the_dense_form():
    model = tiny.target()
    drafter = tiny.drafter("block", model)
    generator = torch.Generator().manual_seed(5)
    slots, lengths = torch.tensor([1, 2]), torch.tensor([9, 14])
    features = [torch.randn(2, int(n), 32, generator=generator) for n in lengths]
    cache = drafter.cache(Cache(4, 4, 2, 40, 8))
    assert cache.keys.shape == (2, 4, 4, 40, 8)
    for slot, length, taps in zip(slots, lengths, features, strict=True):
        tokens = TokenList(cache, slot[None], torch.tensor([0]), length[None])
        drafter.extend(list(taps), tokens, cache)
    pending, seen = torch.tensor([3, 8]), []
    drafter.draft(pending, slots, lengths, 5, cache, lambda logits, _: seen.append(logits) or logits.argmax(-1))
    for row, taps in enumerate(features):
        expected = reference_block_logits(
            tiny.block_weights(), model.embedding, torch.cat(list(taps), -1), int(pending[row]), 5
        )
        torch.testing.assert_close(seen[0][row], expected, atol=1e-4, rtol=1e-4)
