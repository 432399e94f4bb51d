"""Wall time of decode steps, beside what the step costs predict for them."""

import time

from av_triton import CostTable


class StepTimes:
    """Of steps that another decode step follows at once: the time from one begin to the next.

    After a prefill, or when the server had nothing to do, that time would not be the step's.
    """

    def __init__(self, table: CostTable | None, max_requests: int, max_tokens: int) -> None:
        self.steps = 0
        self.measured = self.predicted = 0.0  # sums over `steps`, in milliseconds
        self._limits = max_requests, max_tokens
        self._began = 0.0
        self._expected: float | None = None
        self.use(table)

    def use(self, table: CostTable | None) -> None:
        """The table in force from now on; None: there is none yet, and nothing is counted."""
        self._costs = None if table is None else table.dense(*self._limits)

    def begin(self) -> None:
        now = time.perf_counter()
        if self._expected is not None:
            self.steps += 1
            self.measured += (now - self._began) * 1e3
            self.predicted += self._expected
        self._began, self._expected = now, None

    def plan(self, requests: int, tokens: int) -> None:
        """What the step that began verifies, anchors included."""
        if self._costs is not None:
            self._expected = float(self._costs.draft[requests] + self._costs.verify[tokens])

    def interrupt(self) -> None:
        """Something else than a decode step runs next."""
        self._expected = None
