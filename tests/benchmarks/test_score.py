"""The score report: its streams, the restated additions, and what is counted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from av_triton import Settings
from av_triton.ops.accumulate import GATES, SETTLED
from av_triton.ops.select import Q30
from benchmarks.score import compare, scenarios
from benchmarks.score.additions import CLIP, EVIDENCE_FROM, HEAD_BOUND, OFFSET_BOUND, Additions, Gate, Restated, labels
from benchmarks.score.arms import Estimator, Peer, Redrawn
from benchmarks.score.report import ARMS, ARTICLE, restated
from benchmarks.score.streams import Rounds, batches, in_turn, joined, load, shuffled
from tests.traffic import settle

DATA = Path(__file__).parents[2] / "benchmarks/score/data"
EVERYTHING = Additions(exact=True, offset=16.0, history=True, hidden=True)


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    return joined([load(DATA / f"B_{workload}_T1.npz") for workload in ("gsm8k", "humaneval")])


def first(rounds: Rounds, requests: int) -> Rounds:
    return rounds[rounds.request < requests]


def synthetic(
    width: int = 8, requests: int = 40, length: int = 30, positions: int = 3, strength: float = 0.0
) -> Rounds:
    """alpha = sigmoid(.5 f - .2 + strength h_0), with hidden states of deviation 3 about 10."""
    rng = np.random.default_rng(0)
    n, positions = requests * length, 3
    features = rng.normal(1, 2, (n, positions)).astype(np.float32)
    noise = rng.standard_normal((n, positions, width))
    return Rounds(
        features=features,
        alpha=expit(0.5 * features - 0.2 + strength * noise[..., 0]).astype(np.float32),
        log_q=-rng.exponential(size=(n, positions)).astype(np.float32),
        hidden=(10 + 3 * noise).astype(np.float32),
        request=np.repeat(np.arange(requests), length),
        prompt=np.repeat(np.arange(requests), length),
        workload=np.zeros(n, np.int64),
        greedy=np.zeros(n, bool),
    )


def test_every_round_is_served_once_and_in_order(rounds):
    few = first(rounds, 30)
    served = [(batch.slots, batch.fresh, batch.at) for batch in batches(few, 7, shuffled(few), seed=1)]
    at = np.concatenate([each for _, _, each in served])
    assert sorted(at) == list(range(len(few)))
    for request in np.unique(few.request):
        of = at[few.request[at] == request]
        assert (np.diff(of) > 0).all()
    slot_of: dict[int, int] = {}
    for slots, fresh, now in served:
        assert len(set(slots)) == len(slots)
        for slot, new, request in zip(slots, fresh, few.request[now], strict=True):
            assert new == (slot_of.get(slot) != request)
            slot_of[slot] = request


def test_a_stream_is_its_seed(rounds):
    few = first(rounds, 20)
    one, same, other = ([batch.accepted for batch in batches(few, 4, shuffled(few), seed)] for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=False))


def test_workloads_come_in_turn(rounds):
    order = in_turn(rounds, 1, 0)(np.random.default_rng(0))
    workload = [int(rounds.workload[rounds.request == request][0]) for request in order]
    assert workload == sorted(workload, reverse=True)
    assert set(workload) == {0, 1}


def test_requests_and_prompts_of_joined_traces_differ():
    parts = [load(DATA / f"A_{workload}_T1.npz") for workload in ("gsm8k", "humaneval")]
    whole = joined(parts)
    for name in ("request", "prompt"):
        inside = [set(getattr(whole, name)[whole.workload == each]) for each in (0, 1)]
        assert not inside[0] & inside[1]
        assert len(inside[0] | inside[1]) == sum(len(np.unique(getattr(part, name))) for part in parts)
    assert len(np.unique(whole.request)) > len(np.unique(whole.prompt))  # a prompt that was started again


def test_restated_base_is_the_projects_estimator(rounds):
    """Coefficients by verdicts, and scores, over two refits."""
    few = first(rounds, 60)
    ours, project = Restated(4, 3, 576, Additions()), Estimator(4, 3)
    for number, batch in enumerate(batches(few, 4, shuffled(few), seed=3)):
        np.testing.assert_allclose(ours.score(batch), project.score(batch), atol=2e-5)
        ours.observe(batch)
        project.observe(batch)
        if number == 100:
            break
    coefficients = project.inner.coefficients()
    assert coefficients.refits == 3
    np.testing.assert_allclose([ours.base.slope, *ours.base.intercepts],
                               [coefficients.slopes[0], *coefficients.intercepts[0]], atol=1e-5)  # fmt: skip


def test_exact_labels_are_the_mean_of_verdicts(rounds):
    batch = next(batches(rounds, 16, shuffled(rounds), seed=0))
    y, omega = labels(batch, exact=True)
    rng = np.random.default_rng(0)
    sums = np.zeros((2, *y.shape))
    for _ in range(4000):
        accepted = np.cumprod(rng.random(y.shape) < batch.rounds.alpha, 1).sum(1)
        drawn, weight = labels(replace(batch, accepted=accepted), exact=False)
        sums += np.stack([weight, weight * drawn])
    np.testing.assert_allclose(sums / 4000, [omega, omega * y], atol=0.03)


@pytest.mark.parametrize("make", ARMS.values(), ids=ARMS)
def test_nothing_is_learned_from_what_is_held_out(rounds, make):
    """The scores of a stream are the same whatever the verdicts and acceptance probabilities of the held-out rows."""
    few = first(rounds, 10)
    taught = few.request % 2 == 0
    alpha = np.where(taught[:, None], few.alpha, 1 - few.alpha)
    p = []
    for each in (few, replace(few, alpha=alpha)):
        arm = make(4, 3, 576, False)
        scores = []
        for batch in batches(few, 4, shuffled(few), 0, taught):
            seen = replace(
                batch,
                rounds=each[batch.at],
                accepted=np.where(taught[batch.at], batch.accepted, 0 if each is few else 3),
            )
            scores.append(arm.score(seen))
            arm.observe(seen)
        p.append(np.concatenate(scores))
    np.testing.assert_array_equal(*p)


def test_no_score_depends_on_the_draft_that_it_is_of(rounds):
    """The history is of the drafts before it."""
    batch = next(batches(rounds, 16, shuffled(rounds), seed=0))
    arm = Restated(16, 3, 576, replace(EVERYTHING, gated=False))
    arm.head.v[:] = 1.0
    before = arm.score(batch)
    for k in range(3):
        log_q = batch.rounds.log_q.copy()
        log_q[:, k] -= 1.0
        after = arm.score(replace(batch, rounds=replace(batch.rounds, log_q=log_q)))
        np.testing.assert_array_equal(after[:, : k + 1], before[:, : k + 1])
        assert k == 2 or (after[:, k + 1] != before[:, k + 1]).all()


def run(
    rounds: Rounds, additions: Additions, rows: int = 8, settled: bool = True
) -> tuple[Restated, np.ndarray, np.ndarray]:
    """The arm after the stream, and its scores beside those of the base. settled: its gates move from the start."""
    positions, width = rounds.hidden.shape[1:]
    arm, base = (Restated(rows, positions, width, each) for each in (additions, Additions(exact=additions.exact)))
    if settled:
        arm.base.past[0] = base.base.past[0] = EVIDENCE_FROM
    scores = []
    for batch in batches(rounds, rows, shuffled(rounds), 0):
        scores.append((arm.score(batch), base.score(batch)))
        arm.observe(batch)
        base.observe(batch)
    return arm, *map(np.concatenate, zip(*scores, strict=True))


def test_until_4096_labels_the_score_is_the_bases():
    rounds = synthetic(strength=2.0, requests=64)
    assert 2000 < rounds.weights.sum() < EVIDENCE_FROM
    arm, with_additions, base = run(rounds, EVERYTHING, settled=False)
    assert np.abs(arm.head.v).max() > 0
    np.testing.assert_array_equal(with_additions, base)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_head_finds_what_there_is(scale):
    """Whatever the scale of the hidden states, of mean 10 and deviation 3."""
    rounds = synthetic(strength=2.0, requests=80)
    arm, ours, base = run(rounds.with_hidden(rounds.hidden * np.float32(scale)), EVERYTHING)
    assert arm.head_gate.open
    assert int(np.abs(arm.head.v).argmax()) == 1  # after the history
    np.testing.assert_allclose(arm.head.mean, 10 * scale, rtol=0.1)
    np.testing.assert_allclose(np.sqrt(arm.head.variance), 3 * scale, rtol=0.5)
    assert np.mean((ours[-300:] - base[-300:]) ** 2) > 0.01


def test_noise_does_not_open_the_gate():
    arm, ours, base = run(synthetic(width=64), EVERYTHING)
    assert not arm.head_gate.open
    np.testing.assert_array_equal(ours, base)
    _, ours, _ = run(synthetic(width=64), replace(EVERYTHING, gated=False))
    assert np.abs(ours - base).max() > 0.01


def test_the_offset_follows_the_request():
    rounds = synthetic(requests=30, length=60)
    own = np.where(rounds.request % 2, 2.0, -2.0)[:, None]
    moved = replace(rounds, alpha=expit(0.5 * rounds.features - 0.2 + own).astype(np.float32))
    arm = Restated(4, 3, 8, Additions(offset=16.0))
    arm.base.past[0] = EVIDENCE_FROM
    at_end = []
    for batch in batches(moved, 4, shuffled(moved), 0):
        arm.score(batch)
        arm.observe(batch)
        last = np.arange(len(batch.at))[(batch.at + 1) % 60 == 0]
        z, with_offset, _ = arm.log_odds
        at_end += list(zip(own[batch.at[last], 0], (with_offset - z)[last, 0], strict=True))
    assert arm.offset_gate.open
    true, found = np.array(at_end).T
    assert (np.sign(found) == np.sign(true)).all()
    assert np.abs(found).max() <= CLIP


def test_a_gate_opens_and_closes_by_its_bound():
    gate = Gate(HEAD_BOUND)
    for _ in range(8):
        assert not gate.open
        gate.observe(1.001)
    assert gate.open
    gate.observe(1e6)
    gate.observe(-7.9)
    assert gate.open
    gate.observe(-0.2)
    assert not gate.open
    gate.observe(-1e6)
    assert gate.evidence == -HEAD_BOUND
    assert OFFSET_BOUND < HEAD_BOUND


def test_all_arms_see_the_same_and_the_better_one_is_told():
    rounds = synthetic(strength=2.0)
    makes = [restated(), restated(exact=True, hidden=True), lambda slots, positions, width, greedy: Peer(positions)]
    found = compare.run(batches(rounds, 8, shuffled(rounds, 3), 0), makes, 8)
    result = compare.Result.of([found])
    assert result.difference(1).high < 0
    assert result.deepest(0) == result.worst_window(0) == 0
    assert result.auc(1) > result.auc(0) + 0.05
    np.testing.assert_allclose(result.labels(), 3 * rounds.weights.sum())  # every draft of every pass


def test_only_what_is_held_out_is_scored():
    rounds = synthetic(requests=10)
    taught = rounds.request % 2 == 0
    found = compare.run(batches(rounds, 4, shuffled(rounds), 0, taught), [restated()], 4, held_out=True)
    result = compare.Result.of([found])
    np.testing.assert_allclose(result.labels(), rounds.weights[~taught].sum())
    assert (result.prompt[result.weight > 0] % 2 == 1).all()


def test_auc_and_ece_are_those_of_the_drafts():
    """Of predictions that are the acceptance probabilities: calibrated, and ranked as the formula over pairs says."""

    class Oracle:
        def score(self, batch):
            return batch.rounds.alpha

        def observe(self, batch): ...

    rounds = synthetic()
    rounds = replace(rounds, alpha=np.round(rounds.alpha, 1))  # ties
    order = shuffled(rounds, 3)
    found = compare.run(batches(rounds, 8, order, 0), [lambda *shape: Oracle(), lambda *shape: Oracle()], 8)
    result = compare.Result.of([found])
    assert result.labels(len(compare.SPANS) - 1) > 100
    assert result.ece(0) < 2 / compare.GRID  # predictions are taken at the middle of their bin
    alpha, weight = rounds.alpha.ravel().astype(np.float64), rounds.weights.ravel()
    up, down = weight * alpha, weight * (1 - alpha)
    better = (alpha[:, None] > alpha).astype(float) + 0.5 * (alpha[:, None] == alpha)
    expected = up @ better @ down / (up.sum() * down.sum())
    assert result.auc(0) == pytest.approx(expected, abs=0.02)


def test_redrawn_verdicts_are_others_with_the_same_probabilities():
    class Counts:
        def score(self, batch):
            return batch.rounds.alpha

        def observe(self, batch):
            self.found.append((batch.accepted, own.accepted))

    rounds = synthetic()
    counts = Counts()
    counts.found = []
    arm = Redrawn(counts)
    for own in batches(rounds, 8, shuffled(rounds, 5), 0):
        assert arm.score(own) is own.rounds.alpha
        arm.observe(own)
    other, verdicts = (np.concatenate(each) for each in zip(*counts.found, strict=True))
    assert (other != verdicts).mean() > 0.2
    error = np.sqrt((other.var() + verdicts.var()) / len(other))
    assert abs(other.mean() - verdicts.mean()) < 4 * error


def test_redrawn_verdicts_differ_by_order_and_repeat():
    def first_draw(seed):
        arm, batch = Redrawn(Peer(3)), next(batches(rounds, 8, shuffled(rounds), seed))
        arm.score(batch)
        arm.observe(batch)
        return arm.random.random()

    rounds = synthetic()
    assert first_draw(0) == first_draw(0) != first_draw(1)


def test_worst_window_and_deepest_loss():
    steps = [[250.0, 100.0, 100.0 + gap] for gap in (-5, -5, 1, 1, 1, 1, -2, -2)]
    run = compare.Run([[0, 0, 1, 1, 1]], steps, np.zeros((2, 2, compare.GRID)).tolist())
    result = compare.Result.of([run])
    assert result.deepest(1) == pytest.approx(4)
    assert result.worst_window(1) == pytest.approx(4 / 1000)
    assert result.highest_mean(1) == pytest.approx(-6 / 1500)


def test_scenarios_that_the_issue_names_are_there(rounds):
    names = " ".join(each.name for each in scenarios.harmful({"B": rounds}, {}))
    for name in ("1 at a time", "48 at a time", "gsm8k, then humaneval", "humaneval, then gsm8k", "one-hot", "4096",
                 "times 1000", "opposite"):  # fmt: skip
        assert name in names


def test_the_repositorys_arms_start_with_the_article():
    assert next(iter(ARMS)) == ARTICLE


@pytest.mark.parametrize("exact", [True, False])
def test_the_library_learns_what_is_restated(exact):
    """Offset, history, head and gates of `AcceptanceEstimator`, on its torch backend, against the formulas in numpy."""
    rounds = synthetic(strength=1.5)
    rounds = replace(rounds, log_q=-np.logaddexp(0.0, -rounds.features).astype(np.float32))  # the most likely tokens
    restatement = Restated(8, 3, 8, replace(EVERYTHING, exact=exact))
    library = Estimator(8, 3, Settings(offset_prior=16.0), exact=exact, width=8)
    restatement.base.past[0] = EVIDENCE_FROM
    settle(library.inner)
    gaps = []
    for batch in batches(rounds, 8, shuffled(rounds), seed=2):
        p, q = restatement.score(batch), library.score(batch)
        gaps.append(np.abs(p - q).mean())
        restatement.observe(batch)
        library.observe(batch)
    state = library.inner.state
    assert (SETTLED, *(each / Q30 for each in GATES)) == (EVIDENCE_FROM, OFFSET_BOUND, HEAD_BOUND)
    assert state.gates[1, 0] > 0
    assert np.quantile(gaps, 0.95) < 1e-3  # a gate may open a step sooner
    assert np.allclose(state.head.weights[0, :-1], restatement.head.v[1:], atol=2e-3)
