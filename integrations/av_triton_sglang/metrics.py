"""The verifier's counters on SGLang's own /metrics.

SGLang's processes write their metrics to files that the HTTP server adds up (Prometheus' multi-process mode), where
custom collectors have no place; so the names and texts are those of `av_triton.metrics`, and the values plain counters
that are moved on at an interval. Their sum over a window does not depend on when the interval ends.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from av_triton.metrics import PER_POSITION, PER_VERIFIER, Q20
from av_triton_sglang.step_times import Timed

PREFIX = "av_triton_"
PER_TIMED_STEP = {
    "timed_steps": "decode steps that another one followed at once",
    "step_seconds": "their wall time",
    "predicted_step_seconds": "the same by the step costs in force",
}


class Metrics:
    """Built after SGLang has set PROMETHEUS_MULTIPROC_DIR, which it does before it starts its scheduler processes."""

    def __init__(self, model: str, algorithm: str) -> None:
        from prometheus_client import Counter

        self._labels = {"model_name": model, "algorithm": algorithm}
        names = list(self._labels)
        self._per_position: dict[str, Counter] = {
            name: Counter(PREFIX + name, f"{text}, by draft position", [*names, "position"])
            for name, text in PER_POSITION.items()
        }
        self._per_verifier: dict[str, Counter] = {
            name: Counter(PREFIX + name, text, names) for name, text in PER_VERIFIER.items()
        }
        self._per_timed_step: dict[str, Counter] = {
            name: Counter(PREFIX + name, text, names) for name, text in PER_TIMED_STEP.items()
        }

    def add(self, new: Mapping[str, npt.NDArray[np.int64]], timed: Timed) -> None:
        """new, timed: what `AdaptiveVerifier.counters` and `StepTimes.timed` grew by."""
        for name, counter in self._per_position.items():
            scale = Q20 if name == "expected_accepted" else 1
            for position, value in enumerate(new[name]):
                counter.labels(**self._labels, position=str(position)).inc(float(value / scale))
        for name, counter in self._per_verifier.items():
            counter.labels(**self._labels).inc(float(new[name]))
        values = timed.steps, timed.measured / 1e3, timed.predicted / 1e3
        for counter, value in zip(self._per_timed_step.values(), values, strict=True):
            counter.labels(**self._labels).inc(value)


def build(arguments: Any, algorithm: str) -> Metrics | None:
    """None unless the server was started with --enable-metrics."""
    return Metrics(arguments.served_model_name or arguments.model_path, algorithm) if arguments.enable_metrics else None
