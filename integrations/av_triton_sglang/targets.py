"""Every place in SGLang that the plug-in hooks or calls, with the parameters that it counts on.

A hook that SGLang cannot apply is only logged by it, and one whose target has changed would fail in the middle of
serving; so both are checked when the server starts.
"""

import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import version

VERIFIED = ("0.5.23",)

_DSPARK = "sglang.srt.speculative.dspark_components."

STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"
SHUTDOWN = "sglang.srt.managers.scheduler.Scheduler.handle_shutdown"

COMMON: Mapping[str, str] = {
    STATE: "self, recv_req",
    SHUTDOWN: "self, recv_req",
    "sglang.kernels.ops.speculative.verify_sampling.chain_speculative_sampling_triton": (
        "predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, "
        "retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, "
        "threshold_single, threshold_acc, deterministic, *, block_verification"
    ),
    "sglang.srt.managers.overlap_utils.decide_needs_confidence_relay": "",
    _DSPARK + "dspark_planner.ragged_capture_num_tokens": "*, model_runner",
    _DSPARK + "dspark_planner.ragged_capture_max_slots": "*, model_runner",
}

DSPARK: Mapping[str, str] = {
    "sglang.srt.models.dspark.build_confidence_head": "config",
    "sglang.srt.models.deepseek_v4_dspark.build_dspark_v4_confidence_head": "*, config, markov_rank",
    _DSPARK + "dspark_planner.DSparkVerifyPlanner.__init__": (
        "self, *, draft_model, gamma, model_runner, device, tp_rank, verify_num_draft_tokens, tp_sync"
    ),
    _DSPARK + "dspark_planner.DSparkVerifyPlanner.schedule_layout": (
        "self, *, req_pool_indices, prefix_lens, device, confidence, budget, global_num_reqs, dp_tier_num_tokens"
    ),
    _DSPARK + "dspark_draft.draft_markov_block": (
        "*, markov_head, base_logits, anchor_tokens, draft_hidden, step_temperatures, noise, tp_sync, logits_out, "
        "greedy_draft"
    ),
    _DSPARK + "dspark_draft_sampler.megakernel_draft_sampler": "draft_model",
    _DSPARK + "dspark_worker_v2.DSparkWorkerV2.alloc_memory_pool": (
        "self, memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator"
    ),
    _DSPARK + "dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs": "self",
    _DSPARK + "dspark_worker_v2.DSparkWorkerV2.forward_batch_generation": (
        "self, batch, on_publish, grammar_barrier, *, pp_proxy_tensors"
    ),
    _DSPARK + "dspark_observability.DsparkStepObservers.observe_verify_step": (
        "self, *, forward_ct, reqs, bs, proposal_folded, verify_ids_2d, target_logits, layout, confidence, "
        "confidence_raw, prefix_lens, draft_tokens, draft_block, sampling_info, correct_len, cap_trim_lens, bonus, "
        "commit_lens, verify_token_budget, req_pool_indices, verify_tier_num_tokens, dp_tier_num_tokens"
    ),
}

_DFLASH = "sglang.srt.speculative.dflash_worker_v2."
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."
_PACKED: Mapping[str, str] = {
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.supports_ragged_verify": "self",
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": (
        "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, *, capture_hidden_mode, "
        "return_kv_loc_plan"
    ),
    "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify": (
        "self, batch, target_worker, *, defer_metadata_init"
    ),
    "sglang.kernels.ops.speculative.dspark.dspark_verify_window.BuildRaggedVerifyWindow.torch": (
        "*, batch, layout, draft_block_ids, draft_tokens, bs, device, verify_num_draft_tokens, model_runner"
    ),
    "sglang.kernels.ops.speculative.dspark.dspark_verify_window.ScatterCompactToStrided.torch": (
        "*, compact, layout, fill_value, verify_num_draft_tokens"
    ),
}

DFLASH: Mapping[str, str] = {
    **_PACKED,
    _DFLASH + "DFlashWorkerV2.__init__": "self, server_args, gpu_id, nccl_port, target_worker",
    _DFLASH + "DFlashWorkerV2.alloc_memory_pool": (
        "self, memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator"
    ),
    _DFLASH + "DFlashWorkerV2.init_cuda_graphs": "self",
    _DFLASH + "DFlashWorkerV2.forward_batch_generation": "self, batch, on_publish, grammar_barrier, pp_proxy_tensors",
    _DFLASH + "DFlashWorkerV2._greedy_sample_from_vocab_parallel_head": ("self, *, hidden_states, lm_head, chunk_size"),
    _DFLASH + "DFlashWorkerV2._accept_block": (
        "self, *, candidates, next_token_logits, sampling_info, draft_input, prefix_lens, bs, target_predict"
    ),
    _DFLASH + "_DflashDraftSampler.__call__": "self, hidden_states, input_ids",
    _DFLASH + "_commit_accept": "candidates, accept_len, bonus_tokens",
    "sglang.srt.models.dflash.CandidateSelector.build_lattice": (
        "self, *, candidate_ids, unary_logits, hidden_states, anchor_token_ids"
    ),
    "sglang.srt.models.dflash.CandidateSelector.sample_path": (
        "self, *, candidate_ids, scores, uniforms, temperatures, greedy_mask"
    ),
}

_EAGLE = "sglang.srt.speculative.eagle_worker_v2."

EAGLE: Mapping[str, str] = {
    **_PACKED,
    _GRAPHS + "get_spec_info": "self, num_tokens",
    _GRAPHS + "_capture_ragged_verify_layout": "self, num_tokens",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute": (
        "self, forward_batch, select_index"
    ),
    _EAGLE + "EAGLEWorkerV2.alloc_memory_pool": (
        "self, memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator"
    ),
    _EAGLE + "EAGLEWorkerV2.init_cuda_graphs": "self",
    _EAGLE + "EAGLEWorkerV2.forward_batch_generation": "self, batch, on_publish, grammar_barrier, pp_proxy_tensors",
    _EAGLE + "EagleDraftWorker.draft_forward": "self, forward_batch",
    _EAGLE + "EagleDraftWorker._draft_extend_for_prefill": (
        "self, batch, target_hidden_states, next_token_ids, mm_input_embeds, kv_loc_plan"
    ),
    _EAGLE + "EagleDraftWorker._draft_extend_for_decode": "self, batch, batch_result, *, kv_loc_plan",
    "sglang.srt.speculative.eagle_utils.eagle_prepare_for_verify": (
        "verify_input, req_to_token_pool, batch, target_worker"
    ),
    "sglang.srt.speculative.eagle_utils.eagle_sample": (
        "verify_input, batch, logits_output, grammar_mask, uno_target_max_top_k, *, watermark_state, "
        "watermark_full_mask"
    ),
    "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_uniform_func": (
        "req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, *, full_v2p, swa_v2p, "
        "full_out, swa_out, page_size, positions_out, anchor_src, anchor_out"
    ),
}


class TargetError(RuntimeError):
    """The installed SGLang is not the one that the plug-in was written for."""


def parameters(function: object) -> str:
    """Names of the parameters, `*` before those that are keyword-only: "self, a, *, b"."""
    names, keyword_only = [], False
    for each in inspect.signature(inspect.unwrap(function)).parameters.values():  # type: ignore[arg-type]
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            names.append("*")
        prefix = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        keyword_only |= each.kind is each.VAR_POSITIONAL
        names.append(prefix + each.name)
    return ", ".join(names)


def mismatches(expected: Mapping[str, str]) -> list[str]:
    """What of `expected` the installed SGLang does not have, in words."""
    found = []
    for path, wanted in expected.items():
        owner, _, name = path.rpartition(".")
        try:
            function = getattr(pkgutil.resolve_name(owner), name)
        except (ImportError, AttributeError) as error:
            found.append(f"{path} is missing ({error})")
            continue
        got = parameters(function)
        if got != wanted:
            found.append(f"{path} takes ({got}), expected ({wanted})")
    return found


def check(expected: Mapping[str, str]) -> None:
    """Raises TargetError with every mismatch."""
    wrong = mismatches(expected)
    if wrong:
        raise _error(wrong)


def check_applied(paths: Iterable[str], applied: Iterable[str]) -> None:
    """Raises TargetError where SGLang's registry has not applied a hook."""
    missing = sorted(set(paths) - set(applied))
    if missing:
        raise _error([f"{path} could not be hooked (SGLang's log has the reason)" for path in missing])


def _error(problems: list[str]) -> TargetError:
    lines = "\n  - ".join(problems)
    return TargetError(
        f"adaptive verification does not fit the installed SGLang {version('sglang')} (verified: "
        f"{', '.join(VERIFIED)}):\n  - {lines}\nInstall sglang=={VERIFIED[-1]}, or leave out "
        "--enable-adaptive-verification."
    )
