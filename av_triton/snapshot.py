"""Fitted coefficients to and from a file."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from av_triton.files import write_atomic

VERSION = 1


class SnapshotError(ValueError):
    """The file holds no coefficients that fit; the message says what was wrong and the remedy."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The coefficients of an estimator: p = sigmoid(slopes[s] * f + intercepts[s][k]) in stratum s at position k.

    num_draft_positions: K. strata: names, S of them. slopes: S, 0 or more. intercepts: S lists of K.
    refits: Newton steps behind them. Invalid values raise SnapshotError at construction.
    """

    version: int = VERSION
    num_draft_positions: int
    strata: list[str]
    slopes: list[float]
    intercepts: list[list[float]]
    refits: int = 0

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise SnapshotError(problem)

    def _problem(self) -> str | None:
        if self.version != VERSION:
            return f"version is {self.version}, this av_triton reads version {VERSION}"
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
        return None

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
            if isinstance(raw, dict) and raw.get("version") != VERSION:
                raise SnapshotError(f"version is {raw.get('version')!r}, this av_triton reads version {VERSION}")
            snapshot = msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise SnapshotError(f"{path}: not a file of fitted coefficients: {error}; {remedy}") from error
        except msgspec.DecodeError as error:
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
