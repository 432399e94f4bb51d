"""Rules that are *not* lossless, and by how much: the enumeration of test_policies.py is able to fail.

Each is one step away from a shipped policy, uses the shipped scores, and must deviate.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch

from av_triton import AdaptiveVerifier, CostTable, Settings, acceptance_score, choose_budget, logit_max, survival
from av_triton.ops import head
from tests.lossless.exact import Lengths, Markov, Request, View, drawn_token, output_law, with_the_drawn_token
from tests.lossless.grid import (
    DEEP,
    SMALL,
    TIES,
    WIDE,
    affine_cost,
    all_or_nothing_cost,
    random_requests,
    settings,
    stepped_cost,
)
from tests.lossless.rules import Rule
from tests.lossless.shipped import Shipped, hidden_state, hidden_state_after

PAIRS = [random_requests(SMALL, seed) for seed in range(20)]


def survivals(views: tuple[View, ...]) -> torch.Tensor:
    """Survival [rows, positions] by the shipped ops, slope 1 and intercepts 0: p is the largest draft probability."""
    features = logit_max(torch.tensor(views, dtype=torch.float64).log().float())
    return survival(acceptance_score(features, torch.tensor(1.0), torch.zeros(features.shape[-1])))


def allocate(order: list[tuple[int, int]], budget: int, rows: int) -> Lengths:
    """Verify lengths if the first ``budget`` (row, position) slots of ``order`` are admitted."""
    lengths = [0] * rows
    for row, _ in order[:budget]:
        lengths[row] += 1
    return tuple(lengths)


def ranked(s: torch.Tensor, tie) -> list[tuple[int, int]]:
    slots = [(r, k) for r in range(s.shape[0]) for k in range(s.shape[1])]
    return sorted(slots, key=lambda slot: (-float(s[slot]), *tie(*slot)))


def report(name: str, deviations: list[Fraction]) -> None:
    biased = sum(d > 0 for d in deviations)
    print(f"{name}: {len(deviations)} cases, {biased} deviate, largest deviation {float(max(deviations)):.5f}")


def current_budget(scores: torch.Tensor, cost: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
    """The biased rule: the shipped argmax, but over the survivals of the step that is being planned."""
    drafts = torch.full((scores.shape[0],), scores.shape[1], dtype=torch.int32)
    return choose_budget(survival(scores), drafts, cost, segments=segments)


def argmax_of_the_current_survivals(cost: CostTable, depth: int = 2):
    by_drafts = torch.from_numpy(cost.dense(2, 2 * depth + 2).verify[2:].copy())
    return lambda history, scores: int(current_budget(scores, by_drafts))


@pytest.mark.parametrize("make_cost, least", [(all_or_nothing_cost, Fraction(1, 25)), (stepped_cost, Fraction(1, 100))])
def test_a_budget_by_argmax_over_the_current_survivals_deviates(make_cost, least):
    cost = make_cost(2, 2)
    biased = Shipped(2, cost, settings(), budget=argmax_of_the_current_survivals(cost))
    deviations = [output_law(pair, biased, steps=1, horizon=2).deviation for pair in PAIRS]
    report(f"argmax over the current survivals, {make_cost.__name__}", deviations)
    assert max(deviations) >= least
    ours = Shipped(2, cost, settings(), warm_up=1)
    assert all(output_law(pair, ours, steps=1, horizon=2).deviation == 0 for pair in PAIRS)


@pytest.mark.parametrize("size", [SMALL, TIES, DEEP, WIDE], ids=str)
def test_it_deviates_on_the_grid_of_the_policies(size):
    """Same requests, costs and steps as in test_policies.py, with the biased budget in the place of the shipped one."""
    cost = all_or_nothing_cost(size.depth, 2)
    biased = Shipped(size.depth, cost, settings(), budget=argmax_of_the_current_survivals(cost, size.depth))
    pairs = [random_requests(size, seed) for seed in size.seeds]
    deviations = [output_law(pair, biased, steps=size.steps, horizon=size.horizon).deviation for pair in pairs]
    report(f"argmax over the current survivals, {size}", deviations)
    assert min(deviations) > 0


def test_planning_a_step_twice_deviates():
    """plan() stores this step's survivals; a second plan() of the step takes them for those of an earlier one."""
    biased = Shipped(2, all_or_nothing_cost(2, 2), settings(), replans=True)
    deviations = [output_law(pair, biased, steps=1, horizon=2).deviation for pair in PAIRS]
    report("a step planned twice", deviations)
    assert max(deviations) > Fraction(1, 100)


CERTAIN = (Fraction(1), Fraction(0))
EVEN = (Fraction(1, 2), Fraction(1, 2))


def tied_pair() -> list[Request]:
    """Survivals tie exactly: after its token 0 the second drafter is certain, so both its positions survive equally."""
    target = Markov(dict.fromkeys([(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)], EVEN), 2)
    skewed = (Fraction(3, 4), Fraction(1, 4))
    first = Markov(dict.fromkeys(target.table, skewed), 2)
    second = Markov({c: CERTAIN if c == (0,) else skewed for c in target.table}, 2)
    return [Request(target, first), Request(target, second)]


def test_ties_broken_deepest_position_first_deviate():
    """With a budget of 1 the second request is verified only if its first token made its second position certain."""
    position_first = Rule(lambda v: allocate(ranked(survivals(v), lambda row, k: (k, row)), 1, 2), 2)
    deepest_first = Rule(lambda v: allocate(ranked(survivals(v), lambda row, k: (-k, row)), 1, 2), 2)
    shipped = Shipped(2, affine_cost(2, 2), settings("fixed", fixed_budget=1))
    deviation = output_law(tied_pair(), deepest_first, steps=1, horizon=2).deviation
    report("ties deepest position first", [deviation])
    assert deviation > Fraction(1, 100)
    for policy in (position_first, shipped):
        outcome = output_law(tied_pair(), policy, steps=1, horizon=2)
        assert outcome.deviation == 0
        assert outcome.lengths == [{(1, 0)}]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_scoring_the_drawn_token_deviates(budget):
    fixed = settings("fixed", fixed_budget=budget)
    shipped = Shipped(2, affine_cost(2, 2), fixed)
    deviations = [output_law(p, shipped, steps=1, horizon=2, show=drawn_token).deviation for p in PAIRS[:10]]
    report(f"logit(q(drawn token)), budget {budget}", deviations)
    assert max(deviations) > Fraction(1, 100)
    assert all(output_law(pair, shipped, steps=1, horizon=2).deviation == 0 for pair in PAIRS[:10])


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_an_offset_learned_from_the_drafts_of_the_same_step_deviates(budget):
    options = settings("fixed", fixed_budget=budget, offset_prior=0.05, refit_interval=1000)
    biased = Shipped(2, affine_cost(2, 2), options, peeks=True)
    deviations = [output_law(p, biased, steps=1, horizon=2, show=with_the_drawn_token).deviation for p in PAIRS[:10]]
    report(f"offset from q(drawn token) of the same step, budget {budget}", deviations)
    assert max(deviations) > Fraction(1, 100)
    shipped = Shipped(2, affine_cost(2, 2), options, learns=True)
    assert all(output_law(p, shipped, steps=2, horizon=2, acceptance=True).deviation == 0 for p in PAIRS[:10])


def with_a_head(budget: int, hidden=hidden_state) -> Shipped:
    options = settings("fixed", fixed_budget=budget, refit_interval=1000)
    return Shipped(2, affine_cost(2, 2), options, hidden=hidden)


def deviations_with_the_drawn_token(policy: Shipped, steps: int = 1) -> list[Fraction]:
    laws = (output_law(pair, policy, steps=steps, horizon=2, show=with_the_drawn_token) for pair in PAIRS[:10])
    return [law.deviation for law in laws]


@pytest.mark.parametrize("budget", [2, 3])  # 1 goes to a first draft, which has no history
def test_a_history_shifted_by_one_deviates(monkeypatch, budget):
    """Position k is scored with log q(x_k), in place of log q(x_{k-1})."""
    right = head.history_reference
    assert not any(deviations_with_the_drawn_token(with_a_head(budget)))
    monkeypatch.setattr(head, "history_reference", lambda f, gaps: right(*(each.roll(-1, -1) for each in (f, gaps))))
    deviations = deviations_with_the_drawn_token(with_a_head(budget))
    report(f"log q of the draft itself, budget {budget}", deviations)
    assert max(deviations) > Fraction(1, 100)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_hidden_state_from_after_the_draft_deviates(budget):
    deviations = deviations_with_the_drawn_token(with_a_head(budget, hidden_state_after))
    report(f"hidden state after the draft, budget {budget}", deviations)
    assert max(deviations) > Fraction(1, 100)


def footnote() -> Request:
    target = Markov({(): EVEN, (0,): EVEN, (1,): EVEN}, 1)
    drafter = Markov({c: (Fraction(1, 5), Fraction(4, 5)) for c in target.table}, 1)
    return Request(target, drafter)


def test_the_articles_footnote():
    """p = [.5, .5], q = [.2, .8]: "trim if q(x) < .5" gives [.4, .6]; the shipped policies give [.5, .5]."""
    trim = Rule(lambda views: tuple(int(view[0][0] >= 0.5) for view in views), 1)
    biased = output_law([footnote()], trim, steps=1, horizon=1, show=drawn_token)
    assert biased.marginal(0) == {(0,): Fraction(2, 5), (1,): Fraction(3, 5)}
    for policy in (
        Settings(policy="fixed", fixed_budget=0),
        Settings(policy="fixed", fixed_budget=1),
        Settings(policy="lookahead"),
        Settings(),
    ):
        for warm_up in (0, 2):
            ours = Shipped(1, affine_cost(1, 1), policy, requests=1, warm_up=warm_up)
            outcome = output_law([footnote()], ours, steps=2, horizon=1)
            assert outcome.marginal(0) == {(0,): Fraction(1, 2), (1,): Fraction(1, 2)}


def explored_among_the_others(cost):
    """Look-ahead over all slots by survival, although the explored row 0 is admitted first whatever its survivals."""
    verify = cost.dense(2, 6).verify[2:]

    def lengths(views):
        s = survivals(views)
        values = [float(s[slot]) for slot in ranked(s, lambda row, k: (k, row))]
        accepted, n = 2.0, 0
        for i, value in enumerate(values):
            rest = range(1, len(values) - i + 1)
            if not any((accepted + m * value) / verify[i + m] > accepted / verify[i] for m in rest):
                break
            accepted, n = accepted + value, i + 1
        s[0] = 2.0
        return allocate(ranked(s, lambda row, k: (k, row)), max(n, s.shape[1]), 2)

    return lengths


def test_look_ahead_that_ranks_explored_rows_among_the_others_deviates():
    rule = Rule(explored_among_the_others(affine_cost(2, 2)), 2)
    deviations = [output_law(pair, rule, steps=1, horizon=2).deviation for pair in PAIRS]
    report("look-ahead with explored rows ranked among the others", deviations)
    assert max(deviations) > Fraction(1, 100)


P = np.array([0.7, 0.2, 0.1])
Q = np.array([0.1, 0.2, 0.7])
SURE = np.array([0.98, 0.01, 0.01])
FLAT = np.array([0.34, 0.33, 0.33])


def first_token_frequencies(current: bool, draws: int, rows: int = 100) -> np.ndarray:
    """First token of a sampled loop around the real verifier, two drafts per row, one budget for every two rows.

    The first draft comes from Q. The second draft's distribution is sure after token 2 and flat otherwise, so its score
    gives the first drawn token away. Any number of drafts makes a step 2.25 times as dear: it pays for two rows with a
    sure score, and for no others. ``current``: the budget is the argmax over this step's own survivals.
    """
    rng = np.random.default_rng(0)
    cost = CostTable(draft=[(1, 1e-6)], verify=[(2, 10.0), *((2 + n, 22.5) for n in range(1, 5))])
    by_drafts = torch.from_numpy(cost.dense(2, 6).verify[2:].copy())
    verifier = AdaptiveVerifier(rows, 2, "cpu", cost=cost, settings=settings(refit_interval=1_000))
    slots, segments = torch.arange(rows, dtype=torch.int32), torch.arange(0, rows + 1, 2, dtype=torch.int32)
    verifier.reset(slots)
    counts, lengths_used = np.zeros(3), set()
    for _ in range(draws // rows):
        drafts = rng.choice(3, size=rows, p=Q)
        q = np.stack([np.tile(Q, (rows, 1)), np.where((drafts == 2)[:, None], SURE, FLAT)], axis=1)
        scores = verifier.score(torch.from_numpy(np.log(q)).float(), slots)
        budget = current_budget(scores, by_drafts, segments) if current else None
        admitted = verifier.plan(slots, budget=budget, segments=segments).admitted.numpy().copy()
        lengths_used |= set(admitted.tolist())
        accept = rng.random(rows) < np.minimum(1, P[drafts] / Q[drafts])
        residual = np.maximum(P - Q, 0) / np.maximum(P - Q, 0).sum()
        bonus, rejected = rng.choice(3, size=rows, p=P), rng.choice(3, size=rows, p=residual)
        counts += np.bincount(np.where(admitted == 0, bonus, np.where(accept, drafts, rejected)), minlength=3)
        verifier.observe(slots, torch.from_numpy(np.where(accept, np.minimum(admitted, 1), 0).astype(np.int32)))
    assert lengths_used == {0, 2}
    return counts / counts.sum()


def test_report_mlx_port_budget_from_the_current_steps_later_positions():
    """MLX port: p = [.7, .2, .1], q = [.1, .2, .7], 12,000 draws, tolerance .015."""
    ours, theirs = first_token_frequencies(False, draws=12_000), first_token_frequencies(True, draws=3_000)
    print(f"first token over 12,000 draws: ours {ours}, budget from the current step {theirs}, target {P}")
    assert np.abs(ours - P).max() < 0.015
    assert np.abs(theirs - P).max() > 0.05
