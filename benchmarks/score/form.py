"""Other forms of the head than the one in `additions.py`, on prompts that were not learned from.

python -m benchmarks.score.form [FOLDER]
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.score.additions import Additions, Floats, Head, Restated
from benchmarks.score.compare import SPANS, Make, Result, run
from benchmarks.score.report import HERE, sets
from benchmarks.score.scenarios import prompts_held_out
from benchmarks.traces.replay import new_table

ADDITIONS = Additions(exact=True, history=True, hidden=True, gated=False)


class Scaled(Head):
    """Rows of length 1 on average, not each."""

    def row(self, u: Floats) -> Floats:
        found: Floats = u / np.sqrt(max(u.shape[-1], 1))
        return found


class Uncentred(Head):
    def standardised(self, hidden: np.typing.NDArray[np.floating]) -> Floats:
        return hidden.astype(np.float64)


class Unclipped(Head):
    clip = np.inf


class Adam(Head):
    rate = 0.01

    def __init__(self, scalars: int, width: int) -> None:
        super().__init__(scalars, width)
        self.first_moment, self.steps = np.zeros_like(self.v), 0

    def step(self, g: Floats) -> None:
        self.steps += 1
        self.first_moment = 0.9 * self.first_moment + 0.1 * g
        self.squares = 0.999 * self.squares + 0.001 * g * g
        scale = np.sqrt(self.squares / (1 - 0.999**self.steps)) + 1e-8
        self.v += self.rate * self.first_moment / (1 - 0.9**self.steps) / scale


class FastAdam(Adam):
    rate = 0.03


def form(head: type[Head], **changed: float) -> Make:
    kind = type(head.__name__, (head,), changed)
    return lambda slots, positions, width, greedy: Restated(slots, positions, width, ADDITIONS, greedy, kind)


FORMS: dict[str, Make] = {
    "none": lambda slots, positions, width, greedy: Restated(slots, positions, width, Additions(exact=True), greedy),
    "as it is": form(Head),
    "not centred, not standardised": form(Uncentred),
    "not of unit length": form(Scaled),
    "no bound of 4 deviations": form(Unclipped),
    "Adam, rate .01": form(Adam),
    "Adam, rate .03": form(FastAdam),
    **{f"rate {rate}": form(Head, rate=rate) for rate in (0.03, 0.05, 0.2)},
    **{f"updates of {labels} labels": form(Head, update=labels) for labels in (1, 16, 64, 128)},
    **{f"forgetting 1/{n}": form(Head, forget=1 / n) for n in (32, 4096)},
}

console = Console()
if not console.is_terminal:
    console = Console(width=150)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of traces with hidden states.")] = HERE / "data",
    rows: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
) -> None:
    """Log-loss above that without a head, in thousandths of a nat, by the labels learned from; gates open."""
    for name, rounds in sets([folder])[0].items():
        runs = [
            run(each.stream(0), list(FORMS.values()), rows, held_out=True)
            for each in track(prompts_held_out(name, rounds, rows), description=name, console=console)
        ]
        result = Result.of(runs)
        table = new_table(name, "", *(f"from {edge:,}" for edge in SPANS))
        for arm, label in enumerate(FORMS):
            if arm:
                gaps = (result.difference(arm, span, span).value for span in range(len(SPANS)))
                table.add_row(label, *(f"{1000 * gap:+.1f}" for gap in gaps))
        console.print(table)


if __name__ == "__main__":
    typer.run(main)
