"""Counters of a verifier for Prometheus, and the figures derived from them.

Everything is a counter, so that any window can be formed afterwards and a scrape that is missed loses nothing. The
calibration error of a position over a window is, in PromQL,

    abs(increase(av_triton_expected_accepted_total[5m]) - increase(av_triton_labelled_accepted_total[5m]))
      / increase(av_triton_labelled_total[5m])

which is NaN, not 0, over a window without labelled drafts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from prometheus_client.metrics_core import CounterMetricFamily

# Sums of probabilities are whole multiples of 2**-20.
Q20 = float(1 << 20)

PER_POSITION = {
    "drafted": "Drafts proposed",
    "admitted": "Drafts sent to verification",
    "trimmed": "Drafts dropped before verification",
    "accepted": "Drafts accepted",
    "labelled": "Drafts with a verdict to learn from: admitted, up to and including the first rejection",
    "labelled_accepted": "Labelled drafts that were accepted",
    "expected_accepted": "Sum of the acceptance probabilities of the labelled drafts",
}
PER_VERIFIER = {
    "steps": "Plans made, one per decode step",
    "refits": "Refits of the coefficients",
    "explored": "Requests that the exploration schedule put first",
    "bypassed": "Budgets that verify all drafts because trimming promised too little",
}


class Source(Protocol):
    """What has counters: a mapping from the names above to int64 arrays, [K] per position, else of one element.

    `expected_accepted` is in Q20. A name that is missing is left out.
    """

    def counters(self) -> Mapping[str, npt.NDArray[np.int64]]: ...


class StepTimes:
    """Host-side totals of predicted and measured step times, in milliseconds."""

    def __init__(self) -> None:
        self.predicted_ms = 0.0
        self.measured_ms = 0.0

    def add(self, predicted_ms: float, measured_ms: float) -> None:
        self.predicted_ms += predicted_ms
        self.measured_ms += measured_ms


class MetricsCollector:
    """A Prometheus collector: `prometheus_client.REGISTRY.register(MetricsCollector(verifier))`.

    labels: constant labels of every sample, such as {"model": ..., "rank": "0"}.
    step_times: totals that the runtime keeps, if it does.
    Raises ImportError with the remedy where prometheus_client is missing, ValueError for a label named "position".
    """

    def __init__(
        self, source: Source, labels: Mapping[str, str] | None = None, step_times: StepTimes | None = None
    ) -> None:
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise ImportError("metrics need prometheus_client: pip install 'av-triton[metrics]'") from error
        self._source = source
        self._labels = dict(labels or {})
        self._step_times = step_times
        if "position" in self._labels:
            raise ValueError("labels has 'position', which names the draft position: choose another name")

    def collect(self) -> Iterator["CounterMetricFamily"]:
        counters = self._source.counters()
        for name, text in PER_POSITION.items():
            if name in counters:
                scale = Q20 if name == "expected_accepted" else 1
                family = self._family(name, f"{text}, by draft position", "position")
                for position, value in enumerate(counters[name]):
                    family.add_metric([*self._labels.values(), str(position)], float(value / scale))
                yield family
        for name, text in PER_VERIFIER.items():
            if name in counters:
                yield self._single(name, text, float(np.asarray(counters[name]).item()))
        if self._step_times is not None:
            yield self._single(
                "predicted_step_seconds", "Step times by the cost table", self._step_times.predicted_ms / 1e3
            )
            yield self._single("step_seconds", "Step times measured", self._step_times.measured_ms / 1e3)

    def _single(self, name: str, text: str, value: float) -> "CounterMetricFamily":
        family = self._family(name, text)
        family.add_metric(list(self._labels.values()), value)
        return family

    def _family(self, name: str, text: str, *labels: str) -> "CounterMetricFamily":
        from prometheus_client.metrics_core import CounterMetricFamily

        return CounterMetricFamily(f"av_triton_{name}", text, labels=[*self._labels, *labels])


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predicted against observed acceptance of the labelled drafts. NaN wherever there was none.

    predicted, observed, error: float64 [K]; error = |predicted - observed|.
    overall: the mean of the error over the labelled drafts.
    """

    predicted: npt.NDArray[np.float64]
    observed: npt.NDArray[np.float64]
    error: npt.NDArray[np.float64]
    overall: float


def calibration(counters: Mapping[str, npt.NDArray[np.int64]]) -> Calibration:
    """Calibration by draft position from counters, or from the difference of two readings."""
    labelled = np.asarray(counters["labelled"], np.float64)
    some = np.where(labelled > 0, labelled, np.nan)
    predicted = np.asarray(counters["expected_accepted"]) / Q20 / some
    observed = np.asarray(counters["labelled_accepted"]) / some
    error = np.abs(predicted - observed)
    total = labelled.sum()
    overall = float(np.nansum(error * labelled) / total) if total else float("nan")
    return Calibration(predicted, observed, error, overall)


def percent(part: float, whole: float) -> str:
    """part / whole as text; "inconclusive" when whole is 0, for nothing was tried."""
    return f"{100 * part / whole:.1f} %" if whole else "inconclusive"


def difference(
    after: Mapping[str, npt.NDArray[np.int64]], before: Mapping[str, npt.NDArray[np.int64]]
) -> dict[str, npt.NDArray[np.int64]]:
    """The counters of the window between two readings of one source."""
    return {name: after[name] - before[name] for name in after}
