"""Small traces for the repository: one step of every few of collected ones, in half precision.

python -m benchmarks.traces.cut build/traces benchmarks/traces/data/collected [--every 4]
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.traces.collect import Columns, save
from benchmarks.traces.quality import COLUMNS, EXTRA, load


def half(columns: Columns) -> Columns:
    """Floats rounded to float16; f, alpha and conf stay float32, for the estimator takes that."""
    return {
        name: values.astype(np.float16).astype(np.float16 if name in EXTRA else np.float32)
        if values.dtype.kind == "f"
        else values
        for name, values in columns.items()
    }


def cut(columns: Columns, every: int) -> Columns:
    """What the loader reads, of each `every`-th step: all prompts and all parts of the answers stay."""
    kept = columns["step"] % every == 0
    return half({name: values[kept] for name, values in columns.items() if name in (*COLUMNS, *EXTRA, "conf")})


def main(
    source: Annotated[Path, typer.Argument(help="Folder of collected traces.")],
    target: Annotated[Path, typer.Argument(help="Folder to write to.")],
    every: Annotated[int, typer.Option(min=1, help="One step of so many is kept.")] = 4,
) -> None:
    """Writes one step of every few of each trace of a folder to another."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.npz")):
        with np.load(path) as file:
            save(target / path.name, cut({name: file[name] for name in file.files}, every))
        load(target / path.name)
        print(f"{target / path.name}: {(target / path.name).stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    typer.run(main)
