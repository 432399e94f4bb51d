"""Small traces with hidden states for the repository: 13 levels a coordinate, the first positions.

python -m benchmarks.score.cut FOLDER benchmarks/score/data
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.score.streams import load
from benchmarks.traces.cut import half
from benchmarks.traces.quality import COLUMNS

LEVELS, STEP = 6, 0.6  # levels on each side of the mean; deviations between two


def main(
    source: Annotated[Path, typer.Argument(help="Folder of traces with a column `hid`.")],
    target: Annotated[Path, typer.Argument(help="Folder to write to.")],
    share: Annotated[float, typer.Option(help="Positions that hold this share of the labels are kept.")] = 0.95,
) -> None:
    """Writes the traces of a folder to another, with coarser hidden states."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.npz")):
        by_position = load(path).weights.sum(0)
        positions = int(np.searchsorted(np.cumsum(by_position) / by_position.sum(), share)) + 1
        with np.load(path) as file:
            kept = file["pos"] <= positions
            columns = {name: file[name][kept] for name in (*COLUMNS, "prompt", "round", "log_q_sampled")}
            hidden = file["hid"][kept].astype(np.float32)
        mean, step = hidden.mean(0), STEP * hidden.std(0)
        coarse = np.rint((hidden - mean) / step).clip(-LEVELS, LEVELS).astype(np.int8)
        np.savez_compressed(target / path.name, **half(columns), hid=coarse, hid_mean=mean, hid_step=step)
        print(f"{target / path.name}: {positions} positions, {(target / path.name).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
