"""Bootstrap intervals of figures over drafts, which are not independent: those of one request are drawn together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Interval:
    """A figure and the 2.5 % and 97.5 % quantiles of its bootstrap distribution."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


def resampled(cluster: Integers, resamples: int, seed: int = 0) -> Iterator[Integers]:
    """Indices of the drafts of one bootstrap sample after the other: whole clusters, drawn with replacement.

    cluster: int [n], the cluster of every draft (a request, a prompt).
    """
    order = np.argsort(cluster, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(cluster[order])) + 1)
    rng = np.random.default_rng(seed)
    for _ in range(resamples):
        yield np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])


def around(value: float, draws: Floats) -> Interval:
    """Of a figure whose values on the bootstrap samples are `draws`; samples without a value (NaN) do not count."""
    low, high = (float("nan"),) * 2 if np.isnan(draws).all() else np.nanquantile(draws, (0.025, 0.975))
    return Interval(value, float(low), float(high))


def of(statistic: Callable[[Integers], float], cluster: Integers, resamples: int = 300, seed: int = 0) -> Interval:
    """Of `statistic(indices)`, on the samples of `resampled`."""
    draws = np.array([statistic(at) for at in resampled(cluster, resamples, seed)])
    return around(statistic(np.arange(len(cluster))), draws)


def of_mean(values: Floats, cluster: Integers, resamples: int = 2000, seed: int = 0) -> Interval:
    """Of the mean of `values` [n]; as `of`, by the sums of the clusters."""
    _, place = np.unique(cluster, return_inverse=True)
    sums, counts = np.bincount(place, values), np.bincount(place)
    draws = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
    low, high = np.quantile(sums[draws].sum(1) / counts[draws].sum(1), (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))
