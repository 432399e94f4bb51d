"""Features of the draft distribution as predictors of acceptance, on the labelled drafts of recorded traces.

Labelled drafts are those up to and including the first rejection. Every feature x gets the estimator's own form,

    p = sigmoid(w x + b_k)        one slope, an intercept for each draft position k: K + 1 parameters

fitted to all traces of one pair and temperature, and is judged on prompts that the fit has not seen.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from sklearn.model_selection import GroupKFold

from benchmarks import intervals
from benchmarks.intervals import Interval
from benchmarks.traces.quality import (
    Floats,
    Integers,
    Mask,
    area_under_curve,
    bin_of,
    calibration_error,
    load,
    log_losses,
    logistic_fit,
    shared_slope,
    sigmoid,
    workload_name,
)

FOLDS = 5
RESAMPLES = 200
FEWEST = 20  # labels of a position whose intercept is shown
ESTIMATOR, RAW, HEAD, TRAINED = "logit(q_max)", "q_max, raw", "confidence head", "confidence head, as trained"

Row = tuple[object, ...]


@dataclass(frozen=True)
class Drafts:
    """n labelled drafts of K = `positions` positions.

    position int64 [n], from 0. observed float64 [n]: 1 accepted, 0 rejected. cluster int64 [n]: equal for the drafts of
    one prompt (of one row where the trace has no prompts). columns: float64 [n] by name, `f` among them.
    """

    pair: str
    workload: str
    temperature: str
    positions: int
    position: Integers
    observed: Floats
    cluster: Integers
    columns: dict[str, Floats]

    @classmethod
    def read(cls, path: Path) -> "Drafts":
        """Of a trace named PAIR_WORKLOAD_T<temperature>.npz, as the collector does; ValueError where it is none."""
        name = re.fullmatch(r"(.+)_([^_]+)_T([\d.]+)", path.stem)
        if name is None:
            raise ValueError(f"{path}: rename it to PAIR_WORKLOAD_T<temperature>.npz, as in block_gsm8k_T0.7.npz")
        trace = load(path)
        k, accepted = np.arange(trace.features.shape[-1]), trace.accepted[..., None]
        labelled = k <= accepted
        grids = {"f": trace.features, **trace.extra} | ({} if trace.head is None else {"conf": trace.head})
        rows = np.arange(trace.features.shape[1])[:, None]
        cluster = (trace.workload[..., None] << 16) + grids.pop("prompt", rows)
        return cls(
            pair=name[1],
            workload=", ".join(workload_name(code) for code in sorted(set(trace.workload.flat))),
            temperature=name[3],
            positions=len(k),
            position=np.broadcast_to(k, labelled.shape)[labelled],
            observed=(k < accepted)[labelled].astype(np.float64),
            cluster=np.broadcast_to(cluster, labelled.shape)[labelled],
            columns={name: values[labelled].astype(np.float64) for name, values in grids.items()},
        )

    @classmethod
    def join(cls, traces: Sequence["Drafts"]) -> "Drafts":
        """Those of several traces of one pair and temperature, with the columns that all of them have."""
        first = traces[0]
        names = [name for name in first.columns if all(name in trace.columns for trace in traces)]
        return cls(
            pair=first.pair,
            workload="all",
            temperature=first.temperature,
            positions=max(trace.positions for trace in traces),
            position=np.concatenate([trace.position for trace in traces]),
            observed=np.concatenate([trace.observed for trace in traces]),
            cluster=np.concatenate([trace.cluster for trace in traces]),
            columns={name: np.concatenate([trace.columns[name] for trace in traces]) for name in names},
        )

    def where(self, mask: Mask) -> "Drafts":
        columns = {name: values[mask] for name, values in self.columns.items()}
        position, observed, cluster = self.position[mask], self.observed[mask], self.cluster[mask]
        return replace(self, position=position, observed=observed, cluster=cluster, columns=columns)

    @property
    def group(self) -> str:
        return f"{self.pair}, T = {self.temperature}"

    @property
    def greedy(self) -> bool:
        return self.temperature == "0"


def log_sigmoid(z: Floats) -> Floats:
    return -np.logaddexp(0.0, -z)


def loglog(z: Floats) -> Floats:
    """-log(-log q) of q = sigmoid(z)."""
    return -np.log(-log_sigmoid(z))


def logit_q_sampled(columns: dict[str, Floats]) -> Floats:
    """logit(q_max) where the most likely token was drawn; any other has q <= 1/2, and 1 - q loses nothing."""
    log_q = np.minimum(columns["log_q_sampled"], np.log(0.5))
    return np.where(columns["is_top1"] != 0, columns["f"], log_q - np.log1p(-np.exp(log_q)))


@dataclass(frozen=True)
class Feature:
    """needs: the columns it is made of. fitted: it gets the K + 1 parameters; else it is a probability as it is.
    lossless: it does not depend on the drawn token, so that a decision by it leaves the output's law alone."""

    name: str
    of: Callable[[dict[str, Floats]], Floats]
    needs: tuple[str, ...] = ("f",)
    fitted: bool = True
    lossless: bool = True


SAMPLED = ("f", "log_q_sampled", "is_top1")
FEATURES = (
    Feature(ESTIMATOR, lambda c: c["f"]),
    Feature("log q_max", lambda c: log_sigmoid(c["f"])),
    Feature("-log(-log q_max)", lambda c: loglog(c["f"])),
    Feature("top-2 margin", lambda c: c["gap"], ("gap",)),
    Feature("entropy", lambda c: c["entropy"], ("entropy",)),
    Feature(RAW, lambda c: sigmoid(c["f"]), fitted=False),
    Feature(HEAD, lambda c: c["conf"], ("conf",)),
    Feature(TRAINED, lambda c: sigmoid(c["conf"]), ("conf",), fitted=False),
    Feature("logit(q_sampled)", logit_q_sampled, SAMPLED, lossless=False),
    Feature("-log(-log q_sampled)", lambda c: loglog(logit_q_sampled(c)), SAMPLED, lossless=False),
)


def held_out(design: Floats, drafts: Drafts) -> Floats:
    """float64 [n]: each draft's probability from a fit to the other folds; the drafts of a prompt are in one fold."""
    p = np.empty(len(design))
    for train, test in GroupKFold(FOLDS).split(design, groups=drafts.cluster):
        p[test] = sigmoid(design[test] @ logistic_fit(design[train], drafts.observed[train]))
    return p


def predictions(drafts: Drafts) -> dict[str, Floats | None]:
    """Probabilities by feature; None where the traces lack a column. Left out: the head where the traces have none, and
    q_sampled where it is q_max (greedy)."""
    found: dict[str, Floats | None] = {}
    for feature in FEATURES:
        headless = "conf" in feature.needs and "conf" not in drafts.columns
        if headless or (drafts.greedy and not feature.lossless):
            continue
        if any(name not in drafts.columns for name in feature.needs):
            found[feature.name] = None
            continue
        x = feature.of(drafts.columns)
        if feature.fitted:
            x = held_out(shared_slope(x, drafts.position, drafts.positions), drafts)
        found[feature.name] = x
    return found


def auc(p: Floats, drafts: Drafts) -> Interval:
    return intervals.of(lambda at: area_under_curve(p[at], drafts.observed[at]), drafts.cluster, RESAMPLES)


def auc_gain(p: Floats, base: Floats, drafts: Drafts) -> Interval:
    """AUC of p above that of `base`, on the same resamples."""

    def gain(at: Integers) -> float:
        observed = drafts.observed[at]
        return area_under_curve(p[at], observed) - area_under_curve(base[at], observed)

    return intervals.of(gain, drafts.cluster, RESAMPLES)


def log_loss(p: Floats, drafts: Drafts) -> Interval:
    return intervals.of_mean(log_losses(p, drafts.observed), drafts.cluster)


def excess_loss(p: Floats, base: Floats, drafts: Drafts) -> Interval:
    """Log-loss of p above that of `base`, on the same resamples."""
    losses = log_losses(p, drafts.observed) - log_losses(base, drafts.observed)
    return intervals.of_mean(losses, drafts.cluster)


def ece(p: Floats, drafts: Drafts) -> Interval:
    return intervals.of(lambda at: calibration_error(p[at], drafts.observed[at]), drafts.cluster, RESAMPLES)


@dataclass(frozen=True)
class Group:
    """All labelled drafts of one pair and temperature, and what each feature predicts for them."""

    drafts: Drafts
    predicted: dict[str, Floats | None]

    @classmethod
    def of(cls, drafts: Drafts) -> "Group":
        return cls(drafts, predictions(drafts))

    @property
    def name(self) -> str:
        return self.drafts.group

    @property
    def estimated(self) -> Floats:
        p = self.predicted[ESTIMATOR]
        assert p is not None  # it needs nothing but f, which every trace has
        return p

    def feature_rows(self) -> list[Row]:
        """(group, feature, AUC, AUC above the estimator's, log-loss, log-loss above the estimator's, ECE)."""
        rows: list[Row] = []
        for feature in FEATURES:
            if feature.name not in self.predicted:
                continue
            p, name = self.predicted[feature.name], feature.name + ("" if feature.lossless else ", *not lossless*")
            if p is None:
                missing = ", ".join(column for column in feature.needs if column not in self.drafts.columns)
                rows.append((self.name, name, f"no column {missing}", "", "", "", ""))
                continue
            above: tuple[object, object] = ("", "")
            if feature.name != ESTIMATOR:
                above = auc_gain(p, self.estimated, self.drafts), excess_loss(p, self.estimated, self.drafts)
            ranking, loss = (auc(p, self.drafts), above[0]), (log_loss(p, self.drafts), above[1])
            rows.append((self.name, name, *ranking, *loss, ece(p, self.drafts)))
        return rows

    def position_rows(self) -> list[Row]:
        """(group, position, labels, share accepted, AUC, AUC of the head as trained, their difference).

        Within one position every map with a positive slope has the AUC of its feature: no fit is needed there.
        """
        masks = {str(k + 1): self.drafts.position == k for k in range(self.drafts.positions)}
        masks |= {"all": self.drafts.position >= 0, "all but 1": self.drafts.position > 0}
        rows: list[Row] = []
        for name, mask in masks.items():
            part = self.drafts.where(mask)
            if len(set(part.observed)) < 2:
                rows.append((self.name, name, len(part.observed), "", "", "", ""))
                continue
            p = part.columns["f"] if name.isdigit() else self.estimated[mask]
            head: tuple[object, object] = ("", "")
            if "conf" in part.columns:
                head = auc(part.columns["conf"], part), auc_gain(part.columns["conf"], p, part)
            rows.append((self.name, name, len(part.observed), float(part.observed.mean()), auc(p, part), *head))
        return rows

    def sharing_row(self) -> Row:
        """(group, AUC shared, own, difference, log-loss shared, own, difference)."""
        drafts, shared = self.drafts, self.estimated
        at = drafts.position[:, None] == np.arange(drafts.positions)
        own = held_out(np.column_stack([at * drafts.columns["f"][:, None], at]), drafts)
        aucs = auc(shared, drafts), auc(own, drafts), auc_gain(shared, own, drafts)
        losses = log_loss(shared, drafts), log_loss(own, drafts), excess_loss(shared, own, drafts)
        return (self.name, *aucs, *losses)

    def reliability_rows(self) -> list[Row]:
        """(group, predictor, labels, mean predicted, share accepted) of 15 bins of equal width."""
        rows: list[Row] = []
        for name in (ESTIMATOR, RAW, TRAINED):
            p = self.predicted.get(name)
            if p is None:
                continue
            place = bin_of(p)
            for i in np.unique(place):
                inside = self.drafts.where(place == i)
                seen = intervals.of_mean(inside.observed, inside.cluster)
                rows.append((self.name, name, len(inside.observed), float(p[place == i].mean()), seen))
        return rows


@dataclass(frozen=True)
class Fit:
    """Slope and intercepts [1 + K] of the drafts, and the mean entropy of the first draft (NaN without the column); the
    same of R bootstrap samples, [R, 1 + K] and [R]."""

    drafts: Drafts
    theta: Floats
    thetas: Floats
    entropy: float
    entropies: Floats

    @classmethod
    def of(cls, drafts: Drafts, seed: int) -> "Fit":
        design = shared_slope(drafts.columns["f"], drafts.position, drafts.positions)
        entropies, first = drafts.columns.get("entropy", np.full(len(design), np.nan)), drafts.position == 0
        samples = list(intervals.resampled(drafts.cluster, RESAMPLES, seed))
        return cls(
            drafts,
            logistic_fit(design, drafts.observed),
            np.array([logistic_fit(design[at], drafts.observed[at]) for at in samples]),
            float(entropies[first].mean()),
            np.array([entropies[at][first[at]].mean() for at in samples]),
        )

    @property
    def first_intercept(self) -> Interval:
        return intervals.around(float(self.theta[1]), self.thetas[:, 1])

    def row(self) -> Row:
        """(group, workload, labels, entropy, slope, intercepts); none for a position with too few labels for one."""
        counts = [len(self.drafts.observed), *np.bincount(self.drafts.position, minlength=self.drafts.positions)]
        coefficients = [
            intervals.around(float(value), draws) if count >= FEWEST else ""
            for count, value, draws in zip(counts, self.theta, self.thetas.T, strict=True)
        ]
        entropy = "" if np.isnan(self.entropy) else intervals.around(self.entropy, self.entropies)
        return (self.drafts.group, self.drafts.workload, counts[0], entropy, *coefficients)


def correlation(fits: Sequence[Fit]) -> Interval:
    """Pearson's, between the first intercept and the mean entropy of the first draft, over fits."""

    def pearson(intercepts: Sequence[float], entropies: Sequence[float]) -> float:
        return float(np.corrcoef(intercepts, entropies)[0, 1])

    draws = [pearson([fit.thetas[r, 1] for fit in fits], [fit.entropies[r] for fit in fits]) for r in range(RESAMPLES)]
    value = pearson([fit.theta[1] for fit in fits], [fit.entropy for fit in fits])
    return intervals.around(value, np.array(draws))


def correlation_rows(fits: Sequence[Fit]) -> list[Row]:
    """(pair and temperature, traces, correlation), and over all pairs at a temperature; of three traces or more."""
    known = [fit for fit in fits if not np.isnan(fit.entropy)]
    kinds: dict[str, list[Fit]] = {}
    for fit in known:
        kinds.setdefault(fit.drafts.group, []).append(fit)
    for fit in known:
        kinds.setdefault(f"every pair, T = {fit.drafts.temperature}", []).append(fit)
    return [(name, len(some), correlation(some)) for name, some in kinds.items() if len(some) > 2]
