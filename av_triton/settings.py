"""What a user may set, and the bounds of the kernels."""

from typing import Literal

import msgspec

# Bounds of the kernels: one program holds a [positions, rows] tile in registers.
MAX_DRAFT_POSITIONS = 16
MAX_ROWS = 1024

LARGEST = 1e30  # coefficient: its product with a feature is finite in float32

# Stratum ids of the default `Settings.strata`.
SAMPLED, GREEDY = 0, 1


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an `AdaptiveVerifier`; invalid values raise ValueError at construction.

    Learning
        refit_interval: observed steps between two Newton steps.
        ridge: added to the diagonal of the Hessian.
        damping, memory: a coefficient with n labels since the last refit takes n / (m + damping) of its Newton step; m
            is n at first and where the step is more than three standard errors, else the number of all its labels, but
            at most memory * n. memory 1: each refit goes by the labels since the last one alone; more: steadier at
            rest, slower after a small change.
        max_slope_step, max_intercept_step: bounds on one refit's move. Without them a batch of saturated rows
            (f = 40) throws the slope to 1e6 in one step.
        strata: names of the groups of requests that have coefficients of their own.
        initial_slopes: one per stratum. initial_intercept: of every position.
        replicas: how many replicas' sums may be added before a refit (bounds the fixed-point sums).
        offset_prior: adds to each request's log-odds an offset of its own, R / (V + offset_prior), with R the sum of
            y - p over the request's labels and V that of p(1-p), p without the offset. It stands for the inverse
            variance of the offsets among requests: the smaller, the sooner a request's labels count. None: no offset.
            In each stratum it is served while it predicts better, from 4096 labels on; so is a head's correction.
        head: learn a correction of the log-odds from the drafter's hidden states, where the runtime gives them
            (`hidden_size` of the estimator). None: yes, unless the runtime finds that it costs too much.
        entropy: keep the entropy of every draft distribution, by slot (`AcceptanceEstimator.state.entropies`).
        history: keep how likely the drawn tokens were, by slot (`AcceptanceEstimator.state.gaps`). Scores use neither.

    Planning
        policy: where the budget comes from. "earlier": argmax of accepted per millisecond over the survivals of an
            earlier step. "fixed": `fixed_budget`. "lookahead": optimistic look-ahead over the current survivals.
            Each of the three is lossless; argmax over the *current* survivals is not, and is not offered.
        fixed_budget: drafts per segment under policy "fixed".
        exploration: share of the drafts admitted at full depth whatever their score, so that a position that is no
            longer verified keeps earning labels; 0 turns it off. More than 64 requests explore as much as 64, for the
            labels that a refit needs do not grow with the batch.
        lag: steps between a proposal and the step that uses it (0: the device uses its own; 2: overlapped runtimes).
        minimum_gain: predicted relative gain over verifying all below which nothing is trimmed.
        max_verify_tokens: cap on drafts plus non-draft tokens of a segment.
        autoregressive: the drafter pays per position, so `Plan.draft_depth` weighs drafting cost against acceptance; 0
            where no draft pays. Exploration is then concentrated on every 32nd step, for which all rows draft deep;
            without it a depth of 0 is final.
    """

    refit_interval: int = 32
    ridge: float = 1e-3
    damping: float = 50.0
    memory: float = 8.0
    max_slope_step: float = 0.1
    max_intercept_step: float = 2.0
    strata: tuple[str, ...] = ("sampled", "greedy")
    initial_slopes: tuple[float, ...] = (0.5, 0.9)
    initial_intercept: float = -0.2
    replicas: int = 1
    offset_prior: float | None = None
    head: bool | None = None
    entropy: bool = False
    history: bool = False

    policy: Literal["earlier", "fixed", "lookahead"] = "earlier"
    fixed_budget: int | None = None
    exploration: float = 0.01
    lag: int = 0
    minimum_gain: float = 0.01
    max_verify_tokens: int | None = None
    autoregressive: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise ValueError(f"Settings.{name} = {getattr(self, name)!r}: {remedy}")

        for field in msgspec.structs.fields(self):
            value, optional = getattr(self, field.name), field.default is None
            if field.type in (int, int | None):
                ok = is_whole(value) or (optional and value is None)
                need(ok, field.name, "give a whole number" + (" or None" if optional else ""))
            elif field.type in (float, float | None):
                ok = is_whole(value) or isinstance(value, float) or (optional and value is None)
                need(ok, field.name, "give a number" + (" or None" if optional else ""))
            elif field.type in (bool, bool | None):
                ok = isinstance(value, bool) or (optional and value is None)
                need(ok, field.name, "give True or False" + (" or None" if optional else ""))
        need(self.refit_interval >= 1, "refit_interval", "give a whole number of steps, at least 1")
        need(0 < self.ridge < float("inf"), "ridge", "give a positive, finite number")
        need(0 <= self.damping < float("inf"), "damping", "give a finite number, 0 or more")
        need(1 <= self.memory < float("inf"), "memory", "give a finite number, 1 or more")
        for name in ("max_slope_step", "max_intercept_step"):
            need(0 < getattr(self, name) <= LARGEST, name, f"give a positive number, at most {LARGEST}")
        names = isinstance(self.strata, tuple | list) and all(isinstance(name, str) for name in self.strata)
        need(names and 1 <= len(self.strata) <= 8, "strata", "name 1 to 8 strata")
        need(len(set(self.strata)) == len(self.strata), "strata", "give every stratum a name of its own")
        need(
            isinstance(self.initial_slopes, tuple | list)
            and len(self.initial_slopes) == len(self.strata)
            and all(isinstance(w, int | float) and 0 <= w <= LARGEST for w in self.initial_slopes),
            "initial_slopes",
            f"give one slope, 0 or more and at most {LARGEST}, for each of {len(self.strata)} strata",
        )
        need(
            abs(self.initial_intercept) <= LARGEST,
            "initial_intercept",
            f"give a number, at most {LARGEST} in absolute value",
        )
        need(self.replicas >= 1, "replicas", "give a whole number, at least 1")
        need(
            self.offset_prior is None or 0.01 <= self.offset_prior < float("inf"),
            "offset_prior",
            "give a finite number, at least 0.01, or None for no offset",
        )
        need(self.policy in ("earlier", "fixed", "lookahead"), "policy", "choose earlier, fixed or lookahead")
        need(
            (self.policy == "fixed") == (self.fixed_budget is not None),
            "fixed_budget",
            "give it with policy='fixed', and only then",
        )
        need(self.fixed_budget is None or self.fixed_budget >= 0, "fixed_budget", "give a whole number, 0 or more")
        need(0 <= self.exploration <= 1, "exploration", "give a share of the drafts, 0 to 1")
        need(0 <= self.lag <= 16, "lag", "give a whole number of steps, 0 to 16")
        need(0.01 <= self.minimum_gain < float("inf"), "minimum_gain", "give at least 0.01")
        need(
            self.max_verify_tokens is None or self.max_verify_tokens >= 1,
            "max_verify_tokens",
            "give a whole number of tokens, at least 1, or None for no cap",
        )
