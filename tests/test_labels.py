"""Exact labels and the requests' own offsets, through the estimator and the verifier."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from av_triton import AcceptanceEstimator, AdaptiveVerifier, Settings
from av_triton.ops.accumulate import GATES, LARGEST_RESIDUAL, MAX_OFFSET, OFFSET

K, SLOTS, Q30, PRIOR = 4, 8, 1 << 30, 2.0
ON = Settings(offset_prior=PRIOR, refit_interval=3)
OFF = Settings(refit_interval=3)
properties = settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def with_features(f):
    """Logits of two tokens: the log-odds of the likelier are f >= 0 [B, K]."""
    return torch.stack([f, torch.zeros_like(f)], -1)


def put(estimator, slots, f):
    """Features f [B, K] and any scores, as if drafts had been scored: the scoring kernel is slow in the interpreter."""
    estimator.state.features[slots.long(), :K] = f
    estimator.state.scores[slots.long(), :K] = 0.5


def state_of(estimator):
    return {name: t.clone() for name, t in estimator.state._asdict().items() if isinstance(t, torch.Tensor)}


def open_gate(estimator):
    """Let the offsets be served, whatever they gained."""
    estimator.state.gates[OFFSET] = GATES[OFFSET]


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


class Step:
    """Random traffic of one step: rows of all slots in some order."""

    def __init__(self, generator, rows=SLOTS):
        self.slots = torch.randperm(SLOTS, generator=generator)[:rows].int()
        self.f = 2 * torch.randn(rows, K, generator=generator)
        self.f[0, 1] = -40.0
        self.admitted = torch.randint(0, K + 1, (rows,), generator=generator).int()
        self.accepted = torch.minimum(torch.randint(-1, K + 1, (rows,), generator=generator).int(), self.admitted)
        self.teach = torch.rand(rows, generator=generator) > 0.2
        self.acceptance = 1.2 * torch.rand(rows, K, generator=generator)
        self.acceptance[1, 2] = torch.nan

    def run(self, estimator, exact=True, order=slice(None)):
        put(estimator, self.slots[order], self.f[order])
        estimator.observe(
            *(self.slots[order], self.accepted[order], self.admitted[order], self.teach[order]),
            self.acceptance[order] if exact else None,
        )


def steps(seed, count=7):
    generator = torch.Generator().manual_seed(seed)
    return [Step(generator) for _ in range(count)]


def estimator(options=ON):
    made = AcceptanceEstimator(SLOTS, K, settings=options)
    made.reset(torch.arange(SLOTS), torch.arange(SLOTS).int() % 2)
    return made


@pytest.mark.parametrize("exact", [False, True])
def test_both_backends_learn_the_same(use, exact):
    ours = {}
    for backend in ("torch", "triton"):
        use(backend)
        ours[backend] = estimator()
        for step in steps(1):
            step.run(ours[backend], exact)
    a, b = ours["torch"].state, ours["triton"].state
    for name in ("features", "scores", "offsets", "slopes", "intercepts"):
        assert torch.allclose(getattr(a, name), getattr(b, name), atol=1e-5), name
    for name in ("residuals", "sums", "labels"):
        assert (getattr(a, name) - getattr(b, name)).abs().max() / Q30 < 1e-4, name
    assert torch.equal(a.counters[:5], b.counters[:5])
    assert a.offsets.abs().max() > 0.05


@properties
@given(seed=st.integers(0, 10**6), exact=st.booleans())
def test_any_order_of_the_rows_gives_equal_bits(backend, seed, exact):
    first, second = estimator(), estimator()
    generator = torch.Generator().manual_seed(seed)
    for step in steps(seed, 4):
        step.run(first, exact)
        step.run(second, exact, torch.randperm(SLOTS, generator=generator))
    assert same(state_of(first), state_of(second))


def test_counters_stay_counts_of_verdicts(backend):
    counted = []
    for exact in (False, True):
        ours = estimator(Settings(refit_interval=100, offset_prior=PRIOR))
        for step in steps(2, 1):
            step.run(ours, exact)
        counted.append(ours.state.counters)
    assert torch.equal(*counted)


def test_a_row_without_a_verdict_or_not_taught_teaches_nothing_with_acceptance_either(backend):
    ours, slots, four = estimator(), ints(0, 1, 2), ints(4, 4, 4)
    put(ours, slots, torch.ones(3, K))
    before = state_of(ours)
    ours.observe(slots, ints(-1, 2, 2), four, torch.tensor([True, False, False]), torch.full((3, K), 0.5))
    for name, old in before.items():
        if name not in ("scores", "counters", "clock"):
            assert torch.equal(old, getattr(ours.state, name)), name


def test_unscored_and_invalid_drafts_teach_nothing_but_the_chain_goes_on(backend):
    ours, slots = estimator(Settings(refit_interval=100, offset_prior=PRIOR)), ints(0)
    f = torch.tensor([[1.0, torch.nan, 1.0]])
    ours.score(with_features(f), slots)
    ours.observe(slots, ints(3), ints(4), None, torch.tensor([[0.5, 0.25, 0.5, 0.5]]))
    assert (ours.state.sums[0, 5, :K] / Q30).tolist() == [1, 0, 0.125, 0]


def test_fewer_columns_and_any_strides(backend):
    generator = torch.Generator().manual_seed(3)
    alpha = torch.rand(SLOTS, K, generator=generator)
    short = alpha.clone()
    short[:, 2:] = torch.nan
    states = []
    for given_ in (alpha[:, :2], short, short.t().contiguous().t(), short.repeat_interleave(2, 0)[::2]):
        ours = estimator()
        step = steps(4, 1)[0]
        step.acceptance = given_
        step.run(ours)
        states.append(state_of(ours))
    assert all(same(states[0], other) for other in states[1:])
    none = estimator()
    step.acceptance = alpha[:, :0]
    step.run(none)
    assert not none.state.sums.any()


def test_a_verdict_s_labels_are_the_formula_in_float32_quantised_per_draft(backend):
    """What the sums were before there were weights, bit for bit."""
    ours, step = estimator(Settings(refit_interval=100)), steps(5, 1)[0]
    step.run(ours, exact=False)
    f = step.f.numpy()
    w, b = ours.state.slopes.numpy()[:, None], ours.state.intercepts[:, :K].numpy()
    stratum = step.slots.long().numpy() % 2
    z = -(w[stratum] * f + b[stratum])
    exp = torch.exp(torch.from_numpy(z)).numpy() if backend == "torch" else np.exp(z)
    p = np.float32(1) / (np.float32(1) + exp)
    k, a, v = np.arange(K), step.accepted.numpy()[:, None], step.admitted.numpy()[:, None]
    labelled = (a >= 0) & (k <= a) & (k < v) & (f > -40) & step.teach.numpy()[:, None]
    r, h = (k < a).astype(np.float32) - p, p * (np.float32(1) - p)
    entries = np.stack([h * f * f, h * f, h, r * f, r, np.ones_like(p)], 1) * np.float32(Q30)
    entries = np.where(labelled[:, None], entries, 0).astype(np.int64)
    wanted = np.stack([entries[stratum == s].sum(0) for s in (0, 1)])
    assert np.array_equal(ours.state.sums[:, :, :K].numpy(), wanted)


@pytest.mark.parametrize("exact", [False, True])
def test_the_offset_is_the_shrunken_mean_residual_of_the_request_s_labels(backend, exact):
    ours, slots = estimator(Settings(refit_interval=1000, offset_prior=PRIOR)), ints(7, 3)
    f = torch.tensor([[1.0, 0.0, -1.0, 2.0], [0.5, 0.5, 0.5, 0.5]])
    alpha = torch.tensor([[1.0, 0.5, 0.25, 1.0], [0.0, 1.0, 1.0, 1.0]])
    p = 1 / (1 + np.exp(-(np.array([[0.9], [0.9]]) * f.double().numpy() - 0.2)))
    y = alpha.numpy() if exact else np.array([[1, 1, 0, 0], [0, 0, 0, 0.0]])
    omega = np.array([[1, 1, 0.5, 0.125], [1, 0, 0, 0]] if exact else [[1, 1, 1, 0], [1, 0, 0, 0.0]])
    residual, information = (omega * (y - p)).sum(1), (omega * p * (1 - p)).sum(1)
    for n in range(1, 4):
        put(ours, slots, f)
        ours.observe(slots, ints(2, 0), ints(4, 4), None, alpha if exact else None)
        found = ours.state.offsets[slots.long()].numpy()
        assert np.allclose(found, n * residual / (n * information + PRIOR), atol=1e-6)
    logits = with_features(torch.full((2, K), 1.5))
    closed = ours.score(logits, slots).clone()
    assert torch.allclose(closed, torch.sigmoid(torch.full((2, K), 0.9 * 1.5 - 0.2)), atol=1e-6)
    open_gate(ours)
    served = ours.score(logits, slots)
    assert torch.allclose(served, torch.sigmoid(0.9 * 1.5 - 0.2 + torch.from_numpy(found)[:, None]), atol=1e-6)
    assert not ours.state.offsets[[i for i in range(SLOTS) if i not in (3, 7)]].any()


def test_the_requests_sums_add_up_to_the_estimator_s_to_the_bit(backend):
    ours = estimator(Settings(refit_interval=1000, offset_prior=PRIOR))
    for step in steps(9, 3):
        step.run(ours)
    whole = ours.state.sums.sum((0, 2))
    assert ours.state.residuals.sum(0).tolist() == [int(whole[4]), int(whole[2])]


def test_learning_does_not_see_the_offsets_and_without_them_the_scores_are_the_base_s(backend):
    on, off = estimator(ON), estimator(OFF)
    for step in steps(6):
        step.run(on)
        step.run(off)
    for name in ("features", "slopes", "intercepts", "sums", "labels", "clock"):
        assert torch.equal(getattr(on.state, name), getattr(off.state, name)), name
    assert not off.state.offsets.any()
    assert not off.state.residuals.any()
    slots, f = torch.arange(SLOTS), with_features(torch.ones(SLOTS, K))
    open_gate(on)
    assert not torch.equal(on.score(f, slots), off.score(f, slots))
    on.reset(slots, slots.int() % 2)
    assert torch.equal(on.score(f, slots), off.score(f, slots))


def test_sample_serves_the_offset_too(backend):
    ours = estimator()
    for step in steps(7, 1):
        step.run(ours)
    open_gate(ours)
    slots, logits = torch.arange(SLOTS), with_features(torch.ones(SLOTS, K))
    served = ours.score(logits, slots).clone()
    seeds = torch.arange(SLOTS * K).view(SLOTS, K)
    assert torch.allclose(ours.sample(logits, slots).scores, served, atol=1e-6)
    assert torch.allclose(ours.sample(logits, slots, seeds).scores, served, atol=1e-6)
    for k in range(K):
        assert torch.allclose(ours.score(logits[:, k], slots, position=k), served[:, k], atol=1e-6)


def test_an_invalid_row_scores_0_whatever_its_offset(backend):
    ours = estimator()
    ours.state.offsets.fill_(MAX_OFFSET)
    open_gate(ours)
    logits = with_features(torch.ones(2, K))
    logits[0], logits[1] = torch.nan, -torch.inf
    assert not ours.score(logits, ints(0, 1)).any()


def test_reset_clears_a_slot_s_offset_and_no_other_s(backend):
    verifier = AdaptiveVerifier(SLOTS, K, settings=Settings(offset_prior=PRIOR))
    slots = torch.arange(SLOTS)
    verifier.score(with_features(torch.ones(SLOTS, K)), slots)
    verifier.plan(slots)
    verifier.observe(slots, torch.zeros(SLOTS, dtype=torch.int32))
    state = verifier.estimator.state
    before = state.offsets.clone(), state.residuals.clone()
    assert bool((before[0] < 0).all())
    verifier.reset(ints(2, -1, 5))
    kept = [i for i in range(SLOTS) if i not in (2, 5)]
    assert not state.offsets[[2, 5]].any()
    assert not state.residuals[[2, 5]].any()
    assert torch.equal(state.offsets[kept], before[0][kept])
    assert torch.equal(state.residuals[kept], before[1][kept])


def test_a_slot_that_is_not_reset_goes_on_and_padding_changes_nothing(backend):
    ours = estimator()
    for step in steps(8, 2):
        step.run(ours)
    before = ours.state.residuals.clone()
    slots = ints(-1, 4, -1)
    put(ours, ints(4), torch.ones(1, K))
    ours.observe(slots, ints(4, 0, 4), ints(4, 4, 4), None, torch.full((3, K), 0.25))
    others = [i for i in range(SLOTS) if i != 4]
    assert torch.equal(ours.state.residuals[others], before[others])
    assert bool((ours.state.residuals[4] != before[4]).all())


def test_offsets_are_clipped(backend):
    ours, slots = estimator(Settings(refit_interval=1000, offset_prior=0.01)), ints(0, 1)
    for sign in (1.0, -1.0):
        ours.reset(slots)
        for _ in range(20):  # p near 0 or 1 against labels of 1 or 0: a residual of 1, and no information
            put(ours, slots, torch.full((2, K), -sign * 20))
            ours.observe(slots, ints(*[K if sign > 0 else 0] * 2), ints(K, K))
        assert ours.state.offsets[:2].tolist() == [sign * MAX_OFFSET] * 2


@pytest.mark.parametrize("sign", [1, -1])
def test_a_request_s_sums_stay_at_their_bound(backend, sign):
    """A request of more than 2^32 drafts: nothing wraps."""
    ours, slots = estimator(Settings(refit_interval=1000, offset_prior=PRIOR)), ints(0)
    ours.state.residuals[0] = torch.tensor([sign * LARGEST_RESIDUAL, LARGEST_RESIDUAL])
    for _ in range(3):
        put(ours, slots, torch.full((1, K), -20.0 * sign))
        ours.observe(slots, ints(K if sign > 0 else 0), ints(K))
    assert ours.state.residuals[0].tolist() == [sign * LARGEST_RESIDUAL, LARGEST_RESIDUAL]
    assert float(ours.state.offsets[0]) == sign


def test_the_labels_of_earlier_cycles_stay_at_their_bound(backend):
    ours, slots = estimator(Settings(refit_interval=1)), ints(0)
    ours.state.labels.fill_(1 << 62)
    put(ours, slots, torch.ones(1, K))
    ours.observe(slots, ints(K), ints(K))
    assert ours.state.labels[0, :K].tolist() == [1 << 62] * K
    assert ours.state.intercepts.isfinite().all()


@properties
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, SLOTS), max_size=3), exact=st.booleans())
def test_split_over_ranks_by_slot_gives_the_same_sums_and_offsets(backend, seed, cuts, exact):
    """Each rank has some of the requests; sums are added, offsets stay where their requests are."""
    whole = estimator(Settings(offset_prior=PRIOR, refit_interval=100))
    ranks = [estimator(Settings(offset_prior=PRIOR, refit_interval=100)) for _ in range(len(cuts) + 1)]
    for step in steps(seed, 3):
        step.run(whole, exact)
        for ours, (low, high) in zip(ranks, itertools.pairwise([0, *sorted(cuts), SLOTS]), strict=True):
            mine = (step.slots >= low) & (step.slots < high)
            step.run(ours, exact, mine)
    assert torch.equal(sum(ours.state.sums for ours in ranks), whole.state.sums)
    assert torch.equal(sum(ours.state.residuals for ours in ranks), whole.state.residuals)
    assert torch.equal(sum(ours.state.offsets for ours in ranks), whole.state.offsets)
