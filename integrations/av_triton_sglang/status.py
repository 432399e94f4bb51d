"""What an operator sees: a line in the log at an interval, and `adaptive_verification` in GET /server_info."""

import logging
from typing import TYPE_CHECKING, Any

from av_triton.metrics import Q20, difference
from av_triton_sglang.metrics import Metrics
from av_triton_sglang.step_times import Timed

if TYPE_CHECKING:
    from av_triton_sglang.step import StepContext

logger = logging.getLogger(__name__)


class Reporter:
    """Reads the verifier's counters, which waits for the device: at intervals only."""

    def __init__(self, context: "StepContext", metrics: Metrics | None) -> None:
        self._context, self._metrics = context, metrics
        self._last = context.verifier.counters()
        self._timed = Timed()

    def report(self) -> None:
        """One line about the steps since the last one, and the metrics moved on."""
        now = self._context.verifier.counters()
        new = difference(now, self._last)
        self._last = now
        timed = self._context.times.timed.since(self._timed)
        self._timed = self._context.times.timed
        if self._metrics is not None:
            self._metrics.add(new, timed)
        # A request of K drafts counts once at the first position.
        requests = max(int(new["drafted"][0]), 1)
        logger.info(
            "Adaptive verification: %d steps of %.1f requests, %.2f of %.2f drafts verified and %.2f accepted per "
            "request; of the labelled drafts %.3f accepted, %.3f expected; %d refits, %d explored, %d bypassed; "
            "%.2f ms per step, %.2f predicted.",
            new["steps"],
            requests / max(int(new["steps"]), 1),
            new["admitted"].sum() / requests,
            new["drafted"].sum() / requests,
            new["accepted"].sum() / requests,
            new["labelled_accepted"].sum() / max(int(new["labelled"].sum()), 1),
            new["expected_accepted"].sum() / Q20 / max(int(new["labelled"].sum()), 1),
            new["refits"],
            new["explored"],
            new["bypassed"],
            timed.measured / max(timed.steps, 1),
            timed.predicted / max(timed.steps, 1),
        )

    def status(self) -> dict[str, Any]:
        """Plain data."""
        context = self._context
        status, fitted = context.verifier.status(), context.verifier.coefficients()
        return {
            "active": status.active,
            "reason": status.reason,
            "algorithm": context.algorithm,
            "policy": status.policy,
            "backend": status.backend,
            "additions": list(status.additions),
            "cost": context.cost_source,
            "timed_steps": context.times.timed.steps,
            "measured_ms": context.times.timed.measured,
            "predicted_ms": context.times.timed.predicted,
            "coefficients": {
                name: {"slope": slope, "intercepts": list(intercepts)}
                for name, slope, intercepts in zip(fitted.strata, fitted.slopes, fitted.intercepts, strict=True)
            },
            **{name: value.tolist() for name, value in context.verifier.counters().items()},
        }


def add_to_internal_state(result: Any, controller: Any, request: Any) -> None:
    """A hook after the scheduler's `get_internal_state`."""
    from av_triton_sglang import step

    if step.exists():
        result.internal_state["adaptive_verification"] = step.current().status()
