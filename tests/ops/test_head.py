"""The head against its formulas in float64, and what must not reach its state."""

import numpy as np
import pytest
import torch

from av_triton import AcceptanceEstimator, Settings
from av_triton.ops import head as ops
from av_triton.ops.accumulate import HEAD, OFFSET
from av_triton.ops.select import Q30
from tests.state import copies, differences, tensors

K, SLOTS, V = 3, 6, 5
STRATA = torch.tensor([0, 1, 0, 1, 0, 0], dtype=torch.int32)
LEARNED = ("head.weights", "head.curvature", "head.mean", "head.variance", "head.sums", "head.counts")


def make(d, positions=K, **options):
    made = AcceptanceEstimator(
        SLOTS, positions, settings=Settings(**{"refit_interval": 1000, **options}), hidden_size=d
    )
    made.reset(torch.arange(SLOTS), STRATA)
    return made


def trained(estimator, rng):
    """As after some training: random coefficients, offsets and gates, the head's open."""
    s = estimator.state
    d = estimator.hidden_size
    s.head.weights.copy_(torch.randn(2, d + 1, generator=rng))
    s.head.mean.copy_(torch.randn(2, d + 1, generator=rng))
    s.head.variance.copy_(torch.rand(2, d + 1, generator=rng) + 0.1)
    s.offsets.copy_(torch.randn(SLOTS, generator=rng))
    s.slopes.copy_(torch.tensor([0.7, 0.9]))
    s.intercepts.copy_(torch.randn(s.intercepts.shape, generator=rng) / 4)
    s.gates[OFFSET], s.gates[HEAD] = torch.tensor([1, -1]), 1
    return estimator


class Batch:
    def __init__(self, rng, rows, d, dtype=torch.float32, positions=K):
        self.logits = 2 * torch.randn(rows, positions, V, generator=rng)
        self.tokens = torch.randint(0, V, (rows, positions), generator=rng)
        self.hidden = (3 * torch.randn(rows, positions, d, generator=rng)).to(dtype)
        self.slots = torch.randperm(SLOTS, generator=rng)[:rows]
        self.acceptance = torch.rand(rows, positions, generator=rng)

    def score(self, estimator, **changed):
        given = {"tokens": self.tokens, "hidden": self.hidden, **changed}
        return estimator.score(self.logits, self.slots, **given)

    def observe(self, estimator, **changed):
        rows, positions = self.acceptance.shape
        everything = torch.full((rows,), positions)
        estimator.observe(self.slots, everything, everything, **{"acceptance": self.acceptance, **changed})


def expected(estimator, batch, hidden):
    """(corrections, scores) float64 [rows, K] by the formulas, from probabilities. hidden: [rows, K, d] or None."""
    s = estimator.state
    slots, d = batch.slots.long(), estimator.hidden_size
    stratum = s.strata[slots].long()
    q = torch.log_softmax(batch.logits.double(), -1)
    log_q = q.gather(-1, batch.tokens[..., None])[..., 0]
    history = torch.cat([torch.zeros(len(q), 1), (log_q[:, :-1] + 1) / 2], 1)
    c = history * s.head.weights.double()[stratum, -1:]
    if hidden is not None:
        mean, deviation = s.head.mean.double()[stratum, :d], s.head.variance.double()[stratum, :d].sqrt()
        z = ((hidden.double() - mean[:, None]) / deviation[:, None]).clamp(-4, 4)
        c = c + (z * s.head.weights.double()[stratum, None, :d]).sum(-1) / z.norm(dim=-1)
    c = c.clamp(-ops.LARGEST_CORRECTION, ops.LARGEST_CORRECTION)
    largest = q.max(-1).values
    f = largest - torch.log1p(-largest.exp())
    offset = torch.where(s.gates[OFFSET, stratum] > 0, s.offsets[slots].double(), 0.0)[:, None]
    served = torch.where((s.gates[HEAD, stratum] > 0)[:, None], c, 0.0)
    b = s.intercepts[stratum, : c.shape[1]].double()
    return c, torch.sigmoid(s.slopes[stratum, None].double() * f + b + offset + served)


def close(a, b, atol=1e-3):
    return torch.allclose(a.double(), b.double(), atol=atol, rtol=1e-3)


SIZES = [(d, torch.float32) for d in (1, 2, 63, 576, 1025, 8192)] + [(63, torch.bfloat16), (576, torch.float16)]


@pytest.mark.parametrize("d, dtype", SIZES)
def test_correction_and_score_are_the_formula(backend, rng, d, dtype):
    ours, batch = trained(make(d), rng), Batch(rng, 3, d, dtype)
    wanted, scores = expected(ours, batch, batch.hidden)
    found = batch.score(ours)
    assert close(ours.state.head.corrections[batch.slots, :K], wanted)
    assert close(found, scores)
    assert torch.equal(ours.state.scores[batch.slots, :K], found)
    assert wanted.abs().max() > 0.05


def test_hidden_states_of_any_strides_and_shared_by_the_positions(backend, rng):
    batch = Batch(rng, 4, 10)
    ours = trained(make(10), rng)
    first = batch.score(ours).clone()
    spread = torch.full((9, 2 * K, 16), torch.nan)
    spread[1::2, ::2, :10] = batch.hidden
    assert torch.equal(batch.score(ours, hidden=spread[1::2, ::2, :10]), first)
    by_position = batch.hidden.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(batch.score(ours, hidden=by_position), first)
    shared = batch.hidden[:, 0]
    each = batch.score(ours, hidden=shared[:, None].expand(-1, K, -1).contiguous()).clone()
    assert torch.equal(batch.score(ours, hidden=shared), each)
    assert close(each, expected(ours, batch, shared[:, None].expand(-1, K, -1))[1])


def test_positions_one_at_a_time_are_those_of_the_block(backend, rng):
    ours, batch = trained(make(10), rng), Batch(rng, 4, 10)
    block = batch.score(ours).clone()
    ours.state.scores.fill_(-1.0)
    for k in range(K):
        one = ours.score(
            batch.logits[:, k], batch.slots, position=k, tokens=batch.tokens[:, k], hidden=batch.hidden[:, k]
        )
        assert torch.allclose(one, block[:, k], atol=1e-6)


def test_sample_gives_its_own_drafts_histories(backend, rng):
    ours, batch = trained(make(10), rng), Batch(rng, 4, 10)
    drawn = ours.sample(batch.logits, batch.slots, torch.arange(4 * K).view(4, K), hidden=batch.hidden)
    batch.tokens = drawn.tokens.clone()
    assert close(drawn.scores, expected(ours, batch, batch.hidden)[1])


def test_rows_with_a_hidden_state_and_without(backend, rng):
    ours, batch = trained(make(10), rng), Batch(rng, 3, 10)
    without = expected(ours, batch, None)
    assert close(batch.score(ours, hidden=None), without[1])
    assert not ours.state.head.norms[batch.slots].any()
    batch.observe(ours)
    counts = ours.state.head.counts[..., : ops.BEHIND].sum(0)
    assert bool((counts[:, ops.PENDING] > Q30).all())
    assert not counts[:, ops.KNOWN].any()
    assert not ours.state.head.sums[:, ops.FIRST :].any()
    assert not ours.state.head.sums[:, ops.GRADIENT, :-1].any()
    assert bool((ours.state.head.sums[:, ops.GRADIENT, -1] != 0).any())


def test_the_history_is_that_of_the_position_before_in_the_same_step(backend, rng):
    ours, batch = trained(make(4), rng), Batch(rng, 3, 4)
    histories = ours.state.head.histories
    batch.score(ours)
    assert bool((histories[batch.slots, 1:K] != 0).all())
    batch.observe(ours)
    ours.score(batch.logits[:, 1], batch.slots, position=1)  # position 0 was not scored in this step
    assert not histories[batch.slots, 1].any()
    ours.score(batch.logits[:, 0], batch.slots, position=0)  # nor is its token known
    ours.score(batch.logits[:, 1], batch.slots, position=1)
    assert not histories[batch.slots, 1].any()
    ours.score(batch.logits[:, 0], batch.slots, position=0, tokens=batch.tokens[:, 0])
    ours.score(batch.logits[:, 1], batch.slots, position=1)
    log_q = torch.log_softmax(batch.logits[:, 0], -1).gather(-1, batch.tokens[:, :1])[:, 0]
    assert close(histories[batch.slots, 1], (log_q + 1) / 2)
    batch.logits[0, 0] = torch.nan  # an invalid row has no law
    batch.score(ours)
    assert histories[batch.slots[0], 1] == 0


def test_no_score_depends_on_its_own_draft_or_a_later_one(backend, rng):
    ours, batch = trained(make(4), rng), Batch(rng, 3, 4)
    first = batch.score(ours).clone()
    for k in range(K):
        other = batch.tokens.clone()
        other[:, k] = (other[:, k] + 1) % V
        changed = batch.score(ours, tokens=other) != first
        assert not changed[:, : k + 1].any()
        assert k == K - 1 or bool(changed[:, k + 1].all())


def learned(head, drafts, s):
    """Head of stratum s after `learn`, in float64: drafts are (slot, k) of the stratum's labels."""
    d = head.inputs.shape[-1]
    at = tuple(torch.tensor(drafts).T) if drafts else (torch.zeros(0, dtype=torch.int64),) * 2
    omega, residual, norm = (t[at].double().numpy() for t in (head.omegas, head.residuals, head.norms))
    known = norm > 0
    z = np.where(known[:, None], head.inputs[at].double().numpy(), 0.0)
    x = np.concatenate([z * norm[:, None], head.histories[at].double().numpy()[:, None]], 1)
    now = {n: getattr(head, n)[s].double().numpy() for n in ("weights", "curvature", "mean", "variance")}
    gradient, first, second = head.sums[s].double().numpy() / Q30
    pending, with_hidden, behind, _ = head.counts[s, 0].double().numpy() / Q30
    gradient = gradient + (residual[:, None] * x).sum(0)
    first, second = first[:d] + (omega[:, None] * z).sum(0), second[:d] + (omega[:, None] * z * z).sum(0)
    pending, with_hidden = pending + omega.sum(), with_hidden + omega[known].sum()
    if pending >= 32:
        g = gradient / pending
        now["curvature"] = now["curvature"] * (1 - 1 / 256) + g * g
        now["weights"] = now["weights"] + 0.1 * g / np.sqrt(now["curvature"])
        if with_hidden:
            behind = min(behind + with_hidden, 4096)
            m, q, r = first / with_hidden, second / with_hidden, with_hidden / behind
            now["mean"][:d] += r * m * np.sqrt(now["variance"][:d])
            now["variance"][:d] *= 1 + r * (q - 1)
        gradient, first, second, pending, with_hidden = 0 * gradient, 0 * first, 0 * second, 0.0, 0.0
    pad = np.zeros(1)
    now["sums"] = np.stack([gradient, np.concatenate([first, pad]), np.concatenate([second, pad])])
    now["counts"] = np.array([pending, with_hidden, behind])
    return now


@pytest.mark.parametrize("d", [1, 2, 63, 64, 200])
def test_learning_is_the_formula(backend, rng, d):
    """Minibatches fill up at different times in the two strata; some drafts have no label, some no hidden state."""
    positions, steps = 8, 10
    ours = make(d, positions)
    head = ours.state.head
    head.curvature.copy_(torch.rand(2, d + 1, generator=rng) + 0.1)
    stepped = set()
    for _ in range(steps):
        head.inputs.copy_(torch.randn(head.inputs.shape, generator=rng).clamp(-4, 4))
        head.norms.copy_(
            torch.rand(SLOTS, positions, generator=rng) * (torch.rand(SLOTS, positions, generator=rng) > 0.2)
        )
        head.histories.copy_(torch.randn(SLOTS, positions, generator=rng) / 2)
        head.omegas.copy_(
            torch.rand(SLOTS, positions, generator=rng) * (torch.rand(SLOTS, positions, generator=rng) > 0.3)
        )
        head.residuals.copy_(head.omegas * (2 * torch.rand(SLOTS, positions, generator=rng) - 1))
        slots = torch.tensor([4, -1, 3, 0, 1, 2])  # slot 5 is not of this batch
        wanted = []
        for s in range(2):
            drafts = [(i, k) for i in range(5) for k in range(positions) if STRATA[i] == s and head.omegas[i, k] > 0]
            wanted.append(learned(head, drafts, s))
        ops.learn(head, slots, ours.state.strata)
        for s in range(2):
            for name in ("weights", "curvature", "mean", "variance"):
                assert np.allclose(getattr(head, name)[s], wanted[s][name], rtol=1e-4, atol=1e-5), (s, name)
            assert np.allclose(head.sums[s].double() / Q30, wanted[s]["sums"], atol=1e-5)
            counts = head.counts[s].double() / Q30
            assert np.allclose(counts[:, :3], wanted[s]["counts"], atol=1e-6)
            assert not head.counts[s, :, ops.TICKET].any()
            if not wanted[s]["counts"][0]:
                stepped.add(s)
    assert stepped == {0, 1}


def test_labels_of_little_weight_count_in_any_company(backend, rng):
    """Weights below one unit of the fixed point: their entries, up to 16 times as large, depend on no other draft."""
    ours, theirs = (make(4, positions=16) for _ in range(2))
    slots = torch.arange(SLOTS)
    for each, order in ((ours, slots), (theirs, slots.flip(0))):
        head = each.state.head
        each.state.strata.zero_()
        head.inputs.fill_(4.0)
        head.norms.fill_(0.125)
        head.omegas.fill_(3e-10)  # 2^-30 is 9e-10
        head.omegas[0] = 0.5
        ops.learn(head, order, each.state.strata)
    found = ours.state.head.sums[0, ops.SECOND, 0]
    assert int(found) == 16 * (int(16 * 0.5 * Q30) + (SLOTS - 1) * int(16 * 3e-10 * Q30))
    assert not differences(copies(ours.state.head), copies(theirs.state.head))


def test_the_residual_is_that_of_what_is_served_with_the_correction(backend, rng):
    """Whatever the head's gate; with the offset where its gate is open: stratum 0 here."""
    ours, batch = trained(make(10, offset_prior=4.0), rng), Batch(rng, 4, 10)
    ours.state.gates[HEAD] = torch.tensor([-1, 1])
    p = expected(ours, batch, batch.hidden)[1]
    c = expected(ours, batch, batch.hidden)[0]
    closed = (STRATA[batch.slots] == 0)[:, None]
    p = torch.where(closed, torch.sigmoid(torch.logit(p) + c), p)
    batch.score(ours)
    batch.observe(ours)
    y = batch.acceptance.double()
    omega = torch.cat([torch.ones(4, 1), y[:, :-1]], 1).cumprod(1)
    assert close(ours.state.head.omegas[batch.slots, :K], omega, 1e-6)
    assert close(ours.state.head.residuals[batch.slots, :K], omega * (y - p))


def test_both_backends_learn_the_same(use, rng):
    batches = [Batch(rng, 5, 24) for _ in range(16)]
    ours = {}
    for name in ("torch", "triton"):
        use(name)
        ours[name] = make(24, refit_interval=4, offset_prior=4.0)
        for batch in batches:
            batch.score(ours[name])
            batch.observe(ours[name])
    one, other = (tensors(each.state) for each in ours.values())
    assert one["clock"][3] == 4
    for name in ("weights", "curvature", "mean", "variance", "corrections"):
        assert close(one[f"head.{name}"], other[f"head.{name}"], 2e-3), name
    assert (one["gates"] - other["gates"]).abs().max() < 0.01 * Q30
    assert one["head.weights"].abs().min(1).values.max() > 0


def clean_of(batch, value, estimator):
    """Hidden states without the wrong entry: the mean in place of a NaN, far out in place of an infinity."""
    hidden = batch.hidden.clone()
    stratum = STRATA[batch.slots[1]]
    hidden[1, 2, 3] = estimator.state.head.mean[stratum, 3] if value != value else 1e6 if value > 0 else -1e6
    return hidden


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_a_wrong_entry_counts_as_average_or_as_four_deviations_and_spreads_nowhere(backend, rng, value):
    ours, theirs = (trained(make(6), torch.Generator().manual_seed(1)) for _ in range(2))
    batch = Batch(rng, 4, 6)
    wrong = batch.hidden.clone()
    wrong[1, 2, 3] = value
    assert torch.equal(batch.score(ours, hidden=wrong), batch.score(theirs, hidden=clean_of(batch, value, theirs)))
    for each in (ours, theirs):
        batch.observe(each)
    assert not differences(copies(ours.state), copies(theirs.state))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_state_stays_finite_over_many_steps_of_wrong_rows(backend, rng, value):
    ours = make(3, positions=1, offset_prior=0.01, refit_interval=16)
    batch = Batch(rng, 2, 3, positions=1)
    for step in range(200 if backend == "torch" else 15):
        batch.hidden.fill_(value if step % 3 else -value)
        batch.score(ours)
        batch.observe(ours, acceptance=torch.full((2, 1), float(step % 2)))
    for name, tensor in tensors(ours.state).items():
        if name != "gaps":
            assert bool(tensor.isfinite().all()), name
    assert bool((ours.state.head.variance >= ops.LEAST_VARIANCE).all())
    batch.hidden.normal_(generator=rng)
    assert bool(batch.score(ours).isfinite().all())


def test_constant_hidden_states_and_weights_at_their_bound(backend, rng):
    ours, batch = trained(make(3), rng), Batch(rng, 3, 3)
    batch.hidden.fill_(7.0)
    for _ in range(6):
        ours.state.head.weights.fill_(ops.LARGEST_WEIGHT)
        batch.score(ours)
        assert ours.state.head.corrections.abs().max() <= ops.LARGEST_CORRECTION
        batch.observe(ours, acceptance=torch.ones(3, K))
    assert ours.state.head.weights.max() <= ops.LARGEST_WEIGHT
    assert all(bool(t.isfinite().all()) for t in ours.state.head if t.is_floating_point())


def test_padding_rows_change_nothing(backend, rng):
    ours, theirs = (trained(make(6), torch.Generator().manual_seed(1)) for _ in range(2))
    batch = Batch(rng, 3, 6)
    padded = Batch(rng, 5, 6)
    rows = torch.tensor([0, 2, 4])
    padded.hidden[[1, 3]] = torch.nan
    for name in ("logits", "tokens", "hidden", "acceptance"):
        getattr(padded, name)[rows] = getattr(batch, name)
    padded.slots = torch.full((5,), -1)
    padded.slots[rows] = batch.slots
    scores = padded.score(ours)
    assert scores[[1, 3]].tolist() == [[0.0] * K] * 2
    assert torch.equal(scores[rows], batch.score(theirs))
    padded.observe(ours)
    batch.observe(theirs)
    assert not differences(copies(ours.state), copies(theirs.state))


def test_a_stratum_without_labels_stays_as_it_is(backend, rng):
    ours = trained(make(6), rng)
    batch = Batch(rng, 4, 6)
    batch.slots = torch.tensor([0, 2, 4, 5])
    batch.acceptance.fill_(1.0)
    before = copies(ours.state)
    for _ in range(4):
        batch.score(ours)
        batch.observe(ours)
    for name in LEARNED:
        now = tensors(ours.state)[name]
        assert torch.equal(now[1], before[name][1]), name
    assert not torch.equal(ours.state.head.weights[0], before["head.weights"][0])
    assert not torch.equal(ours.state.head.mean[0], before["head.mean"][0])


@pytest.mark.parametrize("case", ["not scored", "reset", "observed twice", "no verdict", "not taught", "none admitted"])
def test_what_teaches_nothing_leaves_the_head_as_it_is(backend, rng, case):
    ours, batch = trained(make(6), rng), Batch(rng, 4, 6)
    batch.score(ours)
    batch.observe(ours)
    if case in ("reset", "no verdict", "not taught", "none admitted"):
        batch.score(ours)
    before = copies(ours.state)
    rows = len(batch.slots)
    if case == "reset":
        ours.reset(batch.slots, STRATA[batch.slots])
    if case == "no verdict":
        ours.observe(batch.slots, torch.full((rows,), -1), torch.full((rows,), K), acceptance=batch.acceptance)
    elif case == "none admitted":
        ours.observe(batch.slots, torch.zeros(rows).int(), torch.zeros(rows).int(), acceptance=batch.acceptance)
    else:
        batch.observe(ours, teach=torch.zeros(rows, dtype=torch.bool) if case == "not taught" else None)
    assert not [name for name in LEARNED if not torch.equal(tensors(ours.state)[name], before[name])]


def test_scoring_twice_counts_once(backend, rng):
    ours, theirs = (trained(make(6), torch.Generator().manual_seed(1)) for _ in range(2))
    batch, other = Batch(rng, 4, 6), Batch(rng, 4, 6)
    other.slots = batch.slots
    other.score(ours)
    assert torch.equal(batch.score(ours), batch.score(theirs))
    for each in (ours, theirs):
        batch.observe(each)
    assert not differences(copies(ours.state), copies(theirs.state))


def test_a_new_request_in_a_slot_has_nothing_of_the_one_before(backend, rng):
    """Its first step, without a hidden state and of one position, is that of a slot never used."""
    ours, batch = trained(make(6), rng), Batch(rng, 2, 6)
    batch.slots = torch.tensor([0, 2])
    ours.state.offsets.zero_()
    batch.score(ours)
    batch.observe(ours)
    batch.score(ours)
    ours.reset(torch.tensor([0]), STRATA[:1])
    used = ours.score(batch.logits[:1, 1], torch.tensor([0]), position=1).clone()
    assert torch.equal(used, ours.score(batch.logits[:1, 1], torch.tensor([5]), position=1))
    assert ours.state.head.histories[0, 1] == 0


def test_a_batch_of_no_rows(backend, rng):
    ours, batch = trained(make(6), rng), Batch(rng, 0, 6)
    before = copies(ours.state)
    batch.score(ours)
    batch.observe(ours)
    assert differences(copies(ours.state), before) == ["clock"]
