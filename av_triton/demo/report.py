"""What the arms did: tables for the terminal, a reliability diagram and a throughput picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.table import Table

from av_triton import Coefficients
from av_triton.demo.engine import Arm

Array = npt.NDArray[np.float64]
BINS = 10


def speed(arm: Arm) -> float:
    """Decoded tokens per second, prefill excluded."""
    return arm.counts.emitted / arm.counts.total_seconds


def ratio(arm: Arm, other: Arm) -> float:
    """How many times as fast as `other`: the median over the rounds, which the two decoded right after each other."""
    pairs = [(a, b) for a, b in zip(arm.rounds, other.rounds, strict=False) if a[0] and b[0]]
    return median((b[1] / b[0]) / (a[1] / a[0]) for a, b in pairs)


def throughput_table(title: str, plain: Arm, arms: Sequence[Arm]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("arm", no_wrap=True)
    for name in ("tok\n/s", "×\nplain", "draft\n/step", "verify\n/step", "accept\n/step", "accept\nlength"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in plain.counts.seconds:
        table.add_column(f"{part}\nms", justify="right", style="dim", no_wrap=True)
    for arm in (plain, *arms):
        c = arm.counts
        table.add_row(
            arm.name,
            f"{speed(arm):.1f}",
            f"{ratio(arm, plain):.3f}",
            f"{c.drafted / c.steps:.1f}",
            f"{(c.admitted + c.rows) / c.steps:.1f}",
            f"{c.accepted / c.steps:.1f}",
            f"{1 + c.accepted / c.rows:.2f}",
            *(f"{1e3 * seconds / c.steps:.1f}" for seconds in c.seconds.values()),
        )
    return table


class Labels:
    """An adaptive arm's labelled drafts: position int64 [n], predicted and observed float64 [n]."""

    def __init__(self, arm: Arm) -> None:
        def join(parts: list[torch.Tensor]) -> Array:
            return torch.cat(parts).double().cpu().numpy() if parts else np.zeros(0)

        self.position = join([x.position for x in arm.labelled]).astype(int)
        self.predicted = join([x.predicted for x in arm.labelled])
        self.observed = join([x.accepted for x in arm.labelled])

    def bins(self) -> list[tuple[float, float, int]]:
        """(mean predicted, observed share, count) of bins with equal counts, by predicted probability."""
        parts = np.array_split(np.argsort(self.predicted, kind="stable"), BINS)
        return [(float(self.predicted[i].mean()), float(self.observed[i].mean()), len(i)) for i in parts if len(i)]

    def error(self) -> float:
        """Expected calibration error: mean |predicted - observed| over the bins; NaN without labels."""
        total = sum(n for _, _, n in self.bins())
        return sum(n * abs(p - o) for p, o, n in self.bins()) / total if total else float("nan")


def calibration_table(labels: Labels, coefficients: Coefficients, stratum: int) -> Table:
    table = Table(
        title=f"calibration: ECE {labels.error():.4f} over {len(labels.position)} labelled drafts; "
        f"{coefficients.refits} refits, slope {coefficients.slopes[stratum]:.3f}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("draft position", "labelled", "predicted", "observed", "intercept"):
        table.add_column(name, justify="right")
    for position, intercept in enumerate(coefficients.intercepts[stratum]):
        at = labels.position == position
        means = (f"{labels.predicted[at].mean():.3f}", f"{labels.observed[at].mean():.3f}") if at.any() else ("", "")
        table.add_row(str(position + 1), str(int(at.sum())), *means, f"{intercept:+.3f}")
    return table


def reliability_picture(path: Path, labels: dict[str, Labels]) -> None:
    figure, panels = _figure(len(labels), 4)
    for panel, (name, each) in zip(panels, labels.items(), strict=True):
        panel.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="--")
        predicted, observed, count = (np.array(x, float) for x in zip(*each.bins(), strict=True))
        spread = np.sqrt(observed * (1 - observed) / count)
        panel.errorbar(predicted, observed, yerr=spread, marker="o", linewidth=1, capsize=2)
        panel.set(
            title=f"{name}: ECE {each.error():.3f}, {len(each.position)} drafts",
            xlabel="predicted acceptance", ylabel="observed", xlim=(0, 1), ylim=(0, 1), aspect="equal",
        )  # fmt: skip
    figure.savefig(path, dpi=150)


def throughput_picture(path: Path, results: dict[str, tuple[Arm, Sequence[Arm]]]) -> None:
    figure, panels = _figure(len(results), 5)
    for panel, (name, (plain, arms)) in zip(panels, results.items(), strict=True):
        shown = [plain, *arms]
        colours = ["grey" if arm is plain else "tab:orange" if arm.verifier else "tab:blue" for arm in shown]
        bars = panel.bar([arm.name for arm in shown], [speed(arm) for arm in shown], color=colours)
        panel.bar_label(bars, fmt="%.0f", fontsize=8)
        panel.set(title=f"{name} drafter", ylabel="decoded tokens/s")
        panel.tick_params(axis="x", labelrotation=45)
    figure.savefig(path, dpi=150)


def _figure(panels: int, width: float):  # type: ignore[no-untyped-def]
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, 4), layout="constrained", squeeze=False)
    return figure, axes[0]
