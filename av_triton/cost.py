"""CostTable: what a step costs, in milliseconds, by requests drafted and tokens verified.

    step(requests, tokens) = draft(requests) + verify(tokens)

Below the largest captured size a token count costs what the next captured size costs, for that is the graph that
runs. Above it the step is eager: linear interpolation between eager samples. The jump from the one to the other is
never interpolated. Larger steps cannot cost less, so noise is removed by a cumulative maximum, of captured and eager
samples apart.
"""

import math
import operator
import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from av_triton.files import write_atomic

Samples = list[tuple[int, float]]
Sizes = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]
Arrays = tuple[Sizes, Times]

# A verify curve that rises by no more than this over its range offers nothing to trim.
FLAT = 0.01


@dataclass(frozen=True, slots=True)
class DenseCost:
    """A CostTable evaluated at every size.

    draft: float64 [max_requests + 1], ms for drafting all positions of n requests.
    verify: float64 [max_tokens + 1], ms for verifying n tokens. Both are positive and never fall; entry 0 is entry 1.
    padded: int32 [max_tokens + 1], the tokens that really run for n: the next captured size, n itself above the
        largest, 0 for 0.
    is_flat: verify rises by at most 1 % over the range, so that trimming gains nothing.
    """

    draft: Times
    verify: Times
    padded: npt.NDArray[np.int32]
    is_flat: bool


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured step times. Invalid values raise ValueError at construction.

    draft: (requests, ms) samples, sizes ascending: drafting all K positions.
    verify: (tokens, ms) samples, sizes ascending: the target's forward.
    captured: token counts, ascending, for which the verify forward has a captured graph.
    draft_captured: request counts, ascending, for which the drafter has one.
    A sample at a size between two captured ones is a sample of the larger one.
    """

    draft: Samples
    verify: Samples
    captured: list[int] = []
    draft_captured: list[int] = []

    def __post_init__(self) -> None:
        for name, captured_name, unit in (("draft", "draft_captured", "requests"), ("verify", "captured", "tokens")):
            samples = _checked_samples(getattr(self, name), name, unit)
            captured = _checked_sizes(getattr(self, captured_name), captured_name)
            if captured and samples[0][0] > captured[-1]:
                raise ValueError(
                    f"CostTable.{name} has no sample up to {captured[-1]}, the largest of {captured_name}: the cost of "
                    f"the captured graphs is unknown; measure some of them, or leave {captured_name} empty"
                )
            msgspec.structs.force_setattr(self, name, samples)
            msgspec.structs.force_setattr(self, captured_name, captured)

    def dense(self, max_requests: int, max_tokens: int) -> DenseCost:
        """The table at every size up to the two bounds (each at least 1), extrapolated by the last slope."""
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name} = {value}: give at least 1")
        draft, _ = _curve(self.draft, self.draft_captured, max_requests)
        verify, padded = _curve(self.verify, self.captured, max_tokens)
        return DenseCost(draft, verify, padded, bool(verify[-1] <= (1 + FLAT) * verify[0]))

    def refine(self, tokens: int, ms: float, requests: int | None = None, weight: float = 0.05) -> "CostTable":
        """A new table, moved towards a live step that took `ms`; this one stays as it is.

        With `requests`, `ms` is the time of the whole step, else of the verify forward. The samples around the size
        are multiplied by (ms / predicted) ** (weight * nearness), the ratio cut to [1/2, 2]: a stall moves a sample
        by 2 ** weight at most. The number of samples does not grow.
        Ranks that must agree refine on one of them and send the table.
        """
        if tokens < 1 or (requests is not None and requests < 1):
            raise ValueError(f"tokens = {tokens}, requests = {requests}: give at least 1")
        if not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"ms = {ms}: give a positive, finite time in milliseconds")
        if not 0 < weight <= 1:
            raise ValueError(f"weight = {weight}: give a number above 0, up to 1")
        dense = self.dense(requests or 1, tokens)
        predicted = dense.verify[tokens] + (0.0 if requests is None else dense.draft[requests])
        factor = min(max(ms / float(predicted), 0.5), 2.0) ** weight
        draft = self.draft if requests is None else _scaled(self.draft, self.draft_captured, requests, factor)
        return msgspec.structs.replace(self, draft=draft, verify=_scaled(self.verify, self.captured, tokens, factor))

    @classmethod
    def measure(
        cls,
        verify: Callable[[int], object],
        sizes: Sequence[int] | None = None,
        *,
        max_tokens: int,
        draft: Callable[[int], object],
        max_requests: int,
        draft_sizes: Sequence[int] | None = None,
        captured: Sequence[int] = (),
        draft_captured: Sequence[int] = (),
        warmup: int = 1,
        repeats: int = 5,
        synchronize: Callable[[], object] | None = None,
        progress: bool = True,
    ) -> "CostTable":
        """Times `verify(tokens)` and `draft(requests)`, the median of `repeats` passes, under a progress bar.

        max_tokens, max_requests: the bounds of the run-time. No call exceeds them, and each is measured itself, so that
            the table covers all that can happen and nothing that cannot.
        sizes, draft_sizes: what to measure; by default the captured sizes and a few per power of two. Larger ones
            than the bound are left out.
        synchronize: waits for the device; by default torch's, if it has been used.
        progress: needs rich; without it there is no bar.
        """
        if repeats < 1 or warmup < 0:
            raise ValueError(f"repeats = {repeats}, warmup = {warmup}: give at least 1 pass, and 0 or more to warm up")
        jobs = [
            ("draft", draft, _measured_sizes(draft_sizes, draft_captured, max_requests, "max_requests")),
            ("verify", verify, _measured_sizes(sizes, captured, max_tokens, "max_tokens")),
        ]
        wait = synchronize or _device_synchronize()
        passes = warmup + repeats
        times: dict[tuple[str, int], list[float]] = {}
        with _progress_bar(progress, passes * sum(len(each) for _, _, each in jobs)) as advance:
            # All sizes in each pass, so that a slow spell of the machine does not fall on one size alone.
            for index in range(passes):
                for name, function, each in jobs:
                    for size in each:
                        wait()
                        start = time.perf_counter()
                        function(size)
                        wait()
                        elapsed = (time.perf_counter() - start) * 1e3
                        if index >= warmup:
                            times.setdefault((name, size), []).append(elapsed)
                        advance(f"{name} {size}")
        curves = {
            name: [(size, max(statistics.median(times[name, size]), 1e-6)) for size in each] for name, _, each in jobs
        }
        return cls(curves["draft"], curves["verify"], list(captured), list(draft_captured))

    @classmethod
    def from_sps(cls, source: object, captured: Sequence[int] = ()) -> "CostTable":
        """A table from either of SGLang's two SPS formats: a path, a mapping, or SGLang's own object.

        Steps per second by batch tokens: step(tokens) = 1000 / sps. Additive: step = bias + alpha(requests) +
        theta(tokens), in seconds. Both describe whole steps; the part that does not vary is split evenly between
        `draft` and `verify`, of which only the sum matters to a planner. Refine such a table with whole steps.
        """
        where = "SPS table"
        if isinstance(source, (str, os.PathLike)):
            where = os.fspath(source)
            try:
                source = msgspec.json.decode(Path(source).read_bytes())
            except msgspec.DecodeError as error:
                raise ValueError(f"{where}: not valid JSON ({error}); profile it again with SGLang") from error
        additive = "bias_seconds" in source if isinstance(source, dict) else hasattr(source, "bias_seconds")
        try:
            if additive:
                table = msgspec.convert(source, _AdditiveSps, from_attributes=True)
                alpha = _paired(table.bs_probes, table.alpha_seconds, "bs_probes", "alpha_seconds")
                theta = _paired(table.m_probes, table.theta_seconds, "m_probes", "theta_seconds")
                bias = table.bias_seconds
            else:
                rates = msgspec.convert(source, _StepsPerSecond, from_attributes=True)
                pairs = _paired(
                    rates.sample_batch_tokens, rates.sample_steps_per_sec, "sample_batch_tokens", "sample_steps_per_sec"
                )
                bad = [rate for _, rate in pairs if not (math.isfinite(rate) and rate > 0)]
                if bad:
                    raise ValueError(f"sample_steps_per_sec has {bad[0]}; every rate must be positive and finite")
                alpha, theta, bias = [(1, 0.0)], [(tokens, 1 / rate) for tokens, rate in pairs], 0.0
            least_alpha, least_theta = min(s for _, s in alpha), min(s for _, s in theta)
            constant = bias + least_alpha + least_theta
            if not (math.isfinite(constant) and constant > 0):
                raise ValueError(f"the shortest step takes {constant} s; every step must take a positive, finite time")
            return cls(
                [(n, 1e3 * (s - least_alpha + constant / 2)) for n, s in alpha],
                [(n, 1e3 * (s - least_theta + constant / 2)) for n, s in theta],
                list(captured),
            )
        except (msgspec.ValidationError, ValueError) as error:
            raise ValueError(
                f"{where}: {error}; expected what sglang.benchmark.dspark_sps_profiler writes: sample_batch_tokens and "
                "sample_steps_per_sec, or bias_seconds with bs_probes, alpha_seconds, m_probes and theta_seconds"
            ) from error

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "CostTable":
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"not a cost table: {error}; write one with CostTable.save(), or read SGLang's format with "
                "CostTable.from_sps()"
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON atomically. Raises OSError as `open` would."""
        write_atomic(path, self.to_json().encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CostTable":
        """Reads what `save` wrote; ValueError if it is anything else, OSError if it cannot be read."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


class _StepsPerSecond(msgspec.Struct):
    sample_batch_tokens: list[int]
    sample_steps_per_sec: list[float]


class _AdditiveSps(msgspec.Struct):
    bias_seconds: float
    bs_probes: list[int]
    alpha_seconds: list[float]
    m_probes: list[int]
    theta_seconds: list[float]


def _paired(sizes: list[int], values: list[float], sizes_name: str, values_name: str) -> Samples:
    if not sizes or len(sizes) != len(values):
        raise ValueError(f"{sizes_name} has {len(sizes)} entries, {values_name} {len(values)}; one of each per probe")
    return list(zip(sizes, values, strict=True))


def _checked_sizes(sizes: Iterable[Any], name: str) -> list[int]:
    try:
        checked = [operator.index(size) for size in sizes]
    except TypeError as error:
        raise ValueError(f"CostTable.{name}: {error}; give whole numbers") from error
    for before, size in zip([0, *checked], checked, strict=False):
        if size <= before:
            raise ValueError(f"CostTable.{name} has {size} after {before}: give ascending sizes from 1, none twice")
    return checked


def _checked_samples(samples: Iterable[Any], name: str, unit: str) -> Samples:
    try:
        pairs = [(size, float(ms)) for size, ms in samples]
    except (TypeError, ValueError) as error:
        raise ValueError(f"CostTable.{name} = {samples!r}: give a list of ({unit}, ms) pairs") from error
    if not pairs:
        raise ValueError(f"CostTable.{name} is empty: give at least one ({unit}, ms) sample, or no CostTable at all")
    for size, ms in pairs:
        if not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"CostTable.{name} has {ms} ms at {size} {unit}: give a positive, finite time")
    return list(zip(_checked_sizes((size for size, _ in pairs), name), (ms for _, ms in pairs), strict=True))


def _sides(samples: Samples, captured: list[int]) -> tuple[Arrays, Arrays]:
    """(sizes, ms) of the captured samples, at the sizes that ran, and of the eager ones; ms by cumulative maximum."""
    sizes = np.array([size for size, _ in samples], np.int64)
    times = np.array([ms for _, ms in samples], np.float64)
    eager = int(np.searchsorted(sizes, captured[-1], side="right")) if captured else 0
    graphs = np.array(captured, np.int64)
    return (
        (graphs[np.searchsorted(graphs, sizes[:eager])], np.maximum.accumulate(times[:eager])),
        (sizes[eager:], np.maximum.accumulate(times[eager:])),
    )


def _interpolate(sizes: Sizes, times: Times, at: Sizes) -> Times:
    """The samples at `at`: constant below the first, by the last slope above the last."""
    largest_of_size = np.append(sizes[1:] != sizes[:-1], True)
    sizes, times = sizes[largest_of_size], times[largest_of_size]
    result = np.interp(at, sizes, times)
    if len(sizes) > 1:
        result += (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) * np.maximum(at - sizes[-1], 0)
    return result


def _curve(samples: Samples, captured: list[int], limit: int) -> tuple[Times, npt.NDArray[np.int32]]:
    """(ms, size that runs), both [limit + 1]."""
    runs = np.arange(limit + 1)
    graphs = np.array(captured, np.int64)
    in_graph = (runs > 0) & (runs <= (captured[-1] if captured else 0))
    runs[in_graph] = graphs[np.searchsorted(graphs, runs[in_graph])]
    graph_side, eager_side = _sides(samples, captured)
    if not captured:
        times = _interpolate(*eager_side, runs)
    else:
        times = _interpolate(*graph_side, runs)
        if len(eager_side[0]):
            times = np.where(in_graph, times, _interpolate(*eager_side, runs))
    times[0] = times[1]
    # Only an eager side that starts below the graphs' end is still out of order.
    return np.maximum.accumulate(times), runs.astype(np.int32)


def _scaled(samples: Samples, captured: list[int], size: int, factor: float) -> Samples:
    """The two samples around `size` times factor ** nearness (the two sum to 1), the others moved to stay in order.

    Samples on the other side of the captured limit stay as they are.
    """
    top = captured[-1] if captured else 0
    sides = _sides(samples, captured)
    eager = size > top
    sizes, times = sides[eager]
    if not len(sizes):
        return samples
    if not eager:
        size = captured[bisect_left(captured, size)]
    low = max(int(np.searchsorted(sizes, size, side="right")) - 1, 0)
    high = min(int(np.searchsorted(sizes, size)), len(sizes) - 1)
    if high < low:
        high = low
    span = int(sizes[high] - sizes[low])
    nearness = (size - int(sizes[low])) / span if span else 0.0
    times[low] *= factor ** (1 - nearness)
    if span:
        times[high] *= factor**nearness
    # Without this a sample that was once too large would hide every later, lower time of the larger sizes.
    moved = np.maximum.accumulate(times) if factor > 1 else np.minimum.accumulate(times[::-1])[::-1]
    values = np.concatenate([sides[0][1], moved] if eager else [moved, sides[1][1]])
    return [(n, float(ms)) for (n, _), ms in zip(samples, values, strict=True)]


def _measured_sizes(wanted: Sequence[int] | None, captured: Sequence[int], limit: int, name: str) -> list[int]:
    if limit < 1:
        raise ValueError(f"{name} = {limit}: give the run-time's bound, at least 1")
    if wanted is None:
        steps = (size for power in range(limit.bit_length()) for size in (2**power, 3 * 2**power // 2))
        wanted = [*captured, *steps]
    return sorted({operator.index(size) for size in wanted if 1 <= size < limit} | {limit})


def _device_synchronize() -> Callable[[], object]:
    import torch

    return torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None


@contextmanager
def _progress_bar(wanted: bool, total: int) -> Iterator[Callable[[str], object]]:
    """Yields advance(what was measured)."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        wanted = False
    if not wanted:
        yield lambda what: None
        return
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring costs", total=total)
        yield lambda what: bar.update(task, advance=1, description=f"measuring costs: {what}")
