"""The verifier's objects: both backends on random traffic, slots, padding, schedules, files and status."""

import itertools
import os
import warnings

import numpy as np
import pytest
import torch

import av_triton
from av_triton import AcceptanceEstimator, AdaptiveVerifier, CostTable, Settings, SnapshotError, VerifyPlanner
from av_triton.ops.select import explored_rows_reference

K, SLOTS, VOCAB = 5, 24, 37
COST = CostTable(
    draft=[(1, 1.0), (32, 3.0)],
    verify=[(1, 5.0), (8, 5.0), (16, 7.0), (32, 9.0), (64, 16.0), (128, 30.0)],
    captured=[1, 8, 16, 32, 64, 128],
)
STEEP = CostTable(draft=[(1, 0.5)], verify=[(1, 1.0), (100, 100.0)])
LINEAR = CostTable(draft=[(1, 0.5), (64, 0.5)], verify=[(1, 2.0), (256, 27.5)])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def make(settings=None, cost=COST, slots=SLOTS, positions=K, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return AdaptiveVerifier(slots, positions, cost=cost, settings=settings, **options)


def peaked(rng, rows, positions=K, scale=3.0):
    return torch.randn(rows, positions, VOCAB, generator=rng) * scale


def state_of(verifier):
    return [t.clone() for t in (*verifier.estimator.state, *verifier.planner.state) if t is not None]


def assert_same_state(verifier, before):
    assert all(torch.equal(x, y) for x, y in zip(before, state_of(verifier), strict=True))


def drive(settings, *, seed=0, steps=5, segments=False, budget=None, position_wise=False):
    """Random traffic through a verifier; everything it said."""
    g = torch.Generator().manual_seed(seed)
    verifier = make(settings)
    verifier.reset(torch.arange(SLOTS), (torch.arange(SLOTS) % 2).int())
    said = []
    for step in range(steps):
        rows = int(torch.randint(1, 9, (1,), generator=g))
        slots = torch.randperm(SLOTS, generator=g)[:rows]
        if step % 3 == 0:
            slots = torch.cat([slots, torch.tensor([-1, -1])])
            rows += 2
        x = peaked(g, rows)
        if step % 4 == 3:
            x[0, 2] = torch.nan
        drafts = torch.randint(0, K + 1, (rows,), generator=g).int() if step % 2 else None
        if position_wise:
            for k in range(K):
                verifier.score(x[:, k].contiguous(), slots, position=k, temperature=0.7)
            p = verifier.estimator._row_scores[:rows, :K]
        elif step != 4:
            p = verifier.score(x, slots, temperature=torch.rand(rows, generator=g))
        offsets = ints(0, rows // 2, rows) if segments and rows > 3 else None
        plan = verifier.plan(slots, drafts=drafts, segments=offsets, budget=budget)
        said.append([p.clone(), *(part.clone() for part in plan)])
        accepted = torch.minimum(torch.randint(0, K + 1, (rows,), generator=g).int(), plan.admitted)
        verifier.observe(slots, accepted, teach=torch.rand(rows, generator=g) > 0.1)
        if step % 5 == 4:
            verifier.reset(slots[:2].contiguous())
    return verifier, said


TRAFFIC = [
    ({}, {}),
    ({"policy": "lookahead", "exploration": 0.1}, {"segments": True}),
    ({"policy": "fixed", "fixed_budget": 7}, {}),
    ({"autoregressive": True}, {"position_wise": True}),
    ({"exploration": 0.2, "lag": 2}, {"budget": 6}),
    ({"max_verify_tokens": 20, "minimum_gain": 0.01}, {"segments": True}),
]


@pytest.mark.parametrize("options,how", TRAFFIC)
def test_both_backends_say_the_same_on_random_traffic(use, options, how):
    settings = Settings(refit_interval=2, **options)
    runs = []
    for backend in ("torch", "triton"):
        use(backend)
        runs.append(drive(settings, **how))
    (a, first), (b, second) = runs
    for x, y in zip(first, second, strict=True):
        assert torch.allclose(x[0], y[0], atol=1e-5)
        assert all(torch.equal(u, v) for u, v in zip(x[1:], y[1:], strict=True))
    ours, theirs = a.counters(), b.counters()
    for name in ours:
        slack = 1e2 if name == "expected_accepted" else 0
        assert np.abs(ours[name] - theirs[name]).max() <= slack, name
    assert np.allclose(a.coefficients().intercepts, b.coefficients().intercepts, atol=1e-4)
    assert a.coefficients().refits == b.coefficients().refits == 2


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options", [*(o for o, _ in TRAFFIC), {"autoregressive": True, "exploration": 0.1, "max_verify_tokens": 15}]
)
@pytest.mark.parametrize("how", [{}, {"segments": True}, {"budget": 6}, {"position_wise": True}])
def test_both_backends_say_the_same_on_long_traffic(use, options, how, seed):
    settings = Settings(refit_interval=4, **options)
    runs = []
    for backend in ("torch", "triton"):
        use(backend)
        runs.append(drive(settings, seed=seed, steps=16, **how)[1])
    for x, y in zip(*runs, strict=True):
        assert all(torch.equal(u, v) for u, v in zip(x[1:], y[1:], strict=True))


def test_cu_verify_counts_admitted_and_bonus_and_padding_as_zero(backend, rng):
    verifier = make()
    slots = ints(3, -1, 7, 0, -1)
    verifier.score(peaked(rng, 5), slots)
    plan = verifier.plan(slots, drafts=ints(2, 5, 0, 5, 1), budget=4)
    assert int(plan.admitted.sum()) == 4
    assert plan.admitted[[1, 4]].tolist() == [0, 0]
    real = ints(1, 0, 1, 1, 0)
    assert plan.cu_verify.tolist() == [0, *torch.cumsum((plan.admitted + 1) * real, 0).tolist()]
    assert plan.cu_verify.dtype == plan.admitted.dtype == plan.budget.dtype == plan.proposal.dtype == torch.int32


def test_padding_rows_write_nowhere_and_change_nothing(backend, rng):
    x = peaked(rng, 3)
    plans, states = [], []
    for padded in (False, True):
        verifier = make()
        slots, logits, accepted = ints(2, 5, 9), x, ints(1, 0, 2)
        if padded:
            slots = ints(-1, 2, -1, 5, 9)
            logits = torch.randn(5, K, VOCAB)
            logits[[1, 3, 4]] = x
            accepted = ints(5, 1, 5, 0, 2)
        for _ in range(2):
            p = verifier.score(logits, slots)
            plan = verifier.plan(slots, budget=7)
            if padded:
                assert p[[0, 2]].tolist() == [[0.0] * K] * 2
            verifier.observe(slots, accepted)
        plans.append(plan.admitted[[1, 3, 4]].tolist() if padded else plan.admitted.tolist())
        states.append(state_of(verifier))
    assert plans[0] == plans[1]
    assert all(torch.equal(x, y) for x, y in zip(*states, strict=True))


def test_permuted_rows_get_their_own_lengths(backend, rng):
    """State follows the slot, lengths the row: with no ties a permutation of the batch permutes the plan."""
    x, order = peaked(rng, 6), torch.tensor([4, 0, 5, 2, 1, 3])
    slots, drafts = ints(11, 3, 20, 0, 7, 8), ints(5, 4, 5, 0, 3, 5)
    a, b = make(), make()
    for verifier, rows in ((a, torch.arange(6)), (b, order)):
        for _ in range(2):
            verifier.score(x[rows], slots[rows].contiguous())
            plan = verifier.plan(slots[rows].contiguous(), drafts=drafts[rows].contiguous(), budget=11)
        if verifier is a:
            wanted = plan.admitted.clone()
    assert torch.equal(plan.admitted, wanted[order])
    assert torch.equal(a.planner.state.survival, b.planner.state.survival)
    assert torch.equal(a.estimator.state.features, b.estimator.state.features)


def test_scores_by_position_are_those_of_the_whole(backend, rng):
    x, slots, t = peaked(rng, 4), ints(1, 0, -1, 9), torch.tensor([0.5, 1.0, 2.0, 0.0])
    whole, each = make(), make()
    p = whole.score(x, slots, temperature=t).clone()
    for k in range(K):
        assert torch.equal(each.score(x[:, k], slots, position=k, temperature=t), p[:, k])
    assert torch.equal(whole.estimator.state.features, each.estimator.state.features)
    assert torch.equal(whole.estimator.state.scores, each.estimator.state.scores)


@pytest.mark.parametrize("drawn", [False, True], ids=["argmax", "drawn"])
@pytest.mark.parametrize("position", [None, 1])
def test_sampling_scores_as_scoring_does_and_draws_as_the_op(backend, rng, drawn, position):
    first, second = make(), make()
    slots = torch.tensor([2, 0, -1, 5], dtype=torch.int32)
    strata = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    temperature = torch.tensor([1.0, 0.0, 1.0, 0.3])
    for each in (first, second):
        each.estimator.state.slopes.copy_(torch.tensor([0.4, 0.9]))
        each.reset(slots, strata)
    logits = peaked(rng, 4) if position is None else peaked(rng, 4)[:, 1].contiguous()
    per_draft = temperature[:, None].expand(-1, K).contiguous() if position is None else temperature
    seeds = torch.randint(-(2**62), 2**62, logits.shape[:-1], generator=rng) if drawn else None
    drafts = first.sample(logits, slots, seeds, position, temperature)
    tokens, _, log_normalisers = av_triton.sample_and_score(logits, seeds, per_draft)
    scores = second.score(logits, slots, position, temperature)
    real = slots >= 0
    assert torch.equal(drafts.tokens[real], tokens[real])
    assert torch.equal(drafts.log_normalisers[real], log_normalisers[real])
    # A drawn row sums its exponentials in another order.
    torch.testing.assert_close(drafts.scores, scores, rtol=1e-5, atol=1e-6)
    for name in ("features", "scores"):
        found, expected = (getattr(each.estimator.state, name) for each in (first, second))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not drafts.tokens[~real].any()
    assert (drafts.log_normalisers[~real] == -torch.inf).all()


def test_a_block_that_was_cut_short_scores_its_positions_only(backend, rng):
    x, slots = peaked(rng, 4), ints(1, 0, -1, 9)
    whole, short = make(), make()
    p = whole.score(x, slots).clone()
    assert torch.equal(short.score(x[:, :2], slots), p[:, :2])
    assert torch.equal(short.estimator.state.scores[:, :2], whole.estimator.state.scores[:, :2])
    assert (short.estimator.state.scores[:, 2:] == -1).all()
    assert short.plan(slots, drafts=ints(2, 2, 2, 2)).admitted.tolist() == [2, 2, 0, 2]


def test_strata_have_coefficients_of_their_own(backend, rng):
    verifier = make(Settings(initial_slopes=(0.0, 2.0), initial_intercept=0.0))
    verifier.reset(ints(0, 1, 2), ints(0, 1, 0))
    x = peaked(rng, 1).repeat(3, 1, 1)
    p = verifier.score(x, ints(0, 1, 2))
    assert p[0].tolist() == [0.5] * K
    assert torch.equal(p[0], p[2])
    assert not torch.equal(p[0], p[1])


def test_a_reused_slot_brings_no_old_features_nor_survivals(backend, rng):
    """The predecessor's scores are not graded by the successor's verdict, and its survival sets no budget."""
    verifier = make()
    verifier.score(peaked(rng, 2), ints(0, 1))
    verifier.plan(ints(0, 1))
    verifier.reset(ints(0))
    assert verifier.planner.state.survival[0, 0] == -1
    assert bool((verifier.estimator.state.scores[0, :K] == -1).all())
    verifier.observe(ints(0), ints(3), admitted=ints(5))
    assert not verifier.estimator.state.sums.any()
    assert verifier.counters()["labelled"].sum() == 0


def test_a_verdict_counts_once(backend, rng):
    verifier = make(Settings(refit_interval=100))
    slots = ints(0, 1)
    verifier.score(peaked(rng, 2), slots)
    verifier.plan(slots)
    verifier.observe(slots, ints(1, 2))
    sums = verifier.estimator.state.sums.clone()
    verifier.observe(slots, ints(1, 2))
    assert torch.equal(verifier.estimator.state.sums, sums)
    assert verifier.counters()["drafted"].tolist() == [2] * K


def test_unscored_drafts_are_not_learned_from(backend, rng):
    """A score that belongs to an earlier draft of the slot would teach the wrong feature."""
    verifier = make()
    verifier.score(peaked(rng, 1), ints(0))
    verifier.plan(ints(0))
    verifier.observe(ints(0), ints(1))
    verifier.estimator.state.sums.zero_()
    verifier.plan(ints(0))
    verifier.observe(ints(0), ints(1))
    assert not verifier.estimator.state.sums.any()


def test_a_step_without_scores_verifies_all_and_a_partly_scored_one_its_unscored_rows(rng):
    verifier = make(cost=STEEP)
    slots = ints(0, 1, 2)
    for _ in range(3):
        verifier.score(torch.zeros(3, K, VOCAB), slots)
        plan = verifier.plan(slots)
        verifier.observe(slots, ints(0, 0, 0))
    assert int(plan.admitted.sum()) < 3 * K
    plan = verifier.plan(slots)
    assert plan.admitted.tolist() == [K] * 3
    verifier.observe(slots, ints(0, 0, 0))
    verifier.score(torch.zeros(2, K, VOCAB), ints(0, 2))
    plan = verifier.plan(slots, budget=K + 1)
    assert plan.admitted.tolist() == [1, K, 0]
    verifier.observe(slots, ints(0, 0, 0))
    verifier.score(torch.zeros(3, K, VOCAB), slots)
    plan = verifier.plan(slots, drafts=ints(1, 2, 3))
    assert int(plan.budget[0]) <= 6


def test_scores_of_a_replayed_graph_count(rng):
    """A captured score() runs without its Python; only the scores on the device tell that it ran."""
    verifier = make(cost=STEEP)
    slots = ints(0, 1, 2)
    for _ in range(3):
        verifier.estimator.score(torch.zeros(3, K, VOCAB), slots)
        plan = verifier.plan(slots)
        verifier.observe(slots, ints(0, 0, 0))
    assert int(plan.admitted.sum()) < 3 * K


def test_a_segment_without_scores_verifies_all():
    verifier = make(cost=STEEP)
    slots, segments = ints(0, 1, 2, 3), ints(0, 2, 4)
    for _ in range(3):
        verifier.score(torch.zeros(4, K, VOCAB), slots)
        plan = verifier.plan(slots, segments=segments)
        verifier.observe(slots, ints(0, 0, 0, 0))
    assert int(plan.budget.max()) < 2 * K
    verifier.score(torch.zeros(2, K, VOCAB), slots[:2])
    plan = verifier.plan(slots, segments=segments)
    assert int(plan.budget[0]) < 2 * K
    assert plan.admitted.tolist()[2:] == [K, K]


def test_the_first_plan_verifies_all(rng):
    verifier = make(cost=STEEP)
    slots = ints(4, 5)
    verifier.score(torch.zeros(2, K, VOCAB), slots)
    assert verifier.plan(slots).admitted.tolist() == [K, K]


def test_a_new_request_counts_at_the_mean_survival():
    """Three certain requests and a new one: the proposal takes the newcomer for as good as they are."""
    verifier = make(Settings(exploration=0.0, initial_slopes=(1.0, 1.0), initial_intercept=0.0), cost=LINEAR)
    certain = torch.full((3, K, VOCAB), -torch.inf)
    certain[:, :, 0] = 0
    verifier.score(certain, ints(0, 1, 2))
    verifier.plan(ints(0, 1, 2))
    verifier.observe(ints(0, 1, 2), ints(K, K, K))
    verifier.reset(ints(3))
    verifier.score(certain[[0, 1, 2, 2]], ints(0, 1, 2, 3))
    assert verifier.plan(ints(0, 1, 2, 3)).budget.tolist() == [4 * K]


def test_the_budget_in_force_comes_from_the_step_before():
    """Certain drafts after hopeless ones: the plan of that very step still has the earlier budget."""
    verifier = make(Settings(exploration=0.0, initial_slopes=(1.0, 1.0), initial_intercept=0.0), cost=LINEAR)
    slots, hopeless = ints(*range(8)), torch.zeros(8, K, VOCAB)
    certain = torch.full((8, K, VOCAB), -torch.inf)
    certain[:, :, 0] = 0
    budgets = []
    for x in (hopeless, hopeless, certain, certain, hopeless, hopeless):
        verifier.score(x, slots)
        budgets.append(int(verifier.plan(slots).budget[0]))
        verifier.observe(slots, torch.full((8,), -1))
    assert budgets == [8 * K, 0, 0, 8 * K, 8 * K, 0]


def test_a_budget_of_the_host_is_in_force_and_the_proposal_is_for_later(backend, rng):
    verifier = make(Settings(exploration=0.0), cost=LINEAR)
    slots = ints(*range(6))
    for given, granted in ((0, 0), (4, 4), (1000, 6 * K)):
        verifier.score(torch.zeros(6, K, VOCAB), slots)
        plan = verifier.plan(slots, budget=given)
        assert plan.budget.tolist() == [granted]
        assert int(plan.admitted.sum()) == granted
        assert plan.proposal.tolist() == [0]
        verifier.observe(slots, ints(*[0] * 6))
    offsets = ints(0, 2, 2, 6)
    verifier.score(peaked(rng, 6), slots)
    plan = verifier.plan(slots, budget=ints(3, 5, -4), segments=offsets)
    assert plan.budget.tolist() == [3, 0, 0]
    assert [int(plan.admitted[a:b].sum()) for a, b in itertools.pairwise(offsets.tolist())] == [3, 0, 0]


@pytest.mark.parametrize("options", [{}, {"policy": "fixed", "fixed_budget": 9}, {"policy": "lookahead"}])
@pytest.mark.parametrize("how", ["proposal", "given", "unscored", "no cost"])
def test_the_cap_on_verified_tokens_holds_whatever_the_budget(backend, rng, options, how):
    verifier = make(Settings(max_verify_tokens=7, **options), cost=None if how == "no cost" else COST)
    slots = ints(0, -1, 1, 2)
    for _ in range(2):
        if how != "unscored":
            verifier.score(peaked(rng, 4), slots)
        plan = verifier.plan(slots, budget=50 if how == "given" else None)
        assert int(plan.cu_verify[-1]) <= 7
        assert int(plan.budget[0]) <= 4
        verifier.observe(slots, ints(0, 0, 0, 0))
    plan = verifier.plan(slots, budget=50, non_draft_tokens=5)
    assert plan.budget.tolist() == [2]
    plan = verifier.plan(slots, budget=50, non_draft_tokens=ints(6, 40), segments=ints(0, 3, 4))
    assert plan.budget.tolist() == [1, 0]


def test_non_draft_tokens_move_the_budget_along_the_cost_curve(rng):
    """Graphs of 16 and 32 tokens: 4 requests have 12 drafts for free at 4 tokens beside them, none at 16."""
    cost = CostTable(draft=[(1, 0.1)], verify=[(16, 5.0), (32, 50.0)], captured=[16, 32])
    verifier = make(Settings(exploration=0.0), cost=cost)
    slots = ints(0, 1, 2, 3)
    for tokens, wanted in ((None, 12), (4, 12), (10, 6), (16, 0)):
        for _ in range(2):
            verifier.score(torch.zeros(4, K, VOCAB), slots)
            plan = verifier.plan(slots, non_draft_tokens=tokens)
            verifier.observe(slots, ints(-1, -1, -1, -1))
        assert plan.budget.tolist() == [wanted]


def test_exploration_takes_its_share_and_rotates(backend):
    verifier = make(Settings(exploration=0.25, policy="fixed", fixed_budget=K), slots=2)
    slots, turns = ints(0, 1), []
    for _ in range(8):
        verifier.score(torch.zeros(2, K, VOCAB), slots)
        admitted = verifier.plan(slots).admitted.tolist()
        if K in admitted:
            turns.append(admitted.index(K))
        verifier.observe(slots, ints(0, 0))
    assert len(turns) == 4
    assert set(turns) == {0, 1}
    assert verifier.counters()["explored"] == 4


def test_exploration_is_one_percent_of_a_batch_of_up_to_64_and_reaches_every_row():
    for requests in (*range(1, 65), 100, 300):
        rows, counted = set(), 0
        for step in range(6000):
            count, start = explored_rows_reference(step, requests, 10_000)
            counted += count
            rows |= {(start + i) % requests for i in range(count)}
        assert abs(counted - 6000 * min(requests, 64) * 0.01) < 1
        assert len(rows) == requests, requests


def test_a_drafter_that_pays_per_position_explores_every_32nd_step_with_its_whole_share():
    for requests in (1, 7, 64, 200):
        rows, counted = set(), 0
        for step in range(64_000):
            count, start = explored_rows_reference(step, requests, 10_000, 32)
            assert count <= (requests if step % 32 == 0 else 0)
            counted += count
            rows |= {(start + i) % requests for i in range(count)}
        assert abs(counted - 64_000 * min(requests, 64) * 0.01) < 32
        assert len(rows) == requests, requests


def test_a_drafter_of_which_nothing_pays_stops_drafting_and_comes_back(backend):
    """Depth 0 leaves no scores to plan from: exploration has to bring them."""
    settings = Settings(exploration=0.05, refit_interval=4, autoregressive=True, strata=("all",), initial_slopes=(1.0,))
    cost = CostTable(draft=[(1, 1.0), (4, 1.0)], verify=[(1, 4.0), (24, 12.0)])
    verifier = make(settings, cost=cost, slots=4)
    slots, depth, depths, explored = ints(0, 1, 2, 3), K, [], []
    rng = np.random.default_rng(0)
    for step in range(76):
        q_max, p = (0.55, 0.1) if step < 40 else (0.97, 0.97)
        for k in range(depth):
            verifier.score(odds(q_max)[:, k], slots, position=k)
        plan = verifier.plan(slots, torch.full((4,), depth, dtype=torch.int32))
        accepted = [int((rng.random(n) < p).cumprod().sum()) for n in plan.admitted.tolist()]
        depths.append(depth)
        explored.append(verifier.status().explored)
        depth = int(plan.draft_depth)
        verifier.observe(slots, ints(*accepted))
    assert depths[20:32] == [0] * 12
    assert depths[32] == depths[64] == K, "the steps that explore draft to full depth"
    assert [b - a for a, b in itertools.pairwise(explored)][31:64:32] == [4, 4]
    assert depths[33:64] == [0] * 31
    assert min(depths[-8:]) > 0


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_the_depth_of_an_exploring_step_comes_from_the_plan_before_it(backend, lag):
    """Whatever the lag of the proposals: drafting follows at once."""
    settings = Settings(exploration=0.05, autoregressive=True, lag=lag, initial_slopes=(1.0, 1.0))
    cost = CostTable(draft=[(1, 1.0), (4, 1.0)], verify=[(1, 4.0), (24, 12.0)])
    verifier = make(settings, cost=cost, slots=4)
    slots, depth, depths = ints(0, 1, 2, 3), K, []
    for _ in range(70):
        for k in range(depth):
            verifier.score(odds(0.5)[:, k], slots, position=k)
        drafts = torch.full((4,), depth, dtype=torch.int32)
        plan = verifier.plan(slots, drafts, budget=4 * depth if lag else None)
        depths.append(depth)
        depth = int(plan.draft_depth)
        verifier.observe(slots, ints(0, 0, 0, 0))
    assert [step for step, d in enumerate(depths) if d == K and step > 5] == [32, 64]


def test_the_proposal_before_anything_was_scored_is_everything(backend):
    """A host that goes by it must learn something."""
    verifier = make(Settings(exploration=0.0, autoregressive=True, lag=2), cost=LINEAR)
    plan = verifier.plan(ints(0, 1, 2), budget=0)
    assert plan.proposal.tolist() == [3 * K]
    assert plan.draft_depth.tolist() == [K]


def test_exploration_can_be_turned_off():
    verifier = make(Settings(exploration=0.0, policy="fixed", fixed_budget=0))
    for _ in range(8):
        verifier.score(torch.zeros(4, K, VOCAB), ints(0, 1, 2, 3))
        assert not verifier.plan(ints(0, 1, 2, 3)).admitted.any()
        verifier.observe(ints(0, 1, 2, 3), ints(0, 0, 0, 0))
    assert verifier.status().explored == 0


def test_exploration_raises_a_proposal_that_would_starve_it():
    verifier = make(Settings(exploration=0.25), cost=STEEP)
    slots, explored = ints(0, 1), 0
    for step in range(9):
        verifier.score(torch.zeros(2, K, VOCAB), slots)
        plan = verifier.plan(slots)
        if step:
            assert plan.budget.tolist() == [K if step % 2 else 0]
            explored += K in plan.admitted.tolist()
        verifier.observe(slots, ints(0, 0))
    assert explored == 4


def bypass_verifier(gain=0.2):
    """A linear cost where the gain of trimming is a known function of the scores."""
    settings = Settings(exploration=0.0, minimum_gain=gain, initial_slopes=(1.0, 1.0), initial_intercept=0.0)
    return make(settings, cost=CostTable(draft=[(1, 1.0), (64, 1.0)], verify=[(1, 0.1), (1001, 100.1)]))


def odds(p):
    """Logits of two tokens whose most likely one has probability p."""
    x = torch.full((4, K, 2), 0.0)
    x[..., 0] = float(np.log(p / (1 - p)))
    return x


def gain_of(p, rows=4):
    s = sorted((p**k for k in range(1, K + 1) for _ in range(rows)), reverse=True)
    ratios = [(rows + sum(s[:n])) / (1 + 0.1 * (rows + n)) for n in range(rows * K + 1)]
    return max(ratios) / ratios[-1] - 1


def test_bypass_below_the_minimum_gain_with_hysteresis():
    verifier = bypass_verifier(gain=0.2)
    slots = ints(0, 1, 2, 3)
    clear, between, small = 0.55, 0.62, 0.9
    assert gain_of(clear) > 0.3 > gain_of(between) > 0.2 > gain_of(small)
    said = []
    for p in (clear, clear, between, small, small, between, between, clear, clear):
        verifier.score(odds(p), slots)
        plan = verifier.plan(slots)
        said.append((int(plan.budget[0]) == 4 * K, verifier.status().active))
        verifier.observe(slots, ints(-1, -1, -1, -1))
    # A plan goes by the survivals of the plan before.
    trims, all_of_it = (False, True), (True, False)
    assert said[1:] == [trims, trims, trims, all_of_it, all_of_it, all_of_it, all_of_it, trims]
    assert verifier.counters()["bypassed"] == 4
    assert "bypassed" not in verifier.status().reason


def test_draft_depth_follows_acceptance():
    settings = Settings(exploration=0.0, autoregressive=True, initial_slopes=(1.0, 1.0), initial_intercept=0.0)
    cost = CostTable(draft=[(1, 10.0), (64, 10.0)], verify=[(1, 10.0), (256, 11.0)])
    depths = {}
    for p in (0.55, 0.75, 0.999):
        verifier = make(settings, cost=cost)
        for _ in range(2):
            verifier.score(odds(p), ints(0, 1, 2, 3))
            depths[p] = int(verifier.plan(ints(0, 1, 2, 3)).draft_depth[0])
            verifier.observe(ints(0, 1, 2, 3), ints(-1, -1, -1, -1))
        s = np.cumprod([p] * K)
        wanted = int(np.argmax([(1 + s[:d].sum()) / (2 * d + 10 + 4 * d / 255) for d in range(K + 1)]))
        assert depths[p] == wanted
    assert depths[0.55] < depths[0.999] == K


def test_draft_depth_of_a_drafter_that_pays_for_all_is_k(rng):
    verifier = make(cost=LINEAR)
    for _ in range(3):
        verifier.score(torch.zeros(3, K, VOCAB), ints(0, 1, 2))
        assert verifier.plan(ints(0, 1, 2)).draft_depth.tolist() == [K]
        verifier.observe(ints(0, 1, 2), ints(0, 0, 0))


def test_a_depth_that_was_cut_can_grow_again(backend):
    """Beyond the drafts there were, the stored survival goes on with the last conditional score."""
    verifier = make(Settings(initial_slopes=(1.0, 1.0), initial_intercept=0.0))
    verifier.score(odds(0.8), ints(0, 1, 2, 3))
    verifier.plan(ints(0, 1, 2, 3), drafts=ints(2, 5, 0, 1))
    stored = verifier.planner.state.survival[:4, :K]
    wanted = torch.tensor(np.cumprod([0.8] * K)).float()
    for row in (0, 1, 3):
        assert torch.allclose(stored[row], wanted, atol=1e-5)
    assert stored[2, 0] == -1, "a row without drafts keeps what it had"


def test_save_and_load(backend, rng, tmp_path):
    source = make(Settings(refit_interval=1))
    for _ in range(3):
        source.score(peaked(rng, 6), ints(*range(6)))
        source.plan(ints(*range(6)))
        source.observe(ints(*range(6)), ints(5, 0, 2, 1, 3, 4))
    path = tmp_path / "coefficients.json"
    source.save(path)
    target = make()
    target.estimator.state.sums.fill_(7)
    target.load(path)
    assert target.coefficients().slopes == source.coefficients().slopes
    assert target.coefficients().intercepts == source.coefficients().intercepts
    assert not target.estimator.state.sums.any(), "sums for the former coefficients are void"
    assert os.listdir(tmp_path) == ["coefficients.json"]
    x = peaked(rng, 2)
    assert torch.equal(source.score(x, ints(0, 1)), target.score(x, ints(0, 1)))


def test_a_file_that_does_not_fit_changes_nothing(tmp_path):
    source = make()
    path = tmp_path / "c.json"
    source.save(path)
    good = path.read_text()
    target = make()
    before = state_of(target)
    for bad in (
        "", good[: len(good) // 2], "[]", '{"version": 1}', good.replace('"version": 2', '"version": 99'),
        good.replace("-0.2", "1e39", 1), good.replace("0.5", "1e300", 1), good.replace("sampled", "other"), "\0\1\2",
    ):  # fmt: skip
        path.write_text(bad)
        with pytest.raises(SnapshotError, match=r"c\.json"):
            target.load(path)
        assert_same_state(target, before)
    make(positions=3).save(path)
    with pytest.raises(SnapshotError, match="3 draft positions, this estimator has 5"):
        target.load(path)
    with pytest.raises(FileNotFoundError):
        target.load(tmp_path / "missing.json")
    assert_same_state(target, before)


def addresses(verifier):
    tensors = [*verifier.estimator.state, *verifier.planner.state, *verifier.planner._out, *verifier.planner._costs]
    return [t.data_ptr() for t in tensors if t is not None]


def test_addresses_stay_the_same(backend, rng):
    verifier = make(Settings(refit_interval=2, entropy=True, history=True))
    before, views = addresses(verifier), set()
    for rows in (3, 5, 1):
        slots = torch.arange(rows)
        p = verifier.score(peaked(rng, rows), slots)
        plan = verifier.plan(slots)
        views.add((p.data_ptr(), *(part.data_ptr() for part in plan)))
        verifier.observe(slots, torch.zeros(rows, dtype=torch.int32))
        verifier.set_cost(LINEAR)
        verifier.reset(slots)
    assert addresses(verifier) == before
    assert len(views) == 1


def test_set_cost_takes_effect_at_the_next_plan():
    verifier = make(Settings(exploration=0.0), cost=STEEP)
    slots = ints(0, 1, 2)

    def step():
        verifier.score(torch.zeros(3, K, VOCAB), slots)
        plan = verifier.plan(slots)
        verifier.observe(slots, ints(-1, -1, -1))
        return plan

    step()
    assert step().budget.tolist() == [0]
    verifier.set_cost(CostTable(draft=[(1, 1.0)], verify=[(1, 1.0), (100, 1.1)]))
    assert step().budget.tolist() == [3 * K]
    verifier.set_cost(STEEP)
    assert step().budget.tolist() == [0]
    with pytest.warns(RuntimeWarning, match="flat cost table"):
        verifier.set_cost(CostTable(draft=[(1, 1.0)], verify=[(1, 1.0), (100, 1.0)]))
    plan = step()
    assert plan.budget.tolist() == [3 * K]
    assert plan.draft_depth.tolist() == [K]
    assert plan.proposal[0] >= 3 * K, "a host that goes by the proposals must not trim what the device would verify"


def test_a_proposal_is_kept_for_lag_further_plans(rng):
    """The host reads the proposal of exactly `lag` steps back, whatever the device has done since."""
    verifier = make(Settings(exploration=0.0, lag=2), cost=LINEAR)
    slots, kept, read = ints(0, 1, 2), [], []
    for step in range(6):
        verifier.score(torch.zeros(3, K, VOCAB) if step % 2 else peaked(rng, 3), slots)
        plan = verifier.plan(slots, budget=3 * K)
        verifier.observe(slots, ints(0, 0, 0))
        read.append(plan.proposal.tolist())
        kept.append(plan.proposal)
        assert [each.tolist() for each in kept[-3:]] == read[-3:]
    assert len({tuple(each) for each in read}) > 1


def test_inactive_verifiers_propose_everything(rng):
    with pytest.warns(RuntimeWarning, match="no cost table"):
        verifier = AdaptiveVerifier(SLOTS, K)
    budget = None
    for _ in range(3):
        verifier.score(peaked(rng, 4), ints(0, 1, 2, 3))
        plan = verifier.plan(ints(0, 1, 2, 3), budget=budget)
        budget = int(plan.proposal[0])
        assert plan.admitted.tolist() == [K] * 4
        verifier.observe(ints(0, 1, 2, 3), ints(0, 0, 0, 0))


def test_adafl_2_status_says_active_or_not_and_why(backend, rng):
    """(AdaFlash #2) Never silently off."""
    with pytest.warns(RuntimeWarning):
        off = AdaptiveVerifier(SLOTS, K).status()
    assert not off.active
    assert "no cost table" in off.reason
    on = make()
    assert on.status().active
    assert on.status().reason == "policy earlier"
    assert on.status().backend == backend
    fixed = make(Settings(policy="fixed", fixed_budget=3), cost=None)
    assert fixed.status().active
    assert fixed.status().policy == "fixed"
    on.score(peaked(rng, 2), ints(0, 1))
    on.plan(ints(0, 1))
    on.observe(ints(0, 1), ints(0, 0))
    assert on.status().steps == 1


def test_counters_add_up(backend, rng):
    verifier = make(Settings(refit_interval=2))
    slots, drafted, admitted, accepted = ints(0, 1, 2), 0, 0, 0
    for _ in range(4):
        verifier.score(peaked(rng, 3), slots)
        plan = verifier.plan(slots, drafts=ints(5, 3, 1), budget=6)
        taken = torch.minimum(plan.admitted, ints(2, 0, 1))
        drafted, admitted, accepted = drafted + 9, admitted + 6, accepted + int(taken.sum())
        verifier.observe(slots, taken, teach=torch.tensor([True, True, False]))
    c = verifier.counters()
    totals = [int(c[n].sum()) for n in ("drafted", "admitted", "trimmed", "accepted")]
    assert totals == [drafted, admitted, 12, accepted]
    assert bool((c["labelled_accepted"] <= c["labelled"]).all())
    assert bool((c["labelled"] <= c["admitted"]).all())
    assert (int(c["steps"]), int(c["refits"])) == (4, 2)
    assert 0 < c["expected_accepted"].sum() / 2**20 < c["labelled"].sum()


def test_a_reading_of_the_counters_stays_as_it_was(backend, rng):
    verifier, slots = make(Settings(refit_interval=1)), ints(0, 1)
    before = verifier.counters()
    verifier.score(peaked(rng, 2), slots)
    verifier.plan(slots)
    verifier.observe(slots, ints(1, 2))
    assert not any(value.any() for value in before.values())
    assert verifier.counters()["accepted"].sum() == 3


def test_the_estimator_and_the_planner_work_alone(backend, rng):
    estimator = AcceptanceEstimator(SLOTS, K, settings=Settings(refit_interval=1))
    planner = VerifyPlanner(SLOTS, K, cost=COST)
    slots = ints(4, 2, 9)
    estimator.reset(slots)
    estimator.score(peaked(rng, 3), slots)
    plan = planner.plan(estimator.state.scores, slots)
    assert plan.admitted.tolist() == [K] * 3
    estimator.observe(slots, ints(1, 2, 5), admitted=plan.admitted)
    assert estimator.coefficients().refits == 1


def test_scores_of_a_planner_alone_that_are_no_probabilities(backend):
    planner = VerifyPlanner(4, 3, cost=LINEAR)
    scores = torch.full((4, 4), 0.5)
    scores[0, 1] = torch.nan
    scores[1] = 7.0
    plan = planner.plan(scores, ints(0, 1, 2), budget=5)
    assert plan.admitted.tolist() == [1, 3, 1]
    assert planner.state.survival[:3, :3].tolist() == [[0.5, 0, 0], [1, 1, 1], [0.5, 0.25, 0.125]]


def test_the_fixed_point_sums_cannot_overflow():
    with pytest.raises(ValueError, match=r"max_rows 1024 x replicas 100 .* keep it below 21474836"):
        AcceptanceEstimator(1024, K, settings=Settings(refit_interval=1000, replicas=100))
    AcceptanceEstimator(1024, K, settings=Settings(refit_interval=1000, replicas=20))


def test_status_names_what_is_added_to_the_log_odds():
    verifier = AdaptiveVerifier(
        4, K, settings=Settings(offset_prior=16.0, policy="fixed", fixed_budget=4), hidden_size=8
    )
    assert verifier.status().additions == ()
    verifier.estimator.state.gates[0, 1] = 1
    verifier.estimator.state.gates[1, 0] = 1
    assert verifier.status().additions == ("offset, greedy", "head, sampled")
