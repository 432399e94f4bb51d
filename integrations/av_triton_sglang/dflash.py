"""DFLASH drafters: a block drafted in one forward, by argmax or (DFlash2) by a walk over candidates.

SGLang's worker drafts and verifies a fixed width. Here the features come from the logits that the drafts were chosen
by, the verify batch is packed before the target's forward and unpacked after it, and acceptance is cut.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from av_triton_sglang import flag, ragged, step
from av_triton_sglang.flag import FlagError
from av_triton_sglang.hooks import AFTER, AROUND, BEFORE, Hook

_WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2."

# Rows of logits in memory at once, as in SGLang's own loop.
CHUNK = 256


def refuse(result: None, worker: Any, *args: Any, **kwargs: Any) -> None:
    """After the worker is built: what only the drafter's checkpoint tells."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if flag.current() is None:
        return
    for found, what in (
        (worker._is_domino, "a Domino head drafts by a recurrent rollout whose logits it does not keep"),
        (worker.lilicorr is not None, "a LiLiCorr head's drafts are not supported"),
        (
            mambaish_config(worker.model_runner.model_config) is not None,
            "a target with linear attention is not supported: its state is committed for one verify width",
        ),
    ):
        if found:
            raise FlagError(f"this DFLASH drafter cannot use adaptive verification: {what}; leave out the flag")


def build(result: None, worker: Any, *args: Any, **kwargs: Any) -> None:
    launch = flag.current()
    if launch is not None:
        drafter = worker.draft_model_runner.model_config
        positions = int(worker.block_size) - 1
        step.build(launch, worker.server_args, worker.model_runner, positions, hidden_size=int(drafter.hidden_size))


def draft(
    original: Callable[..., Tensor], worker: Any, *, hidden_states: Tensor, lm_head: Any, chunk_size: int = CHUNK
) -> Tensor:
    """Argmax drafts [B * K] of hidden states [B * K, H], with their scores; one product with the head serves both."""
    if not step.exists():
        return original(worker, hidden_states=hidden_states, lm_head=lm_head, chunk_size=chunk_size)
    from sglang.srt.speculative.dflash_utils import is_dense_head_weight

    weight: Any = getattr(lm_head, "weight", None)
    if not is_dense_head_weight(weight):
        raise RuntimeError("adaptive verification needs a dense LM head for DFLASH: leave out the flag")
    first_token = 0
    if hasattr(lm_head, "shard_indices"):
        shard = lm_head.shard_indices
        weight, first_token = weight[: shard.num_org_elements], int(shard.org_vocab_start_index)
    return _argmax_and_score(step.current(), hidden_states, weight, first_token, chunk_size)


def draft_captured(original: Callable[..., None], sampler: Any, hidden_states: Tensor, input_ids: Any = None) -> None:
    """As `draft`, where SGLang folds it into the draft graph. hidden_states: [B * (K + 1), H], anchors first."""
    if not step.exists():
        return original(sampler, hidden_states, input_ids)
    hidden = hidden_states.unflatten(0, (-1, sampler.block_size))[:, 1:].flatten(0, 1)
    weight = sampler.weight[: sampler.num_org]
    tokens = _argmax_and_score(step.current(), hidden, weight, sampler.org_vocab_start, hidden.shape[0])
    sampler.out[: tokens.shape[0]].copy_(tokens)
    return None


def _argmax_and_score(
    context: step.StepContext, hidden_states: Tensor, weight: Tensor, first_token: int, chunk_size: int
) -> Tensor:
    """weight: [V, H] of the LM head, on several ranks this one's tokens, which begin at `first_token`."""
    positions = context.num_draft_positions
    rows = max(chunk_size // positions, 1) * positions
    tokens = torch.empty(hidden_states.shape[0], dtype=torch.long, device=hidden_states.device)
    for start in range(0, hidden_states.shape[0], rows):
        hidden = hidden_states[start : start + rows]
        logits = torch.matmul(hidden.to(weight.dtype), weight.T)
        blocks = logits.view(-1, positions, logits.shape[-1])
        if context.ranks.alone:
            drafts = context.sample(blocks, start // positions, hidden.view(-1, positions, hidden.shape[-1]))
            tokens[start : start + rows].view(-1, positions).copy_(drafts)
        else:
            tokens[start : start + rows] = context.score_shard(blocks, first_token, start // positions).view(-1)
    return tokens


def note(selector: Any, *, hidden_states: Tensor, **kwargs: Any) -> None:
    """Keep the hidden states [B, K, H] that DFlash2's candidates and their scores come from, for the walk."""
    if step.exists():
        step.current().hidden = hidden_states


def walk(original: Callable[..., Any], selector: Any, *, candidate_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
    """DFlash2's choice of a draft among the C candidates of each position.

    candidate_ids: [B, K, C]. scores: [B, K, C, C], by the candidate before (at position 0 all alike) and the candidate.
    Returns SGLang's (drafts, their distributions).
    """
    tokens, distributions = original(selector, candidate_ids=candidate_ids, scores=scores, **kwargs)
    if step.exists():
        taken = (candidate_ids == tokens.view(candidate_ids.shape[:2])[..., None]).int().argmax(-1)
        before = torch.cat([torch.zeros_like(taken[:, :1]), taken[:, :-1]], 1)
        walked = scores.gather(2, before[:, :, None, None].expand(-1, -1, 1, scores.shape[3]))[:, :, 0]
        # Not from `distributions`, which have no odds where the argmax was taken.
        drawn_at = kwargs["temperatures"].masked_fill(kwargs["greedy_mask"], 0.0)
        context = step.current()
        context.score(walked, temperature=drawn_at, tokens=taken, hidden=context.hidden)
    return tokens, distributions


def pack(original: Callable[..., Any], verify_input: Any, batch: Any, target_worker: Any, **kwargs: Any) -> Any:
    """Around the preparation of the verify batch."""
    if not step.exists() or batch.forward_mode.is_idle():
        return original(verify_input, batch, target_worker, **kwargs)
    context = step.current()
    ids = verify_input.draft_token.view(context.rows, context.num_draft_positions + 1)
    plan = ragged.layout(context, ids.device, target_worker.model_runner)
    packed = ragged.window(batch, plan, ids, target_worker.model_runner)
    verify_input.draft_token, verify_input.positions = packed.verify_ids, packed.positions
    verify_input.ragged_verify_layout, verify_input.kv_loc_cols = plan, packed.window_index
    committed = batch.seq_lens_cpu
    if committed is not None:
        committed = committed - ids.shape[1]  # the worker has added the full width
    verify_input.live_seq_lens_cpu = committed
    batch.out_cache_loc = packed.verify_cache_loc
    ragged.extend_host_lengths(batch, plan, committed, ids.shape[1])
    return original(verify_input, batch, target_worker, **kwargs)


def accept(original: Callable[..., Any], worker: Any, *, candidates: Tensor, **kwargs: Any) -> Any:
    """candidates: [B, K + 1]. Returns SGLang's (accepted, committed, bonus, out_tokens, new_seq_lens)."""
    accepted, committed, bonus, out, lengths = original(worker, candidates=candidates, **kwargs)
    if not step.exists():
        return accepted, committed, bonus, out, lengths
    from sglang.srt.speculative.dflash_worker_v2 import _commit_accept

    context = step.current()
    cut = ragged.cut(accepted, context.layout)
    after = candidates.gather(1, (cut.accepted + 1).clamp(max=candidates.shape[1] - 1).long()[:, None])[:, 0]
    bonus = torch.where(cut.over, after.to(bonus.dtype), bonus)
    out, committed = _commit_accept(candidates, cut.accepted, bonus)
    context.trimmed = cut.trimmed
    context.observe(cut.accepted)
    return cut.accepted, committed, bonus, out, None


HOOKS = (
    Hook(_WORKER + "__init__", refuse, AFTER),
    Hook(_WORKER + "alloc_memory_pool", build, AFTER),
    Hook(_WORKER + "init_cuda_graphs", step.measure_costs, AFTER),
    Hook(_WORKER + "forward_batch_generation", step.forward, AROUND),
    Hook(_WORKER + "_greedy_sample_from_vocab_parallel_head", draft, AROUND),
    Hook("sglang.srt.speculative.dflash_worker_v2._DflashDraftSampler.__call__", draft_captured, AROUND),
    Hook("sglang.srt.models.dflash.CandidateSelector.build_lattice", note, BEFORE),
    Hook("sglang.srt.models.dflash.CandidateSelector.sample_path", walk, AROUND),
    Hook(_WORKER + "_accept_block", accept, AROUND),
    Hook("sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify", pack, AROUND),
    *ragged.HOOKS,
)
