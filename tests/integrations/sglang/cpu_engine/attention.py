"""Attention for the CPU engine: SGLang's torch backend plus ragged TARGET_VERIFY and the drafters' modes."""

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class VerifyBackend(TorchNativeAttnBackend):
    """One attention call per request; exact, slow, and the same arithmetic for every verify length."""

    supports_ragged_verify_graph = False

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        mode = forward_batch.forward_mode
        if not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        self._store(k, v, layer, forward_batch, save_kv_cache)
        lengths = self._query_lengths(forward_batch, q.shape[0])
        prefixes = forward_batch.seq_lens.tolist()
        if mode.is_draft_extend_v2():
            prefixes = [total - n for total, n in zip(prefixes, lengths, strict=True)]
        return self._attend(q, layer, forward_batch, lengths, prefixes)

    def _store(self, k: Tensor | None, v: Tensor, layer: Any, forward_batch: Any, save: bool) -> None:
        if save and k is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)

    def _attend(self, q: Tensor, layer: Any, forward_batch: Any, lengths: list[int], prefixes: list[int]) -> Tensor:
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        rows = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        table, slots = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.tolist()
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        start = 0
        for slot, n, prefix in zip(slots, lengths, prefixes, strict=False):
            where = table[slot, : prefix + n].long()
            mask = torch.ones(n, prefix + n, dtype=torch.bool).tril_(prefix) if causal else None
            rows[start : start + n] = scaled_dot_product_attention(
                queries[start : start + n].transpose(0, 1)[None],
                keys[where].to(q.dtype).transpose(0, 1)[None],
                values[where].to(q.dtype).transpose(0, 1)[None],
                attn_mask=mask,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )[0].transpose(0, 1)
            start += n
        return out

    @staticmethod
    def _query_lengths(forward_batch: Any, tokens: int) -> list[int]:
        layout = getattr(getattr(forward_batch, "spec_info", None), "ragged_verify_layout", None)
        if layout is not None:
            return layout.verify_lens_cpu or layout.verify_lens.tolist()
        extend = getattr(forward_batch, "extend_seq_lens_cpu", None)
        if extend is not None and forward_batch.forward_mode.is_draft_extend_v2():
            return list(extend)
        return [tokens // forward_batch.batch_size] * forward_batch.batch_size


class _DraftStep(VerifyBackend):
    """Step i of a chain draft: request b attends to seq_lens[b] + i + 1 positions."""

    def __init__(self, runner: Any, step: int) -> None:
        super().__init__(runner)
        self._step = step

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        self._store(k, v, layer, forward_batch, save_kv_cache)
        prefixes = [n + self._step for n in forward_batch.seq_lens.tolist()]
        return self._attend(q, layer, forward_batch, [1] * len(prefixes), prefixes)


class DraftSteps:
    """What SGLang expects of a multi-step draft backend; chains only."""

    def __init__(self, runner: Any, topk: int, steps: int) -> None:
        assert topk == 1, "only chains: topk must be 1"
        self.attn_backends = [_DraftStep(runner, step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
