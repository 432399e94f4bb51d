"""What users of the peers reported, as inputs with the right answer. Each test is named after its report.

Those of single ops are in tests/ops, of costs and metrics in test_cost.py and test_metrics.py.
"""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from av_triton import AdaptiveVerifier, CostTable, Settings
from av_triton.metrics import calibration, difference, percent

Q30 = 1 << 30
STEEP = CostTable(draft=[(1, 1.0), (64, 1.0)], verify=[(1, 1.0), (1000, 1000.0)])
LINEAR = CostTable(draft=[(1, 1.0), (64, 1.0)], verify=[(1, 5.0), (1000, 55.0)])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def make(slots, positions, cost=LINEAR, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return AdaptiveVerifier(slots, positions, cost=cost, settings=Settings(**options))


def with_features(f):
    """Logits of two tokens whose log-odds are f [B, K]."""
    return torch.stack([f, torch.zeros_like(f)], -1)


def draw(p, admitted, rng):
    """Accepted drafts of rows whose acceptance probabilities are p [B, K]."""
    hits = (torch.rand(p.shape, generator=rng) < p).int().cumprod(1).sum(1).int()
    return torch.minimum(hits, admitted)


def test_vllm_52228_greedy_traffic_does_not_move_the_sampled_predictions(rng):
    """Slopes of .65 and .5 in one batch: the coefficients of either stratum are those of it alone."""
    slots, greedy = torch.arange(16).int(), (torch.arange(16) % 2).int()
    slope = torch.where(greedy == 1, 0.65, 0.5)[:, None]
    coefficients = {}
    for mixed in (True, False):
        verifier, g = make(16, 3, refit_interval=4), torch.Generator().manual_seed(5)
        verifier.reset(slots, greedy)
        for _ in range(40):
            f = torch.randn(16, 3, generator=g).abs() * 3
            verifier.score(with_features(f), slots)
            plan = verifier.plan(slots, budget=48)
            accepted = draw(torch.sigmoid(slope * f - 0.2), plan.admitted, g)
            verifier.observe(slots, accepted, teach=None if mixed else greedy == 0)
        coefficients[mixed] = verifier.coefficients()
    assert coefficients[True].slopes[0] == coefficients[False].slopes[0]
    assert coefficients[True].intercepts[0] == coefficients[False].intercepts[0]
    assert coefficients[True].slopes[1] != coefficients[True].slopes[0]


def test_vllm_54102_padding_drafts_and_empty_requests_teach_nothing(backend, rng):
    verifier = make(8, 3, refit_interval=1000)
    slots = ints(0, -1, 2, 3)
    verifier.score(torch.randn(4, 3, 20, generator=rng), slots)
    verifier.plan(slots, drafts=ints(3, 3, 0, 2))
    verifier.observe(slots, ints(1, 3, 0, -1))
    sums = verifier.estimator.state.sums
    assert (sums[0, 5, :3] / Q30).tolist() == [1, 1, 0], "one row has labels: one hit, one rejection"
    before = sums.clone()
    verifier.score(torch.randn(4, 3, 20, generator=rng), slots)
    verifier.plan(slots, drafts=ints(0, 3, 0, 0))
    verifier.observe(slots, ints(0, 3, 0, 2))
    assert torch.equal(sums, before)


@pytest.mark.parametrize("temperature", [None, 0.3, 2.0])
def test_vllm_53029_bad_rows_get_finite_scores_rank_last_and_disturb_nobody(backend, rng, temperature):
    x = torch.randn(5, 2, 30, generator=rng) * 3
    good = x.clone()
    x[1], x[2], x[3, :, 7] = torch.nan, -torch.inf, torch.inf
    scores = []
    for logits in (x, good):
        verifier = make(8, 2)
        slots = ints(0, 1, 2, 3, 4)
        p = verifier.score(logits, slots, temperature=temperature).clone()
        scores.append(p)
        assert bool(((p >= 0) & (p <= 1)).all())
        plan = verifier.plan(slots, budget=6)
        if logits is x:
            assert plan.admitted.tolist() == [2, 0, 0, 2, 2]
            assert p[1:3].tolist() == [[0, 0], [0, 0]]
            assert bool((p[3] > 0.99).all()), "a +inf row is certain"
        verifier.observe(slots, ints(0, 0, 0, 0, 0))
    assert torch.equal(scores[0][[0, 4]], scores[1][[0, 4]])


def test_vllm_53029_an_invalid_row_teaches_nothing(backend):
    verifier = make(4, 2, refit_interval=1000)
    x = torch.zeros(2, 2, 9)
    x[1] = torch.nan
    verifier.score(x, ints(0, 1))
    verifier.plan(ints(0, 1))
    verifier.observe(ints(0, 1), ints(2, 2))
    assert (verifier.estimator.state.sums[0, 5, :2] / Q30).tolist() == [1, 1]


def test_sglang_34384_34636_minimax_56451_zero_length_rows_break_nothing(backend, rng):
    verifier = make(8, 4)
    slots = ints(0, 1, 2, 3, 4)
    verifier.score(torch.randn(5, 4, 20, generator=rng), slots)
    plan = verifier.plan(slots, drafts=ints(4, 0, 4, 0, 0))
    assert plan.admitted.tolist() == [4, 0, 4, 0, 0]
    assert plan.cu_verify.tolist() == [0, 5, 6, 11, 12, 13]
    verifier.observe(slots, ints(4, 0, 2, 0, 0))
    assert verifier.counters()["labelled"].tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize("lengths", [[4] * 72 + [3] * 24, [3] * 104 + [2] * 24])
def test_sglang_33356_32467_batches_that_are_nearly_uniform(backend, lengths):
    """Not uniform, and no index of the verified rows reaches sum(lens)."""
    rows, positions = len(lengths), max(lengths)
    verifier = make(rows, positions)
    slots = torch.arange(rows)
    plan = verifier.plan(slots, drafts=ints(*lengths))
    assert plan.admitted.tolist() == lengths
    starts, ends = plan.cu_verify[:-1].tolist(), plan.cu_verify[1:].tolist()
    assert [b - a for a, b in zip(starts, ends, strict=True)] == [n + 1 for n in lengths]
    total = sum(lengths) + rows
    assert ends[-1] == total
    index = [a + i for a, n in zip(starts, lengths, strict=True) for i in range(n + 1)]
    assert index == list(range(total))


def test_vllm_52436_52477_budget_0_leaves_every_request_its_bonus_row(backend, rng):
    verifier = make(4, 2)
    slots = ints(0, 1, 2)
    verifier.score(torch.randn(3, 2, 20, generator=rng), slots)
    plan = verifier.plan(slots, drafts=ints(2, 2, 0), budget=0)
    assert plan.admitted.tolist() == [0, 0, 0]
    assert plan.cu_verify.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("cost", [None, LINEAR])
def test_vllm_47808_a_cap_of_3_logits_with_two_requests_leaves_one_draft(backend, rng, cost):
    verifier = make(4, 5, cost=cost, max_verify_tokens=3)
    for _ in range(2):
        verifier.score(torch.randn(2, 5, 20, generator=rng), ints(0, 1))
        plan = verifier.plan(ints(0, 1))
        assert int(plan.budget[0]) <= 1
        assert int(plan.cu_verify[-1]) <= 3
        verifier.observe(ints(0, 1), ints(0, 0))


def test_vllm_47808_a_compacted_batch_keeps_its_totals(backend):
    """[1, 1, 40]: two decode rows without drafts and a prefill of 40 tokens."""
    verifier = make(4, 5)
    plan = verifier.plan(ints(0, 1), drafts=ints(0, 0), non_draft_tokens=42)
    assert plan.cu_verify.tolist() == [0, 1, 2]
    assert plan.budget.tolist() == [0]


def test_vllm_slot_order_everything_follows_the_slot(backend, rng):
    """Slots 7, 0, 3 with unequal data, then the same slots in another order with a padded row between."""
    verifier = make(8, 2, refit_interval=1000)
    f = torch.tensor([[3.0, 2.0], [1.0, 0.5], [0.2, 4.0]])
    verifier.score(with_features(f), ints(7, 0, 3))
    stored = verifier.estimator.state.features
    assert torch.allclose(stored[[7, 0, 3], :2], f, atol=1e-5)
    assert bool((stored[[1, 2, 4, 5, 6]] == -40).all())
    plan = verifier.plan(ints(7, 0, 3), budget=4)
    assert plan.admitted.tolist() == [2, 1, 1]
    verifier.observe(ints(3, -1, 7, 0), ints(0, 2, 2, 1))
    n = verifier.estimator.state.sums[0, 5]
    assert (n[:2] / Q30).tolist() == [3, 1]
    g = verifier.estimator.state.sums[0, 4, :2] / Q30
    p = torch.sigmoid(0.5 * f - 0.2)
    assert torch.allclose(g.float(), torch.stack([2 - p[:, 0].sum(), 1 - p[0, 1]]), atol=1e-4)


def test_sglang_27706_29144_28616_trtllm_18392_an_idle_rank_still_returns_a_plan(backend):
    verifier = make(4, 3)
    none = torch.zeros(0, dtype=torch.int32)
    assert verifier.score(torch.zeros(0, 3, 20), none).shape == (0, 3)
    assert verifier.score(torch.zeros(0, 20), none, position=1).shape == (0,)
    for budget in (None, 0, 16):
        plan = verifier.plan(none, budget=budget)
        assert plan.admitted.tolist() == []
        assert plan.cu_verify.tolist() == [0]
        assert plan.budget.tolist() == [0]
        verifier.observe(none, none)
    padded = verifier.plan(ints(-1, -1), budget=4)
    assert padded.cu_verify.tolist() == [0, 0, 0]
    assert padded.budget.tolist() == [0]
    verifier.reset(none)
    assert verifier.counters()["steps"] == 4


def test_sglang_35413_38897_a_flat_cost_table_verifies_all_with_one_warning():
    flat = CostTable(draft=[(1, 1.0)], verify=[(1, 5.0), (500, 5.0)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verifier = AdaptiveVerifier(8, 4, cost=flat)
        for _ in range(5):
            verifier.score(torch.zeros(3, 4, 20), ints(0, 1, 2))
            assert verifier.plan(ints(0, 1, 2)).admitted.tolist() == [4, 4, 4]
            verifier.observe(ints(0, 1, 2), ints(0, 0, 0))
    assert ["flat cost table" in str(w.message) for w in caught] == [True]
    assert not verifier.status().active
    assert "flat cost table" in verifier.status().reason


def test_sglang_35413_38897_a_forced_budget_of_50_percent_halves_the_admitted_tokens(backend, rng):
    verifier = make(8, 4)
    slots = torch.arange(8)
    verifier.score(torch.randn(8, 4, 20, generator=rng), slots)
    assert int(verifier.plan(slots, budget=16).admitted.sum()) == 16 == 8 * 4 // 2


def test_local_inference_lab_748_the_budget_fills_the_padded_graph(backend, rng):
    """Costs are constant between capture sizes, so what is in force is the whole of the graph that runs."""
    cost = CostTable(draft=[(1, 0.5)], verify=[(8, 5.0), (16, 9.0), (24, 20.0)], captured=[8, 16, 24])
    verifier = make(4, 5, cost=cost, exploration=0.0, minimum_gain=0.01)
    for _ in range(3):
        verifier.score(torch.randn(4, 5, 20, generator=rng), ints(0, 1, 2, 3))
        plan = verifier.plan(ints(0, 1, 2, 3))
        verifier.observe(ints(0, 1, 2, 3), ints(0, 0, 0, 0))
    assert int(plan.cu_verify[-1]) in (8, 16, 24)


def test_vllm_48627_two_contexts_two_tables_two_budgets(backend):
    f = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(4, 1)
    budgets = []
    for slope in (0.02, 2.0):
        table = CostTable(draft=[(1, 1.0)], verify=[(1, 10.0), (1001, 10.0 + 1000 * slope)])
        verifier = make(4, 4, cost=table, exploration=0.0, minimum_gain=0.01)
        for _ in range(2):
            verifier.score(with_features(f), ints(0, 1, 2, 3))
            plan = verifier.plan(ints(0, 1, 2, 3))
            verifier.observe(ints(0, 1, 2, 3), ints(-1, -1, -1, -1))
        budgets.append(int(plan.budget[0]))
    assert budgets[0] > budgets[1]


def test_vllm_52362_sglang_36136_one_request_on_a_flat_then_rising_table_is_left_alone(backend, rng):
    """Verify all, no trimming, and the status says so."""
    cost = CostTable(draft=[(1, 1.0)], verify=[(1, 5.0), (64, 5.0), (512, 40.0)])
    verifier = make(8, 7, cost=cost, exploration=0.0)
    for _ in range(3):
        verifier.score(torch.randn(1, 7, 20, generator=rng), ints(3))
        plan = verifier.plan(ints(3))
        assert plan.admitted.tolist() == [7]
        verifier.observe(ints(3), ints(0))
    assert not verifier.status().active
    assert "1%" in verifier.status().reason


def test_vllm_44336_a_starved_position_recovers(rng):
    """b = -6 at a position whose true acceptance is .9, under a binding budget: exploration feeds it again.

    With exploration off it stays where it was, which is the report.
    """
    refits_needed = {}
    for exploration in (0.01, 0.0):
        verifier = make(64, 3, cost=STEEP, refit_interval=32, exploration=exploration, policy="fixed", fixed_budget=64)
        verifier.estimator.state.intercepts[:, 1] = -6.0
        slots, g = torch.arange(64), torch.Generator().manual_seed(1)
        for _ in range(20 * 32):
            f = torch.randn(64, 3, generator=g)
            verifier.score(with_features(f), slots)
            plan = verifier.plan(slots)
            assert int(plan.admitted.sum()) == 64
            verifier.observe(slots, draw(torch.full((64, 3), 0.9), plan.admitted, g))
            now = verifier.coefficients()
            if now.intercepts[0][1] > 0 and exploration not in refits_needed:
                refits_needed[exploration] = now.refits
                break
    assert refits_needed.get(0.01, 99) <= 10
    assert 0.0 not in refits_needed


def test_mlx_node_115_a_position_without_labels_stays(backend, rng):
    verifier = make(4, 3, refit_interval=1)
    before = verifier.coefficients().intercepts[0]
    verifier.score(torch.randn(2, 3, 20, generator=rng), ints(0, 1))
    verifier.plan(ints(0, 1))
    verifier.observe(ints(0, 1), ints(0, 1))
    after = verifier.coefficients().intercepts[0]
    assert after[0] != before[0]
    assert after[1] != before[1]
    assert after[2] == before[2]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), row=st.integers(0, 4), rise=st.floats(0, 6), budget=st.integers(0, 16))
def test_sglang_36136_raising_a_row_never_lowers_its_allocation(seed, row, rise, budget):
    f = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).abs() * 2
    lengths = []
    for lift in (0.0, rise):
        verifier = make(5, 3, exploration=0.0)
        f[row] += lift
        verifier.score(with_features(f), torch.arange(5))
        lengths.append(int(verifier.plan(torch.arange(5), budget=budget).admitted[row]))
    assert lengths[1] >= lengths[0]


def test_blog_figures_a_workload_switch_is_calibrated_again(rng):
    """First intercept from +.61 to -.09: the calibration error falls below .03 within ten refits."""
    verifier = make(64, 3, refit_interval=8, policy="fixed", fixed_budget=192)
    slots = torch.arange(64)

    def serve(first, steps):
        before = {n: v.copy() for n, v in verifier.counters().items()}
        for _ in range(steps):
            f = torch.randn(64, 3, generator=rng).abs() * 2
            verifier.score(with_features(f), slots)
            plan = verifier.plan(slots)
            p = torch.sigmoid(0.5 * f + torch.tensor([first, 0.1, 0.1]))
            verifier.observe(slots, draw(p, plan.admitted, rng))
        return calibration(difference(verifier.counters(), before))

    serve(0.61, 160)
    assert serve(0.61, 80).overall < 0.03
    jump = serve(-0.09, 8)
    assert jump.error[0] > 0.08, "the switch shows"
    serve(-0.09, 72)
    assert serve(-0.09, 80).overall < 0.03


def test_vllm_preempted_between_draft_and_verify_its_late_label_is_ignored(backend, rng):
    verifier = make(4, 3, refit_interval=1000)
    verifier.score(torch.randn(2, 3, 20, generator=rng), ints(0, 1))
    verifier.plan(ints(0, 1))
    verifier.reset(ints(1))  # preempted; its slot goes to another request
    verifier.observe(ints(0, 1), ints(1, 3))
    assert (verifier.estimator.state.sums[0, 5, :3] / Q30).tolist() == [1, 1, 0]
    assert verifier.counters()["accepted"].tolist() == [1, 0, 0]
    verifier.score(torch.randn(1, 3, 20, generator=rng), ints(1))
    verifier.observe(ints(1), ints(3))  # still the old verdict: the new request has not been planned
    assert (verifier.estimator.state.sums[0, 5, :3] / Q30).tolist() == [1, 1, 0]


def test_vllm_blog_prefill_rows_are_not_sampling_requests(backend):
    """[3, 3, 40]: two requests with drafts and a prefill of 40 tokens; the estimate counts two, the cost all."""
    cost = CostTable(draft=[(1, 1.0)], verify=[(42, 10.0), (1042, 1010.0)])
    verifier = make(4, 3, cost=cost, exploration=0.0, minimum_gain=0.01)
    f = torch.full((2, 3), 1.0)
    for _ in range(2):
        verifier.score(with_features(f), ints(0, 1))
        plan = verifier.plan(ints(0, 1), non_draft_tokens=42)
        verifier.observe(ints(0, 1), ints(-1, -1))
    assert int(plan.cu_verify[-1]) == 2 + int(plan.admitted.sum())
    s = np.sort(np.cumprod([1 / (1 + np.exp(-0.3))] * 3).repeat(2))[::-1]
    best = {r: int(np.argmax([(r + s[:n].sum()) / (11.0 + n) for n in range(7)])) for r in (2, 3, 42)}
    assert plan.budget.tolist() == [best[2]] == [4]
    assert best[42] == 0


def test_sglang_34285_32209_a_step_without_features_verifies_all(backend, rng):
    verifier = make(4, 3, cost=STEEP)
    for scored in (True, True, False):
        if scored:
            verifier.score(torch.zeros(2, 3, 20), ints(0, 1))
        plan = verifier.plan(ints(0, 1), drafts=ints(3, 2))
        verifier.observe(ints(0, 1), ints(0, 0))
    assert plan.admitted.tolist() == [3, 2]


@pytest.mark.parametrize("temperature", [None, 0.3, 0.7, 2.0])
def test_vllm_ascend_9795_llama_cpp_26275_sglang_35496_a_reduced_vocabulary_scores_the_same(backend, rng, temperature):
    x = torch.randn(2, 3, 40, generator=rng)
    tail = torch.cat([x, torch.full((2, 3, 60), -torch.inf)], -1)
    verifier = make(4, 3)
    p = verifier.score(x, ints(0, 1), temperature=temperature).clone()
    assert torch.allclose(verifier.score(tail, ints(0, 1), temperature=temperature), p, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vllm_52816_sglang_35534_half_precision_logits_score_as_their_values(backend, rng, dtype):
    x = (torch.randn(2, 3, 500, generator=rng) * 3).to(dtype)
    verifier = make(4, 3)
    p = verifier.score(x, ints(0, 1)).clone()
    top = torch.softmax(x.double(), -1).max(-1).values
    wanted = torch.sigmoid(0.5 * torch.log(top / (1 - top)) - 0.2)
    assert torch.allclose(p.double(), wanted, atol=2e-6)


def test_vllm_metal_766_zero_drafts_are_inconclusive(backend):
    verifier = make(4, 3)
    verifier.plan(ints(0, 1), drafts=ints(0, 0))
    verifier.observe(ints(0, 1), ints(0, 0))
    counters = verifier.counters()
    assert np.isnan(calibration(counters).overall)
    assert percent(counters["accepted"].sum(), counters["admitted"].sum()) == "inconclusive"


def test_llama_cpp_22673_drafts_rank_by_the_cumulative_product(backend):
    """Row 0 has single scores .9 .6 .9, row 1 .7 .7 .7: third and fourth go by .54 against .49."""
    p = torch.tensor([[0.9, 0.6, 0.9], [0.7, 0.7, 0.7]])
    verifier = make(2, 3, initial_slopes=(1.0, 1.0), initial_intercept=0.0)
    verifier.score(with_features(torch.logit(p)), ints(0, 1))
    lengths = [verifier.plan(ints(0, 1), budget=budget).admitted.tolist() for budget in range(7)]
    assert lengths == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]
