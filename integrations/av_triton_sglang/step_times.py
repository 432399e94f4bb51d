"""Wall time of decode steps, beside what the step costs predict for them."""

import statistics
import time
from collections import deque
from typing import NamedTuple

from av_triton import CostTable

# A refinement moves the samples around this many sizes by this share, where so many steps were timed.
REFINED_SIZES, WEIGHT, LEAST_STEPS = 16, 0.3, 5


class Timed(NamedTuple):
    """Sums over timed steps, in milliseconds."""

    steps: int = 0
    measured: float = 0.0
    predicted: float = 0.0

    def since(self, earlier: "Timed") -> "Timed":
        return Timed(self.steps - earlier.steps, self.measured - earlier.measured, self.predicted - earlier.predicted)


class StepTimes:
    """Of steps that another decode step follows at once: the time from one begin to the next.

    After a prefill, or when the server had nothing to do, that time would not be the step's. behind: how many steps
    the device is behind the host, so that this time is the one of an earlier step. keep: for `refined`.
    """

    def __init__(
        self, table: CostTable | None, max_requests: int, max_tokens: int, behind: int = 0, keep: bool = True
    ) -> None:
        self.timed = Timed()
        self._limits, self._keep = (max_requests, max_tokens), keep
        self._samples: dict[tuple[int, int], list[float]] = {}  # of steps since the last refinement, by size
        self._began = 0.0
        # (size, predicted, what its drafts that were left out would have added)
        self._planned: deque[tuple[tuple[int, int], float, float]] = deque(maxlen=behind + 1)
        self.use(table)

    def use(self, table: CostTable | None) -> None:
        """The table in force from now on; None: there is none yet, and nothing is counted."""
        self.table = table
        self._costs = None if table is None else table.dense(*self._limits)

    def begin(self) -> None:
        now = time.perf_counter()
        if len(self._planned) == self._planned.maxlen:
            milliseconds = (now - self._began) * 1e3
            size, expected, left_out = self._planned.popleft()
            steps, measured, predicted = self.timed
            self.timed = Timed(steps + 1, measured + milliseconds, predicted + expected)
            if self._keep:
                self._samples.setdefault(size, []).append(milliseconds + left_out)
        self._began = now

    def plan(self, requests: int, tokens: int, drafted: float = 1.0) -> None:
        """What the step that began verifies, anchors included; drafted: the share of the K positions."""
        if self._costs is not None:
            draft, verify = float(self._costs.draft[requests]), float(self._costs.verify[tokens])
            left_out = (1 - drafted) * draft
            self._planned.append(((requests, tokens), draft + verify - left_out, left_out))

    def interrupt(self) -> None:
        """Something else than a decode step runs next."""
        self._planned.clear()

    def refined(self) -> CostTable | None:
        """The table moved towards the median times of the sizes that came most often; None: nothing was seen.

        A step's time holds what the table does not: the scheduler's own work, and the contexts that requests have by
        now. Both belong to what one more verified token is weighed against.
        """
        samples, self._samples = self._samples, {}
        table = self.table
        common = sorted(samples, key=lambda size: -len(samples[size]))[:REFINED_SIZES]
        for requests, tokens in common:
            times = samples[requests, tokens]
            if table is not None and len(times) >= LEAST_STEPS:
                table = table.refine(tokens, statistics.median(times), requests, WEIGHT)
        return None if table is self.table else table
