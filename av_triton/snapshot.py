"""What an estimator has learned, to and from a file."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from av_triton.files import write_atomic
from av_triton.ops.head import LARGEST_VARIANCE, LARGEST_WEIGHT, LEAST_VARIANCE

VERSION = 2  # 1 had the coefficients alone
LARGEST = {"weights": LARGEST_WEIGHT, "curvature": 1e38, "mean": 2 * LARGEST_VARIANCE, "variance": 2 * LARGEST_VARIANCE}
LARGEST_SUM = 1 << 62  # of what is kept in int64


class SnapshotError(ValueError):
    """The file holds no coefficients that fit; the message says what was wrong and the remedy."""


class HeadSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A head (`av_triton/ops/head.py`): S lists of hidden_size + 1. behind: labels behind the means, S."""

    hidden_size: int
    weights: list[list[float]]
    curvature: list[list[float]]
    mean: list[list[float]]
    variance: list[list[float]]
    behind: list[int]

    def problem(self, strata: int) -> str | None:
        for name in ("weights", "curvature", "mean", "variance"):
            rows = getattr(self, name)
            if len(rows) != strata or any(len(row) != self.hidden_size + 1 for row in rows):
                return f"{name} of the head has another shape than [{strata}, {self.hidden_size + 1}]"
            most = LARGEST[name]
            least = {"curvature": 0.0, "variance": LEAST_VARIANCE / 2}.get(name, -most)
            wrong = next((x for row in rows for x in row if not least <= x <= most), None)
            if wrong is not None:
                return f"{name} of the head holds {wrong}, it must hold numbers from {least} to {most}"
        if len(self.behind) != strata or not all(0 <= n <= LARGEST_SUM for n in self.behind):
            return f"behind of the head is {self.behind}, it must hold {strata} numbers, 0 to 2^62"
        return None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The coefficients of an estimator: p = sigmoid(slopes[s] * f + intercepts[s][k]) in stratum s at position k.

    num_draft_positions: K. strata: names, S of them. slopes: S, 0 or more. intercepts: S lists of K.
    refits: Newton steps of the estimator that wrote it, without those of a file it had loaded. labels: behind each
    coefficient, Q30, S lists of K. gates: of the offset and of the head, Q30 nats, 2 lists of S. head: None: there was
    none. A file of version 1 has none of these three.
    Invalid values raise SnapshotError at construction.
    """

    version: int = VERSION
    num_draft_positions: int
    strata: list[str]
    slopes: list[float]
    intercepts: list[list[float]]
    refits: int = 0
    labels: list[list[int]] | None = None
    gates: list[list[int]] | None = None
    head: HeadSnapshot | None = None

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise SnapshotError(problem)

    def _problem(self) -> str | None:
        if not 1 <= self.version <= VERSION:
            return f"version is {self.version}, this av_triton reads versions 1 to {VERSION}"
        if self.num_draft_positions < 1:
            return f"num_draft_positions is {self.num_draft_positions}, it must be at least 1"
        if not self.strata or len(set(self.strata)) != len(self.strata):
            return f"strata is {self.strata}, it must name at least one stratum and none twice"
        if len(self.slopes) != len(self.strata) or len(self.intercepts) != len(self.strata):
            return (
                f"{len(self.strata)} strata have {len(self.slopes)} slopes and {len(self.intercepts)} lists of "
                "intercepts; each stratum has one of either"
            )
        for name, slope, intercepts in zip(self.strata, self.slopes, self.intercepts, strict=True):
            if not (math.isfinite(slope) and slope >= 0):
                return f"the slope of stratum {name!r} is {slope}, it must be finite and 0 or more"
            if len(intercepts) != self.num_draft_positions:
                return f"stratum {name!r} has {len(intercepts)} intercepts for {self.num_draft_positions} positions"
            if not all(map(math.isfinite, intercepts)):
                return f"stratum {name!r} has the intercepts {intercepts}, they must be finite"
        if self.refits < 0:
            return f"refits is {self.refits}, it must be 0 or more"
        S, K = len(self.strata), self.num_draft_positions
        for name, lists, length, least in (("labels", S, K, 0), ("gates", 2, S, -LARGEST_SUM)):
            rows = getattr(self, name)
            fits = rows is None or [len(row) for row in rows] == [length] * lists
            if not fits or not all(least <= n <= LARGEST_SUM for row in rows or () for n in row):
                return f"{name} is {rows}, it must be {lists} lists of {length} numbers, {least and '-2^62'} to 2^62"
        return None if self.head is None else self.head.problem(S)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON atomically: temporary file, sync, rename. Raises OSError as `open` would."""
        write_atomic(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str], num_draft_positions: int, strata: Sequence[str]) -> "Snapshot":
        """Reads and checks a file that `write` made for the same K and strata, or raises SnapshotError.

        A missing or unreadable file raises OSError.
        """
        remedy = "start without it: the estimator fits itself again within some hundred steps"
        try:
            raw = msgspec.json.decode(Path(path).read_bytes())
            if isinstance(raw, dict) and raw.get("version") not in range(1, VERSION + 1):
                raise SnapshotError(f"version is {raw.get('version')!r}, this av_triton reads versions 1 to {VERSION}")
            snapshot = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise SnapshotError(f"{path}: not a file of fitted coefficients: {error}; {remedy}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise SnapshotError(f"{path}: not valid JSON ({error}), cut short or damaged; {remedy}") from error
        except SnapshotError as error:
            raise SnapshotError(f"{path}: {error}; {remedy}") from error
        if snapshot.num_draft_positions != num_draft_positions:
            raise SnapshotError(
                f"{path}: fitted for {snapshot.num_draft_positions} draft positions, this estimator has "
                f"{num_draft_positions}; load a file of the same drafter and settings, or {remedy}"
            )
        if snapshot.strata != list(strata):
            raise SnapshotError(
                f"{path}: fitted for the strata {snapshot.strata}, this estimator has {list(strata)}; "
                f"give Settings the same strata in the same order, or {remedy}"
            )
        return snapshot
