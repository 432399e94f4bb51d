"""DSPARK drafters without a confidence head, or with one that is left aside.

SGLang's worker already verifies ragged lengths; what it takes from a confidence head comes from the estimator here.
Its planner is built as for static verification (so that it neither misses a head nor relays confidences to the CPU) and
then told to verify compactly the lengths that `schedule_layout` gets from the verifier.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from av_triton_sglang import flag, ragged, step
from av_triton_sglang.flag import FlagError
from av_triton_sglang.hooks import AFTER, AROUND, BEFORE, Hook

_COMPONENTS = "sglang.srt.speculative.dspark_components."


def leave_out_head(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of both model families' builders of the confidence head."""
    config = kwargs["config"] if "config" in kwargs else args[0]
    launch = flag.current()
    if launch is None:
        return original(*args, **kwargs)
    if getattr(config, "enable_confidence_head", True) and launch.config.dspark_head == "head":
        raise FlagError(
            "this DSPARK checkpoint has a confidence head (enable_confidence_head is not false): start without "
            "--enable-adaptive-verification and with SGLANG_RAGGED_VERIFY_MODE=compact to use it, or set "
            '{"dspark_head": "estimator"} in --adaptive-verification-config to score by the estimator instead'
        )
    return None


def build_planner(original: Callable[..., None], planner: Any, **kwargs: Any) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.speculative.ragged_verify import RaggedVerifyMode

    if flag.current() is None:
        return original(planner, **kwargs)
    with envs.SGLANG_RAGGED_VERIFY_MODE.override(RaggedVerifyMode.STATIC.value):
        original(planner, **kwargs)
    planner._ragged_verify_mode = RaggedVerifyMode.COMPACT
    planner._is_verify_all = False
    return None


def schedule(original: Callable[..., Any], planner: Any, *, device: Any, **kwargs: Any) -> Any:
    if not step.exists():
        return original(planner, device=device, **kwargs)
    return ragged.layout(step.current(), device, planner.model_runner)


def no_megakernel(original: Callable[..., Any], draft_model: Any) -> Any:
    """NVIDIA's fused sampler leaves the logits of argmax rows unwritten; SGLang's own is captured instead."""
    return original(draft_model) if flag.current() is None else None


def no_relay(original: Callable[[], bool]) -> bool:
    """The budget is decided where the scores are; no confidence travels to the CPU."""
    return flag.current() is None and original()


def score(
    result: tuple[Tensor, Tensor | None], *, step_temperatures: Tensor, draft_hidden: Tensor | None, **kwargs: Any
) -> None:
    """The logits that the block was sampled from, Markov bias included."""
    tokens, logits = result
    if not step.exists():
        return
    if logits is None:
        raise RuntimeError("DSPARK kept no draft logits: unset SGLANG_DSPARK_USE_GREEDY_DRAFT")
    step.current().score(logits, temperature=step_temperatures, tokens=tokens.long(), hidden=draft_hidden)


def build(result: None, worker: Any, *args: Any, **kwargs: Any) -> None:
    launch = flag.current()
    if launch is not None:
        hidden_size = int(worker.draft_model_runner.model_config.hidden_size)
        step.build(launch, worker.server_args, worker.model_runner, worker.gamma, hidden_size=hidden_size)


def observe(observers: Any, *, correct_len: Tensor, **kwargs: Any) -> None:
    if step.exists():
        step.current().observe(correct_len)


HOOKS = (
    Hook("sglang.srt.models.dspark.build_confidence_head", leave_out_head, AROUND),
    Hook("sglang.srt.models.deepseek_v4_dspark.build_dspark_v4_confidence_head", leave_out_head, AROUND),
    Hook(_COMPONENTS + "dspark_planner.DSparkVerifyPlanner.__init__", build_planner, AROUND),
    Hook(_COMPONENTS + "dspark_planner.DSparkVerifyPlanner.schedule_layout", schedule, AROUND),
    Hook(_COMPONENTS + "dspark_draft.draft_markov_block", score, AFTER),
    Hook(_COMPONENTS + "dspark_draft_sampler.megakernel_draft_sampler", no_megakernel, AROUND),
    Hook(_COMPONENTS + "dspark_worker_v2.DSparkWorkerV2.alloc_memory_pool", build, AFTER),
    Hook(_COMPONENTS + "dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs", step.measure_costs, AFTER),
    Hook(_COMPONENTS + "dspark_worker_v2.DSparkWorkerV2.forward_batch_generation", step.forward, AROUND),
    Hook(_COMPONENTS + "dspark_observability.DsparkStepObservers.observe_verify_step", observe, BEFORE),
    Hook("sglang.srt.managers.overlap_utils.decide_needs_confidence_relay", no_relay, AROUND),
)
