"""A job for the fork server: an engine, watched for scores of one request that are graded for the next in its slot."""

import itertools
import json
from pathlib import Path
from typing import Any

from tests.integrations.sglang.cpu_engine import jobs


def generate(watch: str, forget: bool = False, **job: Any) -> dict[str, Any]:
    """As `jobs.generate`. Adds "reused": resets of slots that had been scored, and "stale": graded scores
    that are older than the last reset of their slot. watch: a file to count in.

    forget: plant the mistake that has to be seen: no reset, and EAGLE's first draft after a prefill not scored.
    """
    from av_triton_sglang.step import StepContext

    reset, score, sample, observe = StepContext.reset, StepContext.score, StepContext.sample, StepContext.observe
    scored: set[tuple[int, int]] = set()  # (slot, position), since the slot's last reset
    count = {"reused": 0, "stale": 0}

    def on_reset(context: Any, slots: Any, requests: list[Any]) -> None:
        if not forget:
            reset(context, slots, requests)
        old = {each for each in scored if each[0] in slots.tolist()}
        count["reused"] += len({slot for slot, _ in old})
        scored.difference_update(old)

    def on_score(
        context: Any,
        logits: Any,
        position: Any = None,
        temperature: Any = None,
        first: int = 0,
        slots: Any = None,
        **known: Any,
    ) -> None:
        if forget and slots is not None:
            return
        score(context, logits, position, temperature, first, slots, **known)
        rows = context.slots(logits.shape[0], first) if slots is None else slots
        positions = range(context.num_draft_positions) if position is None else [position]
        scored.update(itertools.product(rows.tolist(), positions))

    def on_sample(context: Any, logits: Any, first: int, *hidden: Any) -> Any:
        scored.update(
            itertools.product(context.slots(logits.shape[0], first).tolist(), range(context.num_draft_positions))
        )
        return sample(context, logits, first, *hidden)

    def on_observe(context: Any, accepted: Any) -> None:
        slots, scores = context.slots(context.rows), context.verifier.estimator.state.scores
        rows, positions = (scores[slots] >= 0).nonzero(as_tuple=True)
        graded = set(zip(slots[rows].tolist(), positions.tolist(), strict=True))
        count["stale"] += len(graded - scored)
        observe(context, accepted)
        Path(watch).write_text(json.dumps(count))

    StepContext.reset, StepContext.score, StepContext.sample = on_reset, on_score, on_sample
    StepContext.observe = on_observe
    result = jobs.generate(**job)
    return result | json.loads(Path(watch).read_text())
