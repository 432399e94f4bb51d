"""Jobs for the fork server: an engine, some requests, and what came of them."""

import multiprocessing
import time
from typing import Any

from tests.integrations.sglang.cpu_engine.attention_name import NAME

DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "max_running_requests": 4,
    "attention_backend": NAME,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "log_level": "info",
    "random_seed": 0,
}


def generate(
    engine: dict[str, Any],
    prompts: list[list[int]],
    sampling: dict[str, Any] | list[dict[str, Any]],
    repeats: int = 1,
    retract_every: int | None = None,
    captured: list[int] | None = None,
    open_gates: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Token ids, per-request statistics and the scheduler's state after `repeats` runs of the same prompts.

    retract_every: decode steps after which SGLang gives up a running request and resumes it later, as if the cache
    were full. captured: plan as where SGLang has captured verify graphs of these sizes; what they would replay runs
    eagerly. open_gates: serve all additions to the score from the start. options: of `Engine.generate`.
    """
    import sglang
    from sglang.srt.managers import scheduler

    if captured is not None:
        from av_triton_sglang import graphs

        graphs.captured_sizes = lambda runner, rows=1: captured
    if open_gates:
        _open_gates()
    if retract_every is not None:
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, retract_every
    start = time.perf_counter()
    with sglang.Engine(**DEFAULTS | engine) as running:
        ready = time.perf_counter()
        runs = [running.generate(input_ids=prompts, sampling_params=sampling, **options) for _ in range(repeats)]
        done = time.perf_counter()
        state = running.get_server_info()["internal_states"][0]
        return {
            "tokens": [[each["output_ids"] for each in run] for run in runs],
            "meta": [[plain(each["meta_info"]) for each in run] for run in runs],
            "adaptive_verification": state.get("adaptive_verification"),
            "start_seconds": ready - start,
            "generate_seconds": done - ready,
        }


def _open_gates() -> None:
    from av_triton_sglang.step import StepContext

    make = StepContext.__init__

    def made(context: Any, *args: Any, **kwargs: Any) -> None:
        make(context, *args, **kwargs)
        context.verifier.estimator.state.gates.neg_()  # from the bound below to the one above

    StepContext.__init__ = made


def next_logprobs(engine: dict[str, Any], context: list[int], tokens: list[int]) -> list[float]:
    """Log-probabilities of `tokens` after `context`."""
    import sglang

    with sglang.Engine(**DEFAULTS | engine) as running:
        result = running.generate(
            input_ids=[context],
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            token_ids_logprob=[tokens],
        )[0]
    by_token = {token: value for value, token, *_ in result["meta_info"]["output_token_ids_logprobs"][0]}
    return [by_token[token] for token in tokens]


def plain(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if isinstance(value, (int, float, str, list))}


def hooks_of_the_plugin(engine: dict[str, Any]) -> list[str]:
    """What the plug-in has hooked in a process that ran an engine."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    with sglang.Engine(**DEFAULTS | engine) as running:
        running.generate(input_ids=[[5, 6]], sampling_params={"temperature": 0, "max_new_tokens": 8})
    return sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(hook.__module__.startswith("av_triton") for _, hook, _ in hooks)
    )


def serve(arguments: list[str], prompts: list[list[int]], sampling: dict[str, Any], port: int) -> dict[str, Any]:
    """What `python -m sglang.launch_server ARGUMENTS` answers: /generate, then /server_info and /metrics."""
    import requests

    options = {
        "device": "cpu", "dtype": "float32", "mem-fraction-static": 0.3, "max-total-tokens": 8192,
        "max-running-requests": 4, "attention-backend": NAME, "port": port,
    }  # fmt: skip
    flags = ["disable-overlap-schedule", "disable-cuda-graph", "skip-server-warmup", "skip-tokenizer-init"]
    given = [*(f"--{name}={value}" for name, value in options.items()), *(f"--{name}" for name in flags), *arguments]
    process = multiprocessing.Process(target=_launch, args=(given,))
    process.start()
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.is_alive(), "the server ended"
            try:
                if requests.get(f"{address}/health", timeout=20).ok:
                    break
            except requests.RequestException:
                time.sleep(0.2)
        body = {"input_ids": prompts, "sampling_params": sampling}
        answers = requests.post(f"{address}/generate", json=body, timeout=120).json()
        return {
            "tokens": [each["output_ids"] for each in answers],
            "server_info": requests.get(f"{address}/server_info", timeout=20).json(),
            "metrics": requests.get(f"{address}/metrics", timeout=20).text,
        }
    finally:
        process.terminate()


def _launch(arguments: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(arguments))


def generate_with_renamed_target(target: str, **job: Any) -> dict[str, Any]:
    """As `generate`, on an SGLang that lacks one function."""
    import pkgutil

    owner, _, name = target.rpartition(".")
    delattr(pkgutil.resolve_name(owner), name)
    return generate(**job)
