"""A job for the fork server: an engine, watched for scores of one request that are graded for the next in its slot."""

import json
from pathlib import Path
from typing import Any

from tests.integrations.sglang.cpu_engine import jobs


def generate(watch: str, forget_resets: bool = False, **job: Any) -> dict[str, Any]:
    """As `jobs.generate`. Adds "reused": resets of slots that had been scored, and "stale": graded rows whose scores
    are older than the last reset of their slot. watch: a file to count in.

    forget_resets: plant the mistake that has to be seen.
    """
    from av_triton_sglang.step import StepContext

    reset, score, observe = StepContext.reset, StepContext.score, StepContext.observe
    scored: set[int] = set()
    count = {"reused": 0, "stale": 0}

    def on_reset(context: Any, slots: Any, requests: list[Any]) -> None:
        if not forget_resets:
            reset(context, slots, requests)
        count["reused"] += len(scored.intersection(slots.tolist()))
        scored.difference_update(slots.tolist())

    def on_score(
        context: Any, logits: Any, position: Any = None, temperature: Any = None, first: int = 0, slots: Any = None
    ) -> None:
        score(context, logits, position, temperature, first, slots)
        scored.update((context.slots(logits.shape[0], first) if slots is None else slots).tolist())

    def on_observe(context: Any, accepted: Any) -> None:
        slots, scores = context.slots(context.rows), context.verifier.estimator.state.scores
        graded = slots[(scores[slots] >= 0).any(1)].tolist()
        count["stale"] += len(set(graded) - scored)
        observe(context, accepted)
        Path(watch).write_text(json.dumps(count))

    StepContext.reset, StepContext.score, StepContext.observe = on_reset, on_score, on_observe
    result = jobs.generate(**job)
    return result | json.loads(Path(watch).read_text())
