"""Jobs for the fork server: an engine on several ranks, and what each of them decided in every decode step."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.integrations.sglang.cpu_engine.jobs import generate

DELAY = 0.004  # seconds, at most


def generate_on_ranks(folder: str, noise: float = 0.0, **job: Any) -> dict[str, Any]:
    """As `jobs.generate`, with random delays on every rank. Adds "ranks": per rank, the decisions step by step.

    noise: standard deviation of what is added to the draft logits of rank 1.
    """
    _delay()
    _record(Path(folder))
    if noise:
        _disturb(noise)
    result = generate(**job)
    files = sorted(Path(folder).glob("rank*.jsonl"))
    return result | {"ranks": [[json.loads(line) for line in each.read_text().splitlines()] for each in files]}


def _rank() -> int:
    return torch.distributed.get_rank()


def _around(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _delay() -> None:
    """Before a step begins, and before its results are read: as where a copy to the host is late on one rank."""
    from sglang.srt.managers.scheduler import Scheduler

    from av_triton_sglang.step import StepContext

    pick = random.Random()

    def late(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            time.sleep(pick.random() * DELAY)
            return original(*args, **kwargs)

        return function

    _around(StepContext, "begin", late)
    _around(Scheduler, "process_batch_result", late)


def _record(folder: Path) -> None:
    from av_triton_sglang.step import StepContext

    def keep_plan(original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(context: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(context, *args, **kwargs)
            context.recorded = {name: getattr(result, name).tolist() for name in ("admitted", "budget", "proposal")}
            return result

        return plan

    def write(original: Callable[..., Any]) -> Callable[..., Any]:
        def end(context: Any) -> None:
            original(context)
            state = context.verifier.estimator.state
            line = context.recorded | {
                "slots": context.slots(context.rows).tolist(),
                "slopes": state.slopes.tolist(),
                "intercepts": state.intercepts.tolist(),
                "sums": state.sums.tolist(),
                "offsets": state.offsets.tolist(),
            }
            with (folder / f"rank{_rank()}.jsonl").open("a") as file:
                print(json.dumps(line), file=file)

        return end

    _around(StepContext, "plan", keep_plan)
    _around(StepContext, "end", write)


def _disturb(noise: float) -> None:
    """Rank 1's draft logits are a little off, as after an all-reduce that added in another order."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.dspark import Qwen3DSparkModel

    generator = torch.Generator().manual_seed(1)

    def add(logits: torch.Tensor) -> None:
        if _rank() == 1:
            logits.add_(torch.randn(logits.shape, generator=generator), alpha=noise)

    def base_logits(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            logits, features = original(*args, **kwargs)
            add(logits)
            return logits, features

        return compute

    def draft_forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(runner, *args, **kwargs)
            if runner.is_draft_worker and result.logits_output.next_token_logits is not None:
                add(result.logits_output.next_token_logits)
            return result

        return forward

    _around(Qwen3DSparkModel, "compute_base_logits", base_logits)
    _around(ModelRunner, "forward", draft_forward)
