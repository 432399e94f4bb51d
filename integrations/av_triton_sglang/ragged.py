"""Ragged verification in SGLang's terms: from a plan to a packed batch and back to one row per draft position.

A packed batch holds `admitted + 1` tokens of each request, one request after the other. SGLang's DSPARK worker packs
and unpacks by itself; for the other workers that is done here. `width` is K + 1.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from av_triton_sglang import graphs, step
from av_triton_sglang.hooks import AFTER, Hook
from av_triton_sglang.step import StepContext


def layout(context: StepContext, device: Any, runner: Any, drafts: Tensor | None = None) -> Any:
    """Plan the running step: a RaggedVerifyLayout in which row b has its anchor and `admitted[b]` drafts.

    With captured graphs for the batch the host picks one of their sizes by an earlier proposal, and the device fills
    it, as far as there are drafts; without them the host waits for the lengths.

    runner: the target's ModelRunner. drafts: see `StepContext.plan`.
    """
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, round_up_grid

    rows, sizes = context.rows, graphs.captured_sizes(runner, context.rows)
    if sizes is None:
        plan = context.plan(drafts)
        lengths = (plan.admitted + 1).tolist()
        context.follow(plan)
        size = sum(lengths)
        result = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lengths, device=device, grid=[size])
    else:
        budget = context.host_budget()
        size = round_up_grid(rows + budget, sizes)
        if context.config.settings.policy != "fixed":
            budget = min(size - rows, rows * context.num_draft_positions)
        plan = context.plan(drafts, budget)
        result = RaggedVerifyLayout.from_verify_lens_device(verify_lens=plan.admitted + 1, graph_num_tokens=size)
    context.times.plan(rows, size, context.drafted / context.num_draft_positions)
    context.layout = result
    return result


def window(batch: Any, plan: Any, ids: Tensor, model_runner: Any) -> Any:
    """SGLang's RaggedVerifyWindow: the packed ids, positions and KV locations. ids: [B, width], anchors first."""
    from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildRaggedVerifyWindow

    return BuildRaggedVerifyWindow.execute(
        batch=batch,
        layout=plan,
        draft_block_ids=ids,
        draft_tokens=ids[:, 1:],
        bs=ids.shape[0],
        device=ids.device,
        verify_num_draft_tokens=ids.shape[1],
        model_runner=model_runner,
    )


def extend_host_lengths(batch: Any, plan: Any, committed: Tensor | None, width: int) -> None:
    """The host's copy of the sequence lengths during verification, or a bound on them where only the device knows.

    committed: int [B] on the host, if SGLang has it.
    """
    if committed is not None:
        known = plan.verify_lens_cpu
        batch.seq_lens_cpu = committed + (width if known is None else torch.tensor(known, dtype=committed.dtype))
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())


def unpack(result: Any, worker: Any, *args: Any, is_verify: bool = False, **kwargs: Any) -> None:
    """A hook after the target worker's forward: logits and hidden states back to [B * width, ...].

    Rows that were not verified become 0 and are never read: acceptance is cut at `admitted`.
    """
    if not is_verify or not step.exists() or step.current().layout is None:
        return
    from sglang.kernels.ops.speculative.dspark.dspark_verify_window import ScatterCompactToStrided

    context = step.current()
    for name in ("next_token_logits", "hidden_states"):
        packed = getattr(result.logits_output, name)
        if packed is not None:
            rows = ScatterCompactToStrided.execute(
                compact=packed,
                layout=context.layout,
                fill_value=0.0,
                verify_num_draft_tokens=context.num_draft_positions + 1,
            )
            setattr(result.logits_output, name, rows)


class Cut(NamedTuple):
    """Acceptance after the cut at `admitted`; all [B], in the dtype of what was cut."""

    accepted: Tensor
    over: Tensor  # bool: acceptance ran past the cut
    trimmed: Tensor  # accepted drafts that were cut away


def cut(accepted: Tensor, plan: Any) -> Cut:
    """The verdict on draft `admitted + 1` is a proper one (its row was verified), later ones are not.

    So a request whose acceptance ran past the cut takes that draft as its bonus: it is the target's own sample there.
    """
    limit = (plan.verify_lens - 1).to(accepted.dtype)
    kept = torch.minimum(accepted, limit)
    return Cut(kept, accepted > limit, accepted - kept)


# Of the workers that do not pack by themselves.
HOOKS = (
    Hook("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.supports_ragged_verify", graphs.by_tokens, AFTER),
    Hook("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", unpack, AFTER),
)
