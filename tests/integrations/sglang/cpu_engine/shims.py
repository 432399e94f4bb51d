"""What SGLang lacks on a CPU, put in by its own hooks. Nothing here knows of adaptive verification."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _PretendCuda:
    """A view of the server arguments that says "cuda" where a gate asks for the device."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return "cuda" if name == "device" else getattr(self._view, name)


def _pass_device_gate(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.arg_groups import speculative_hook

    resolving_view = speculative_hook.resolving_view
    speculative_hook.resolving_view = lambda each: _PretendCuda(resolving_view(each))
    try:
        return original(server_args, *args, **kwargs)
    finally:
        speculative_hook.resolving_view = resolving_view


def _cast_embeddings(model: Any, input_ids: Tensor, positions: Tensor, forward_batch: Any, *args: Any, **kwargs: Any):
    """The model runner casts the block drafter's embeddings to bfloat16; a float32 model wants them back."""
    name = "input_embeds"
    if kwargs.get(name) is not None:
        kwargs[name] = kwargs[name].to(model.norm.weight.dtype)
    elif args and args[0] is not None:
        args = (args[0].to(model.norm.weight.dtype), *args[1:])
    return (model, input_ids, positions, forward_batch, *args), kwargs


def _decode_backend(original: Callable[..., Any], factory: Any) -> Any:
    from tests.integrations.sglang.cpu_engine.attention import DraftSteps

    steps = factory.speculative_num_steps
    return None if steps <= 1 else DraftSteps(factory.draft_model_runner, factory.topk, steps)


def _extend_backend(original: Callable[..., Any], factory: Any) -> Any:
    from tests.integrations.sglang.cpu_engine.attention import VerifyBackend
    from tests.integrations.sglang.cpu_engine.attention_name import NAME

    backend = VerifyBackend(factory.draft_model_runner)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = NAME
    return backend


def _reject_chain(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Rejection sampling of a chain: accept x with probability min(1, p(x)/q(x)), else draw from (p - q)+."""
    assert not block_verification, "block verification is not part of the CPU stand-in"
    rows, width = candidates.shape
    accept_index.fill_(-1)
    for row in range(rows):
        accept_index[row, 0] = retrive_index[row, 0]
        accepted, rest = 0, None
        for column in range(1, width):
            token = int(candidates[row, column])
            p, q = float(target_probs[row, column - 1, token]), float(draft_probs[row, column - 1, token])
            if not (p > 0 and float(uniform_samples[row, column - 1]) * q <= p):
                rest = (target_probs[row, column - 1] - draft_probs[row, column - 1]).clamp(min=0)
                break
            predicts[retrive_index[row, column - 1]] = token
            accept_index[row, column] = retrive_index[row, column]
            accepted = column
        cdf = torch.cumsum((target_probs[row, width - 1] if rest is None else rest).double(), 0)
        point = uniform_samples_for_final_sampling[row].double() * cdf[-1]
        predicts[retrive_index[row, accepted]] = int(torch.searchsorted(cdf, point).clamp(max=cdf.numel() - 1))
        accept_token_num[row] = accepted


def _sample_on_cpu(original: Callable[..., Any], *, is_cpu: bool, use_rejection_sampling: bool, **kwargs: Any) -> Any:
    """SGLang verifies EAGLE's chains greedily on a CPU, for want of the kernel that `_reject_chain` stands in for."""
    return original(
        is_cpu=is_cpu and not use_rejection_sampling, use_rejection_sampling=use_rejection_sampling, **kwargs
    )


def _row_argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def _say_overlap(scheduler: Any) -> None:
    print("overlapped event loop", flush=True)


def _no_device_collectives(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    for name in ("use_pynccl", "use_mscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce"):
        if name in kwargs:
            kwargs[name] = False
    return original(group, *args, **kwargs)


def install() -> None:
    """Register and apply the hooks, before an engine is built; idempotent."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tests.integrations.sglang.cpu_engine.attention import VerifyBackend
    from tests.integrations.sglang.cpu_engine.attention_name import NAME

    if NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(NAME)(VerifyBackend)
    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DRAFT_ATTENTION_BACKEND_CHOICES):
        names.append(NAME)
    torch.Tensor.record_stream = lambda tensor, stream: None

    speculative = "sglang.srt.arg_groups.speculative_hook."
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory."
    for target, hook, kind in (
        (speculative + "_handle_dspark", _pass_device_gate, HookType.AROUND),
        (speculative + "_handle_dflash", _pass_device_gate, HookType.AROUND),
        ("sglang.srt.models.dflash.DFlashDraftModel.forward", _cast_embeddings, HookType.BEFORE),
        (factory + "create_decode_backend", _decode_backend, HookType.AROUND),
        (factory + "create_draft_extend_backend", _extend_backend, HookType.AROUND),
        (
            "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
            _reject_chain,
            HookType.REPLACE,
        ),
        ("sglang.kernels.ops.speculative.row_argmax.row_argmax", _row_argmax, HookType.REPLACE),
        ("sglang.srt.managers.scheduler.Scheduler.event_loop_overlap", _say_overlap, HookType.BEFORE),
        ("sglang.srt.speculative.eagle_utils._verify_uses_greedy", _sample_on_cpu, HookType.AROUND),
        (
            "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
            _no_device_collectives,
            HookType.AROUND,
        ),
    ):
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
