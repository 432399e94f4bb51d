"""How the kernels over logits are cut into programs, by GPU: a table that is read once. Nothing is tuned while serving.

`launches.json` beside this file is the table. AV_TRITON_LAUNCHES names another, such as `av-triton bench` writes.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

TABLE = Path(__file__).with_suffix(".json")
OTHERS = "default"  # entry of the GPUs that the table does not name


def _check(name: str, value: int, least: int, most: int) -> None:
    if value & (value - 1) or not least <= value <= most:
        raise ValueError(f"{name} = {value}: give a power of 2 from {least} to {most}")


class LogitMaxLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """block_bytes: of a row, read at a time by a program; logits: of a row, by a program in all; warps: of a program.

    Rows are cut into at most 16 programs, and a block of less than 256 logits a warp gets fewer warps.
    """

    block_bytes: int
    logits: int
    warps: int

    def __post_init__(self) -> None:
        _check("block_bytes", self.block_bytes, 1024, 65536)
        _check("logits", self.logits, 1024, 1 << 18)
        _check("warps", self.warps, 1, 16)


class SampleLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `LogitMaxLaunch`. The block is part of which random word a token gets, the same on every GPU."""

    logits: int
    warps: int

    def __post_init__(self) -> None:
        _check("logits", self.logits, 8192, 1 << 18)
        _check("warps", self.warps, 1, 16)


class Launches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of one GPU."""

    logit_max: LogitMaxLaunch
    sample: SampleLaunch


def read(path: Path) -> dict[str, Launches]:
    """A table: {"default": ..., "sm_90": ..., ...}. ValueError where the file is none."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=dict[str, Launches])
    except (OSError, msgspec.DecodeError) as error:
        remedy = "write one with `av-triton bench --table FILE`, or unset AV_TRITON_LAUNCHES"
        raise ValueError(f"launch table {path}: {error}; {remedy}") from error
    if OTHERS not in table:
        raise ValueError(f'launch table {path} has no entry "{OTHERS}": copy one from {TABLE}')
    return table


@functools.cache
def _entry(gpu: str) -> Launches:
    table = read(Path(os.environ.get("AV_TRITON_LAUNCHES", TABLE)))
    return table.get(gpu, table[OTHERS])


_trial: Launches | None = None


def launches(gpu: str) -> Launches:
    """What is in force for a GPU ("sm_90", "gfx942", ...)."""
    return _entry(gpu) if _trial is None else _trial


@contextmanager
def trial(entry: Launches) -> Iterator[None]:
    """Puts an entry in force for every GPU, to measure it."""
    global _trial
    before, _trial = _trial, entry
    try:
        yield
    finally:
        _trial = before
