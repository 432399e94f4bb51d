"""The support matrix as data: what adaptive verification refuses at start-up, why, and what to do instead."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from av_triton.settings import MAX_DRAFT_POSITIONS, MAX_ROWS
from av_triton_sglang.flag import Config

ALGORITHMS = ("DSPARK", "DFLASH", "EAGLE", "EAGLE3", "STANDALONE")

# Attention backends of SGLang that read per-request verify lengths.
RAGGED_BACKENDS = ("fa3", "trtllm_mha", "trtllm_mla", "flashinfer", "dsv4")

NOT_YET = {
    "FROZEN_KV_MTP": "Gemma-4 assistant drafters have a worker of their own that takes no per-request lengths",
    "NGRAM": "n-gram drafts have no distribution to take a feature from",
    "UNO": "UNO verifies trees or a mask of its own",
}


class Rule(NamedTuple):
    """`value(arguments, config)` returns what is in the way, as the user would write it, or None."""

    name: str
    value: Callable[[Any, Config], str | None]
    reason: str
    remedy: str


class UnsupportedError(ValueError):
    """Adaptive verification cannot work with these arguments; the message lists all the reasons."""


def _when(field: str, refused: Callable[[Any], bool], option: str) -> Callable[[Any, Config], str | None]:
    def value(arguments: Any, config: Config) -> str | None:
        given = getattr(arguments, field)
        if not refused(given):
            return None
        return option if given is True else f"{option} {given}"

    return value


def _environment(name: str, off: tuple[str, ...] = ("", "0", "false", "False")) -> Callable[[Any, Config], str | None]:
    def value(arguments: Any, config: Config) -> str | None:
        given = os.environ.get(name, "")
        return None if given in off else f"{name}={given}"

    return value


def _algorithm(arguments: Any, config: Config) -> str | None:
    name = arguments.speculative_algorithm
    return None if name in ALGORITHMS else f"--speculative-algorithm {name}"


def _attention(arguments: Any, config: Config) -> str | None:
    prefill = arguments.prefill_attention_backend or arguments.attention_backend
    decode = arguments.decode_attention_backend or arguments.attention_backend
    name = decode if arguments.speculative_attention_mode == "decode" else prefill
    return None if name in (*RAGGED_BACKENDS, *config.ragged_backends) else f"attention backend {name}"


def _positions(arguments: Any, config: Config) -> str | None:
    tokens = arguments.speculative_num_draft_tokens
    return None if tokens is None or 2 <= tokens <= MAX_DRAFT_POSITIONS + 1 else f"{tokens - 1} draft positions"


def _graphs(arguments: Any, config: Config) -> str | None:
    graphs = arguments.cuda_graph_config
    backend = getattr(getattr(graphs, "decode", None), "backend", "disabled")
    if arguments.disable_cuda_graph or backend == "disabled":
        return None
    if config.cuda_graphs and not arguments.speculative_use_rejection_sampling:
        return None
    return f"CUDA graphs ({backend}) for decoding"


ONE_RANK = "admitted lengths are shared within one tensor-parallel group only"

RULES = (
    Rule(
        "algorithm",
        _algorithm,
        "adaptive verification needs a drafter whose logits it can see and whose chain it can cut",
        f"use one of {', '.join(ALGORITHMS)}",
    ),
    Rule(
        "attention_backend",
        _attention,
        "the target's attention must take a verify length per request",
        f"use one of {', '.join(RAGGED_BACKENDS)}, or name one of your own in ragged_backends",
    ),
    Rule(
        "draft_positions",
        _positions,
        f"the planner takes 1 to {MAX_DRAFT_POSITIONS} draft positions",
        "choose another number of draft tokens",
    ),
    Rule(
        "max_running_requests",
        _when("max_running_requests", lambda n: n is not None and n > MAX_ROWS, "--max-running-requests"),
        f"the planner takes batches of up to {MAX_ROWS} requests",
        f"use at most {MAX_ROWS}",
    ),
    Rule(
        "tree",
        _when("speculative_eagle_topk", lambda k: k not in (None, 1), "--speculative-eagle-topk"),
        "a tree has no prefix to cut",
        "use --speculative-eagle-topk 1",
    ),
    Rule(
        "cuda_graphs",
        _graphs,
        "drafting and ragged verification inside CUDA graphs has not run on a GPU yet, and with EAGLE's rejection "
        "sampling it is not built",
        'add --disable-cuda-graph, or try it with {"cuda_graphs": true} (without rejection sampling)',
    ),
    Rule("dp", _when("dp_size", lambda n: n > 1, "--dp"), "replicas are not tested yet", "start one server each"),
    Rule("attn_dp", _when("attn_dp_size", lambda n: n > 1, "--attn-dp-size"), ONE_RANK, "leave it out"),
    Rule("attn_cp", _when("attn_cp_size", lambda n: n > 1, "--attn-cp-size"), ONE_RANK, "leave it out"),
    Rule("dcp", _when("dcp_size", lambda n: n > 1, "--dcp-size"), ONE_RANK, "leave it out"),
    Rule(
        "pp",
        _when("pp_size", lambda n: n > 1, "--pp-size"),
        "only the last stage would know the verify lengths",
        "use --pp-size 1",
    ),
    Rule(
        "adaptive_steps",
        _when("speculative_adaptive", bool, "--speculative-adaptive"),
        "it moves the draft length of the whole batch by past acceptance, against the planner",
        "leave it out",
    ),
    Rule(
        "lora",
        _when("enable_lora", bool, "--enable-lora"),
        "SGLang's LoRA layers take one verify length for the batch",
        "leave it out",
    ),
    Rule(
        "two_batch_overlap",
        _when("enable_two_batch_overlap", bool, "--enable-two-batch-overlap"),
        "SGLang refuses it with compact verification",
        "leave it out",
    ),
    Rule(
        "padding",
        _when("disable_cuda_graph_padding", bool, "--disable-cuda-graph-padding"),
        "SGLang refuses it with compact verification",
        "leave it out",
    ),
    Rule(
        "disaggregation",
        _when("disaggregation_mode", lambda mode: mode != "null", "--disaggregation-mode"),
        "a request that arrives without a prefill would keep its slot's old state",
        "serve prefill and decode together",
    ),
    Rule(
        "pdmux",
        _when("enable_pdmux", bool, "--enable-pdmux"),
        "two streams would share one verifier",
        "leave it out",
    ),
    Rule(
        "mixed_chunk",
        _when("enable_mixed_chunk", bool, "--enable-mixed-chunk"),
        "a batch that both prefills and decodes is not tested",
        "leave it out",
    ),
    Rule(
        "multi_layer_eagle",
        _when("enable_multi_layer_eagle", bool, "--enable-multi-layer-eagle"),
        "its worker drafts with several models and takes no per-request lengths",
        "leave it out",
    ),
    Rule(
        "block_verification",
        _when("speculative_use_block_verification", bool, "--speculative-use-block-verification"),
        "it would weigh rows that were not verified",
        "leave it out",
    ),
    Rule(
        "watermark",
        _when("enable_watermark", bool, "--enable-watermark"),
        "SGLang records watermarked tokens before acceptance is cut",
        "leave it out",
    ),
    Rule(
        "hisparse",
        _when("enable_hisparse", bool, "--enable-hisparse"),
        "its KV locations are planned for one verify width",
        "leave it out",
    ),
    Rule(
        "plan_stream",
        _environment("SGLANG_ENABLE_OVERLAP_PLAN_STREAM"),
        "it would prepare the verify batch on another stream than the drafts are scored on",
        "unset it",
    ),
    Rule(
        "ray",
        _when("use_ray", bool, "--use-ray"),
        "Ray's actors do not inherit the environment that carries the flag",
        "leave it out",
    ),
    Rule(
        "greedy_draft",
        _environment("SGLANG_DSPARK_USE_GREEDY_DRAFT"),
        "it keeps no draft logits",
        "unset it",
    ),
    Rule(
        "simulated_acceptance",
        _environment("SGLANG_SIMULATE_ACC_LEN", off=("", "-1", "-1.0", "0", "0.0")),
        "there is nothing to learn from simulated acceptance",
        "unset it",
    ),
    Rule(
        "dp_prefill_coordination",
        _environment("SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"),
        "it pairs verification with the prefill of other ranks",
        "unset it",
    ),
)


def refusals(arguments: Any, config: Config) -> list[str]:
    """Every reason against these (resolved) server arguments, in words."""
    if arguments.speculative_algorithm is None:
        return ["no drafter: give --speculative-algorithm and --speculative-draft-model-path"]
    found = []
    for rule in RULES:
        value = rule.value(arguments, config)
        if value is not None:
            reason = rule.reason
            if rule.name == "algorithm":
                reason = NOT_YET.get(arguments.speculative_algorithm, reason)
            found.append(f"{value}: {reason}; {rule.remedy}")
    return found


def check(arguments: Any, config: Config) -> None:
    """Raises UnsupportedError."""
    found = refusals(arguments, config)
    if found:
        lines = "\n  - ".join(found)
        raise UnsupportedError(f"--enable-adaptive-verification cannot be used here:\n  - {lines}")
