"""The shipped policies, enumerated exactly: the joint law of the outputs deviates from the target's by 0.

Each test is one rule for the verify lengths, over random targets and autoregressive drafters, two consecutive
speculative steps or more, so that what was drawn in one step decides the lengths of the next. A test also says that its
rule was at work: which budgets or lengths occurred. test_counterexamples.py shows that the same enumeration can fail.
"""

from dataclasses import dataclass
from fractions import Fraction

import pytest

from av_triton import CostTable
from tests.lossless.exact import Markov, Outcome, Request, output_law, with_the_drawn_token
from tests.lossless.grid import (
    DEEP,
    LARGE,
    SMALL,
    THREE_STEPS,
    TIES,
    WIDE,
    Size,
    affine_cost,
    all_or_nothing_cost,
    costs,
    random_requests,
    settings,
    stepped_cost,
)
from tests.lossless.shipped import Shipped, hidden_state
from tests.lossless.test_block_verification import block_verification

every_size = pytest.mark.parametrize("size", [SMALL, TIES, DEEP, WIDE, *LARGE], ids=str)
few_sizes = pytest.mark.parametrize("size", [SMALL, *LARGE], ids=str)
three_steps = pytest.mark.parametrize("size", [THREE_STEPS, *LARGE[-1:]], ids=str)
every_policy = pytest.mark.parametrize("policy", ["earlier", "fixed", "lookahead"])
both_policies = pytest.mark.parametrize("policy", ["earlier", "lookahead"])


@dataclass(frozen=True)
class Decoded:
    """What the cases of one rule did."""

    policies: list[Shipped]
    outcomes: list[Outcome]

    @property
    def budgets(self) -> set[tuple[int, ...]]:
        return set().union(*(policy.budgets for policy in self.policies))

    @property
    def lengths(self) -> set[tuple[int, ...]]:
        return set().union(*(used for outcome in self.outcomes for used in outcome.lengths))

    def varied(self, step: int) -> int:
        """Number of cases in which the lengths of this step depended on something."""
        return sum(len(outcome.lengths[step]) > 1 for outcome in self.outcomes)


def decode(rule: str, size: Size, variants: list[dict], count: int = 2, **options) -> Decoded:
    """Enumerates every variant of the verifier for every seed; requires a deviation of exactly 0."""
    options = {"steps": size.steps, "horizon": size.horizon, **options}
    policies = [Shipped(size.depth, seed=i, **variant) for i, variant in enumerate(variants)]
    outcomes = []
    for seed in size.seeds:
        requests = random_requests(size, seed, count)
        outcomes += [output_law(requests, policy, **options) for policy in policies]
    biased = [outcome.deviation for outcome in outcomes if outcome.deviation]
    worst = max(biased, default=Fraction(0))
    plans = sum(policy.plans for policy in policies)
    print(
        f"RULE {rule}, {size}: {len(outcomes)} cases, {plans} plans, {len(biased)} deviate, largest deviation {worst}"
    )
    assert not biased
    return Decoded(policies, outcomes)


@every_size
def test_budget_of_an_earlier_step(size):
    variants = [{"cost": c, "settings": settings(), "warm_up": w} for c in costs(size) for w in (0, 1)]
    decoded = decode("earlier step", size, variants)
    assert len(decoded.budgets) > 2
    assert decoded.varied(1) >= len(decoded.outcomes) // 4
    # What was drawn in the first step decided the budget of the second.
    assert any(len({sum(lengths) for lengths in outcome.lengths[1]}) > 1 for outcome in decoded.outcomes)


@every_size
def test_fixed_budget(size):
    budgets = range(2 * size.depth)
    variants = [{"cost": affine_cost(size.depth, 2), "settings": settings("fixed", fixed_budget=n)} for n in budgets]
    decoded = decode("fixed budget", size, variants)
    assert decoded.budgets == {(n,) for n in budgets}
    assert decoded.varied(0)


@every_size
def test_optimistic_look_ahead(size):
    variants = [{"cost": c, "settings": settings("lookahead"), "warm_up": w} for c in costs(size) for w in (0, 1)]
    decoded = decode("look-ahead", size, variants)
    assert len(decoded.budgets) > 2
    assert decoded.varied(1) >= len(decoded.outcomes) // 4


@every_policy
@few_sizes
def test_exploration_in_every_phase(size, policy):
    """A rate of 1/4 explores one of two rows in every second step; 1/3 in two of three."""
    phases = [(1 / 4, w) for w in range(1, 5)] + [(1 / 3, w) for w in range(1, 4)]
    variants = [
        {"cost": c, "settings": settings(policy, exploration=rate), "warm_up": w}
        for rate, w in phases
        for c in costs(size)[:2]
    ]
    decoded = decode(f"exploration, {policy}", size, variants)
    if policy == "fixed":
        deepest = min(size.depth, settings("fixed").fixed_budget)
        assert {(deepest, 0), (0, deepest)} <= decoded.lengths


@both_policies
@three_steps
def test_bypass_with_hysteresis(size, policy):
    """Minimum gains amid the gains that occur: histories differ in whether anything is trimmed at all."""
    variants = [
        {"cost": cost, "settings": settings(policy, minimum_gain=gain), "warm_up": w}
        for cost, gain, w in (
            (affine_cost(size.depth, 2, slope=1.2), 0.06, 2),
            (all_or_nothing_cost(size.depth, 2), 0.03, 0),
            (all_or_nothing_cost(size.depth, 2), 0.1, 2),
        )
    ]
    decoded = decode(f"bypass, {policy}", size, variants)
    if policy == "earlier":
        assert any(policy.statuses == {True, False} for policy in decoded.policies)


@both_policies
@few_sizes
def test_rounding_up_to_captured_sizes(size, policy):
    """Captured at 3 tokens and at all: with two bonus tokens that leaves budgets of 1, of all, and nothing between."""
    captured = [3, 2 * size.depth + 2]
    cost = CostTable(draft=[(1, 1e-6)], verify=[(3, 4.0), (captured[1], 4.0 + 1.25 * size.depth)], captured=captured)
    variants = [{"cost": cost, "settings": settings(policy), "warm_up": w} for w in (0, 1, 2)]
    decoded = decode(f"captured sizes, {policy}", size, variants)
    assert decoded.budgets == {(1,), (2 * size.depth,)}


@both_policies
@few_sizes
def test_draft_depth_followed(size, policy):
    """The drafter stops at the depth that the step before offered."""
    cost = CostTable(draft=[(1, 0.8)], verify=all_or_nothing_cost(size.depth, 2).verify)
    variants = [
        {"cost": cost, "settings": settings(policy, autoregressive=True), "warm_up": w, "follow_depth": True}
        for w in (0, 1, 2)
    ]
    decoded = decode(f"draft depth, {policy}", size, variants)
    assert len({h.draft_depth for p in decoded.policies for h in p.histories}) > 1


@few_sizes
@pytest.mark.parametrize("batches", [((0,), (0, 1)), ((0, 1), (1,), (0, 1)), ((1,), (0, 1), (1, 0))])
def test_requests_join_and_leave(size, batches):
    """A request that joins counts at the mean survival of the others; rows change their order."""
    decode("join and leave", size, [{"cost": c, "settings": settings()} for c in costs(size)], batches=batches)


@pytest.mark.parametrize(
    "size",
    [Size((0, 1), horizon=2, order=1, peaks=2), pytest.param(Size(range(3), order=1, peaks=2), marks=pytest.mark.full)],
)
def test_a_third_request_joins_two(size):
    variants = [{"cost": c, "settings": settings(), "requests": 3} for c in costs(size, 3)]
    decode("third request joins", size, variants, batches=((0, 2), (0, 1, 2)), count=3)


@both_policies
@three_steps
def test_steps_without_features(size, policy):
    """No scores in one step, in the first step, or of one request only."""
    rules = [lambda step, r: step != 1, lambda step, r: step > 0, lambda step, r: not (step == 1 and r == 0)]
    cost = all_or_nothing_cost(size.depth, 2)
    variants = [
        {"cost": cost, "settings": settings(policy), "warm_up": w, "scored": rule} for w, rule in enumerate(rules)
    ]
    decode(f"without features, {policy}", size, variants)


@every_policy
@few_sizes
def test_max_verify_tokens(size, policy):
    cost = stepped_cost(size.depth, 2, step=2.75)
    variants = [
        {"cost": cost, "settings": settings(policy, max_verify_tokens=cap), "warm_up": w}
        for cap in (2, 3, 4)
        for w in (1, 2)
    ]
    decoded = decode(f"cap on tokens, {policy}", size, variants)
    assert max(sum(lengths) for lengths in decoded.lengths) == 2


@every_policy
@few_sizes
def test_refits_between_the_steps(size, policy):
    """Coefficients move after every step, by verdicts that depend on the drawn tokens; some rows do not teach."""
    changes = {"refit_interval": 1, "damping": 1.0, "max_slope_step": 0.3}
    variants = [
        {
            "cost": cost,
            "settings": settings(policy, **changes),
            "warm_up": 1,
            "learns": True,
            "teach": teach,
            "strata": strata,
        }
        for cost in (all_or_nothing_cost(size.depth, 2), affine_cost(size.depth, 2))
        for teach, strata in ((None, (0, 0)), (None, (0, 1)), (lambda step, r: r == step % 2, (0, 0)))
    ]
    decoded = decode(f"refits, {policy}", size, variants)
    assert max(len({h.coefficients for h in p.histories}) for p in decoded.policies) > 5
    assert decoded.varied(1)


@every_policy
@pytest.mark.parametrize("acceptance", [True, False], ids=["exact labels", "verdicts"])
@few_sizes
def test_the_requests_offsets(size, acceptance, policy):
    """After every step each request's offset moves, by its verdicts or by what its drawn tokens were accepted with."""
    changes = {"offset_prior": 0.05, "damping": 1.0, "max_slope_step": 0.3}
    variants = [
        {"cost": cost, "settings": settings(policy, **changes, refit_interval=interval), "warm_up": 1, "learns": True}
        for cost, interval in ((all_or_nothing_cost(size.depth, 2), 1), (affine_cost(size.depth, 2), 1000))
    ]
    decoded = decode(f"offsets, {policy}", size, variants, acceptance=acceptance)
    assert max(len({h.offsets for h in p.histories}) for p in decoded.policies) > 5
    assert decoded.varied(1)


few_and_small = pytest.mark.parametrize("size", [Size((1,), order=1, peaks=2), *LARGE[:1]], ids=str)
labels = pytest.mark.parametrize("acceptance", [True, False], ids=["exact labels", "verdicts"])


def with_everything_added(size: Size) -> list[dict]:
    """Block and position-wise scores with head, history and offset, served whatever they gain; all of it learns."""
    changes = {"offset_prior": 0.05, "refit_interval": 1, "damping": 1.0, "max_slope_step": 0.3}
    return [
        {"cost": all_or_nothing_cost(size.depth, 2), "hidden": hidden_state, "learns": True, "warm_up": 1, **way}
        for way in (
            {"settings": settings(**changes)},
            {"settings": settings("lookahead", **changes), "position_wise": True},
            {"settings": settings("fixed", **changes), "padding": True},
        )
    ]


@labels
@few_and_small
def test_the_head(size, acceptance):
    """Hidden states and history that know the drafts before; the head's weights move after every step, by labels that
    depend on what was drawn."""
    variants = with_everything_added(size)
    decoded = decode("head", size, variants, acceptance=acceptance, show=with_the_drawn_token)
    assert max(len({h.weights for h in p.histories}) for p in decoded.policies) > 5
    assert max(len({h.offsets for h in p.histories}) for p in decoded.policies) > 5
    assert decoded.varied(0)
    assert decoded.varied(1)


@labels
@few_and_small
def test_the_head_of_a_block_drafter(size, acceptance):
    """Drafts that do not depend on each other: all are drawn before the one call that scores them."""
    drafters = [dict.fromkeys(r.drafter.table, r.drafter(())) for r in random_requests(size, size.seeds[0])]
    requests = [
        Request(r.target, Markov(drafter, r.target.order))
        for r, drafter in zip(random_requests(size, size.seeds[0]), drafters, strict=True)
    ]
    for variant in with_everything_added(size)[::2]:
        policy = Shipped(size.depth, **variant)
        options = {"steps": size.steps, "horizon": size.horizon, "acceptance": acceptance}
        law = output_law(requests, policy, show=with_the_drawn_token, **options)
        assert law.deviation == 0
        assert len(law.lengths[1]) > 1


@three_steps
def test_proposals_used_later(size):
    """A host that puts the last step's proposal in force, and the device's own lag of one and two steps."""

    def host(history, scores):
        return history.proposals[-1] if history.proposals else None

    ways = [{"settings": settings(), "budget": host}] + [{"settings": settings(lag=n)} for n in (1, 2)]
    variants = [{"cost": all_or_nothing_cost(size.depth, 2), "warm_up": 1, **way} for way in ways]
    decode("proposals used later", size, variants)


@both_policies
@few_sizes
def test_segments_with_budgets_of_their_own(size, policy):
    cost = CostTable(
        draft=[(1, 1e-6)], verify=[(1, 4.0), *((1 + n, 5.0 + 2 * size.depth) for n in range(1, size.depth + 1))]
    )
    variants = [{"cost": cost, "settings": settings(policy), "warm_up": w, "segments": (0, 1, 2)} for w in (0, 1)]
    decoded = decode(f"segments, {policy}", size, variants)
    assert len(decoded.budgets) > 2


@both_policies
@few_sizes
def test_how_the_runtime_calls_it(size, policy):
    """Padding rows, positions scored one at a time, other slots and strata, unequal numbers of drafts."""
    ways = [
        {"padding": True},
        {"position_wise": True},
        {"padding": True, "slots": (0, 5, 2), "strata": (1, 0, 0)},
        {"fixed_depths": (size.depth - 1, size.depth)},
        {"fixed_depths": (0, size.depth)},
    ]
    cost = all_or_nothing_cost(size.depth, 2)
    decode(
        f"ways to call, {policy}",
        size,
        [{"cost": cost, "settings": settings(policy), "warm_up": w, **way} for way in ways for w in (0, 1)],
    )


@every_policy
@few_sizes
def test_block_verification(size, policy):
    variants = [
        {"cost": c, "settings": settings(policy, exploration=0.25), "warm_up": w}
        for c in costs(size)[:2]
        for w in (1, 2)
    ]
    decode(f"block verification, {policy}", size, variants, verification=block_verification)


@both_policies
@pytest.mark.parametrize(
    "size",
    [Size((1, 4), order=1, peaks=2), pytest.param(Size(range(8), order=1, horizon=4), marks=pytest.mark.full)],
    ids=str,
)
def test_everything_at_once(size, policy):
    """Exploration, bypass, captured sizes, refits, offsets, a joining request, and a step without scores of one
    request."""
    cost = CostTable(draft=[(1, 0.5)], verify=[(1, 4.0), (3, 4.4), (6, 7.3)], captured=[1, 3, 6])
    changes = {
        "exploration": 0.25,
        "minimum_gain": 0.05,
        "refit_interval": 1,
        "damping": 1.0,
        "max_slope_step": 1.0,
        "autoregressive": True,
        "offset_prior": 0.5,
    }
    variants = [
        {
            "cost": cost,
            "settings": settings(policy, **changes),
            "requests": 1,
            "warm_up": w,
            "learns": True,
            "follow_depth": True,
            "scored": lambda step, r: not (step == 1 and r == 0),
        }
        for w in range(4)
    ]
    decode(f"everything at once, {policy}", size, variants, batches=((0,), (0, 1), (0, 1)))
