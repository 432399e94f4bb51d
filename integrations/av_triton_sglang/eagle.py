"""The EAGLE worker's chains: EAGLE, EAGLE3, NEXTN/MTP and STANDALONE with topk = 1.

Drafts are the argmax; with SGLang's rejection sampling they are drawn, at the temperature of the request.

Every position costs a forward of the drafter. Where they run eagerly, the planner says how deep to go: the forwards
beyond that are left out, and so are the drafts from verification.

Step by step the drafter's forward gives the logits of positions 1, 2, ...; those of position 0 come from the draft
extend after the *previous* verification (or prefill) and wait in the verifier under the request's slot. Before the
target's forward the verify batch is packed; after it the worker gets back what it expects, one row per draft position.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from av_triton_sglang import flag, graphs, ragged, step
from av_triton_sglang.flag import FlagError
from av_triton_sglang.hooks import AFTER, AROUND, Hook

_FILE = "sglang.srt.speculative.eagle_worker_v2."
_UTILS = "sglang.srt.speculative.eagle_utils."
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."


def build(result: None, worker: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.speculative.eagle_worker_v2 import get_draft_recurrent_hidden_state_spec

    launch = flag.current()
    if launch is None:
        return
    if mambaish_config(worker.target_worker.model_runner.model_config) is not None:
        raise FlagError(
            "a target with linear attention is not supported with the EAGLE worker: its state is committed for one "
            "verify width; leave out --enable-adaptive-verification"
        )
    hidden_size, _ = get_draft_recurrent_hidden_state_spec(worker.draft_worker.draft_runner)
    step.build(
        launch,
        worker.server_args,
        worker.target_worker.model_runner,
        worker.speculative_num_draft_tokens - 1,
        autoregressive=not launch.config.cuda_graphs,  # a captured drafter always drafts all positions
        hidden_size=hidden_size,  # None for STANDALONE, which keeps no hidden states
    )


@contextmanager
def replaced(owner: Any, method: str, function: Callable[..., Any]) -> Iterator[None]:
    """Calls of the owner's method go to the function."""
    setattr(owner, method, function)
    try:
        yield
    finally:
        delattr(owner, method)


def results_of(owner: Any, method: str, see: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Shows `see` what every call of the method returns."""
    call = getattr(owner, method)

    def observed(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        see(result)
        return result

    return replaced(owner, method, observed)


def outputs_of(runner: Any, see: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Shows `see` what every forward of the draft runner puts out, logits and hidden states of its rows."""
    return results_of(runner, "forward", lambda out: see(out.logits_output))


def temperatures(sampling_info: Any) -> Tensor | None:
    """fp32 [B] that the running batch's drafts are drawn at; None: they are the argmax."""
    from sglang.srt.runtime_context import get_spec

    return sampling_info.temperatures.view(-1).float() if get_spec().speculative_use_rejection_sampling else None


def draft(original: Callable[..., Any], drafter: Any, forward_batch: Any) -> Any:
    if not step.exists() or forward_batch.forward_mode.is_idle():
        return original(drafter, forward_batch)
    context, drawn_at = step.current(), temperatures(forward_batch.sampling_info)
    runner, depth, position = drafter.draft_runner, context.start_drafting(), itertools.count(1)
    forward = runner.forward

    def to_depth(batch: Any, *args: Any, **kwargs: Any) -> Any:
        at = next(position)
        if at >= depth:
            return _no_forward(batch)
        result = forward(batch, *args, **kwargs)
        out = result.logits_output
        context.score(out.next_token_logits, at, drawn_at, hidden=out.hidden_states)
        return result

    with replaced(runner, "forward", to_depth):
        return original(drafter, forward_batch)


def _no_forward(batch: Any) -> Any:
    """In place of a drafter's forward whose draft will not be verified: token 0, and the hidden states as they were."""
    given = batch.spec_info
    vocabulary = 1 if given.draft_probs is None else given.draft_probs.shape[-1]
    logits = torch.zeros(batch.batch_size, vocabulary, device=batch.input_ids.device)
    return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=given.hidden_states))


def extend_prefill(original: Callable[..., Any], drafter: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The prompt's last position drafts position 0 of the first step."""
    if not step.exists() or batch.forward_mode.is_idle():
        return original(drafter, batch, *args, **kwargs)
    context, slots, drawn_at = step.current(), batch.req_pool_indices, temperatures(batch.sampling_info)

    def score(out: Any) -> None:
        context.score(out.next_token_logits, 0, drawn_at, slots=slots, hidden=out.hidden_states)

    with outputs_of(drafter.draft_runner, score):
        return original(drafter, batch, *args, **kwargs)


def extend_decode(original: Callable[..., Any], drafter: Any, batch: Any, result: Any, **kwargs: Any) -> Any:
    """The last accepted position of each request drafts position 0 of the next step."""
    if not step.exists() or batch.forward_mode.is_idle():
        return original(drafter, batch, result, **kwargs)
    context, width, drawn_at = step.current(), drafter.speculative_num_draft_tokens, temperatures(batch.sampling_info)
    accepted = result.accept_lens.long()
    last = torch.arange(accepted.numel(), device=accepted.device) * width + accepted - 1

    def score(out: Any, rows: Tensor | slice = slice(None)) -> None:
        hidden = None if out.hidden_states is None else out.hidden_states[rows]
        context.score(out.next_token_logits[rows], 0, drawn_at, hidden=hidden)

    runner = drafter.cuda_graph_runner_for_draft_extend
    replayed: AbstractContextManager[None] = nullcontext()
    if runner is not None:  # it has taken the last position before the LM head
        replayed = results_of(runner, "execute", score)
    with replayed, outputs_of(drafter.draft_runner, lambda out: score(out, last)):
        return original(drafter, batch, result, **kwargs)


def pack(original: Callable[..., Any], verify_input: Any, pool: Any, batch: Any, target_worker: Any) -> Any:
    """Around the preparation of the verify batch.

    The packed batch borrows the block drafters' verify input, which has a layout; what the worker reads afterwards
    (draft extend takes the full window from the batch) is put back.
    """
    if not step.exists() or batch.forward_mode.is_idle():
        return original(verify_input, pool, batch, target_worker)
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    context, runner = step.current(), target_worker.model_runner
    width, committed = verify_input.draft_token_num, batch.seq_lens_cpu
    ids = verify_input.draft_token.view(context.rows, width)
    plan = ragged.layout(context, ids.device, runner, drafts=ids)
    packed = ragged.window(batch, plan, ids, runner)
    standalone = runner.spec_algorithm.is_standalone()
    locations = verify_input.kv_loc_plan
    packed_input = DFlashVerifyInput(
        draft_token=packed.verify_ids,
        positions=packed.positions,
        draft_token_num=width,
        custom_mask=None,
        capture_hidden_mode=CaptureHiddenMode.NULL if standalone else CaptureHiddenMode.FULL,
        ragged_verify_layout=plan,
        live_seq_lens_cpu=committed,
        kv_loc_plan=locations,
        kv_loc_cols=None if locations is None else packed.window_index,
    )
    total = batch.seq_lens_sum
    batch.out_cache_loc = packed.verify_cache_loc
    ragged.extend_host_lengths(batch, plan, committed, width)
    result = packed_input.prepare_for_verify(batch, target_worker)
    result[0].mark_forward_metadata_ready()

    batch.seq_lens_cpu, batch.seq_lens_sum = committed, total
    batch.spec_info, batch.input_ids = verify_input, verify_input.draft_token
    batch.out_cache_loc = verify_input.prepared_out_cache_loc
    if batch.out_cache_loc is None:
        batch.out_cache_loc = assign_extend_cache_locs_uniform_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=pool.req_to_token,
            start_offset=batch.seq_lens,
            batch_size=context.rows,
            draft_token_num=width,
            device=batch.device,
        )
    verify_input.seq_lens_cpu = committed
    verify_input.seq_lens_sum = None if committed is None else int(committed.sum())
    return result


def accept(original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns SGLang's (predicted tokens, accepted lengths with the bonus [B], indices of the accepted [B, width])."""
    predicted, lengths, index = original(verify_input, batch, *args, **kwargs)
    if not step.exists() or batch.forward_mode.is_idle():
        return predicted, lengths, index
    context = step.current()
    cut = ragged.cut(lengths - 1, context.layout)
    lengths = cut.accepted + 1
    kept = torch.arange(index.shape[1], device=index.device) < lengths[:, None]
    context.trimmed = cut.trimmed
    context.observe(cut.accepted)
    return predicted, lengths, torch.where(kept, index, -1)


HOOKS = (
    Hook(_FILE + "EAGLEWorkerV2.alloc_memory_pool", build, AFTER),
    Hook(_FILE + "EAGLEWorkerV2.init_cuda_graphs", step.measure_costs, AFTER),
    Hook(_FILE + "EAGLEWorkerV2.forward_batch_generation", step.forward, AROUND),
    Hook(_FILE + "EagleDraftWorker.draft_forward", draft, AROUND),
    Hook(_FILE + "EagleDraftWorker._draft_extend_for_prefill", extend_prefill, AROUND),
    Hook(_FILE + "EagleDraftWorker._draft_extend_for_decode", extend_decode, AROUND),
    Hook(_UTILS + "eagle_prepare_for_verify", pack, AROUND),
    Hook(_UTILS + "eagle_sample", accept, AROUND),
    Hook(_GRAPHS + "get_spec_info", graphs.verify_input, AROUND),
    *ragged.HOOKS,
)
