"""Stand-in for `sgl_kernel`, whose wheel needs CUDA: torch versions of what speculation with chains calls on a CPU.

Tensors named *_lens count tokens per request; `req_to_token` is SGLang's table [slot, position] -> KV location. Any
other function of the package raises NotImplementedError when it is called.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__version__ = "0.4.10"
__path__: list[str] = []


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Move KV entries `source` -> `target` in every buffer; entries may overlap, so read all before writing."""
    targets, sources = target.tolist(), source.tolist()
    if targets == sources:
        return
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        entries = [ctypes.string_at(pointer + at * stride, stride) for at in sources]
        for at, entry in zip(targets, entries, strict=True):
            ctypes.memmove(pointer + at * stride, entry, stride)


def assign_extend_cache_locs_cpu(
    slots: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, pool_len: int
) -> None:
    """out = the KV locations of positions [start, end) of each request, one after the other."""
    at = 0
    for slot, first, last in zip(slots.tolist(), start.tolist(), end.tolist(), strict=True):
        out[at : at + last - first] = req_to_token[slot, first:last].to(out.dtype)
        at += last - first


def assign_draft_cache_locs_contiguous_cpu(
    slots: Tensor, req_to_token: Tensor, seq_lens: Tensor, out: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    width = topk * steps
    for row, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        out[row * width : (row + 1) * width] = req_to_token[slot, length : length + width].to(out.dtype)


def assign_req_to_token_pool_cpu(
    slots: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, locations: Tensor, pool_len: int
) -> None:
    at = 0
    for slot, first, last in zip(slots.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[slot, first:last] = locations[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus: Tensor, stride: int) -> None:
    """bonus = the last accepted token of each request; rows of `accept_tokens` are `stride` wide."""
    index = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus.copy_(accept_tokens.reshape(-1)[index].to(bonus.dtype))


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, out: Tensor) -> None:
    accepted = accept_index[accept_index > -1].long()
    out[: accepted.numel()] = out_cache_loc[accepted].to(out.dtype)


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    mask: Tensor | None,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    steps: int,
    width: int,
    mode: int,
) -> None:
    """The tree of a chain: every token's parent is its predecessor."""
    assert topk == 1, "only chains: topk must be 1"
    rows, columns = seq_lens.numel(), torch.arange(width)
    index.copy_((torch.arange(rows)[:, None] * width + columns).view_as(index).to(index.dtype))
    following = columns + 1
    following[-1] = -1
    next_token.copy_(following.expand(rows, width).reshape(next_token.shape).to(next_token.dtype))
    next_sibling.fill_(-1)
    positions.copy_((seq_lens[:, None] + columns).reshape(positions.shape).to(positions.dtype))
    if mask is not None and mask.numel() == rows * width * width:
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        mask.copy_(causal.expand(rows, width, width).reshape(mask.shape))


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept a chain while the draft equals the target's argmax; then the target's own token."""
    rows, width = candidates.shape
    target = target_predict.view(rows, width)
    for row in range(rows):
        last = 0
        accept_index[row, 0] = retrive_index[row, 0]
        for column in range(1, min(width, accept_index.shape[1])):
            if candidates[row, column] != target[row, column - 1]:
                break
            predicts[retrive_index[row, column - 1]] = target[row, column - 1].to(predicts.dtype)
            accept_index[row, column] = retrive_index[row, column]
            last = column
        predicts[retrive_index[row, last]] = target[row, last].to(predicts.dtype)
        accept_token_num[row] = last


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not part of the CPU stand-in")

    missing.__name__ = name
    return missing
