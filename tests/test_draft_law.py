"""What the scoring launch leaves behind by slot: the entropy of q, and how likely the drawn token was."""

import pytest
import torch

import av_triton as av
from av_triton import AcceptanceEstimator, AdaptiveVerifier, Settings
from av_triton.ops.entropy import entropy_reference

K, SLOTS, VOCAB = 4, 8, 300
KEPT = Settings(entropy=True, history=True)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def logits(rng):
    return torch.randn(4, K, VOCAB, generator=rng) * 3


@pytest.fixture
def seeds(rng):
    return torch.randint(-(2**62), 2**62, (4, K), generator=rng)


SLOTS_OF_ROWS = ints(5, 2, -1, 0)
REAL = SLOTS_OF_ROWS >= 0
TEMPERATURE = torch.tensor([0.7, 1.0, 1.0, 0.0])


def kept(estimator, name):
    """[real rows, K]"""
    return getattr(estimator.state, name)[SLOTS_OF_ROWS[REAL].long(), :K]


def log_law(logits):
    """log q of the real rows, float64 [rows, K, V]."""
    t = torch.where(TEMPERATURE > 0, TEMPERATURE, 1.0)[:, None, None]
    return torch.log_softmax(logits.double() / t, -1)[REAL]


def gaps_of(logits, tokens):
    log_q = log_law(logits)
    return log_q.amax(-1) - log_q.gather(-1, tokens[REAL][..., None])[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["score", "drawn", "argmax", "by position"])
def test_entropies_are_those_of_the_law_drawn_from(backend, logits, seeds, how, dtype):
    x = logits.to(dtype)
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    if how == "score":
        each.score(x, SLOTS_OF_ROWS, temperature=TEMPERATURE)
    elif how == "by position":
        for k in range(K):
            each.score(x[:, k], SLOTS_OF_ROWS, k, TEMPERATURE)
    else:
        each.sample(x, SLOTS_OF_ROWS, seeds if how == "drawn" else None, temperature=TEMPERATURE)
    expected = entropy_reference(x.double(), TEMPERATURE.double()[:, None].expand(-1, K))[REAL]
    torch.testing.assert_close(kept(each, "entropies").double(), expected, rtol=1e-5, atol=0)
    untouched = [slot for slot in range(SLOTS) if slot not in SLOTS_OF_ROWS]
    assert not each.state.entropies[untouched].any()


def test_entropies_in_a_vocabulary_of_several_splits(backend, rng, seeds):
    x = torch.randn(4, 1, 40_000, generator=rng) * 3
    x[0, 0, 900:] = -torch.inf
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    drafts = each.sample(x, SLOTS_OF_ROWS, seeds[:, :1], temperature=TEMPERATURE)
    expected = entropy_reference(x.double(), TEMPERATURE.double()[:, None])[REAL]
    torch.testing.assert_close(kept(each, "entropies")[:, :1].double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(kept(each, "gaps")[:, :1].double(), gaps_of(x, drafts.tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("position", [None, 1])
def test_sample_keeps_how_far_the_drawn_token_is_below_the_best(backend, logits, seeds, position):
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    x, at = (logits, slice(None)) if position is None else (logits[:, 1], slice(1, 2))
    drafts = each.sample(x, SLOTS_OF_ROWS, seeds if position is None else seeds[:, 1], position, TEMPERATURE)
    tokens, gaps = drafts.tokens.view(4, -1), kept(each, "gaps")[:, at]
    torch.testing.assert_close(gaps.double(), gaps_of(logits[:, at], tokens), rtol=1e-5, atol=1e-6)
    assert torch.equal(gaps == 0, tokens[REAL] == logits[REAL][:, at].argmax(-1))
    assert 0 < int((gaps == 0).sum()) < gaps.numel()
    if position is not None:
        assert kept(each, "gaps")[:, [0, 2, 3]].isnan().all()


def test_the_law_of_a_token_follows_from_feature_and_gap(backend, logits, seeds):
    """log q(x) = -log(1 + exp(-f)) - gap"""
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    tokens = each.sample(logits, SLOTS_OF_ROWS, seeds, temperature=TEMPERATURE).tokens
    found = torch.nn.functional.logsigmoid(kept(each, "features")) - kept(each, "gaps")
    expected = log_law(logits).gather(-1, tokens[REAL][..., None])[..., 0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_argmax_has_no_gap(backend, logits):
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    each.sample(logits, SLOTS_OF_ROWS, temperature=TEMPERATURE)
    assert not kept(each, "gaps").any()


@pytest.mark.parametrize("position", [None, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_score_takes_the_tokens_that_the_runtime_drew(backend, logits, seeds, position, transposed):
    ours, theirs = (AcceptanceEstimator(SLOTS, K, settings=KEPT) for _ in range(2))
    tokens = ours.sample(logits, SLOTS_OF_ROWS, seeds, temperature=TEMPERATURE).tokens.clone()
    if transposed:
        tokens = tokens.t().contiguous().t()
    if position is None:
        theirs.score(logits, SLOTS_OF_ROWS, None, TEMPERATURE, tokens)
        assert torch.equal(kept(theirs, "gaps"), kept(ours, "gaps"))
    else:
        theirs.score(logits[:, 1], SLOTS_OF_ROWS, 1, TEMPERATURE, tokens[:, 1])
        assert torch.equal(kept(theirs, "gaps")[:, 1], kept(ours, "gaps")[:, 1])


def test_tokens_that_are_none_and_unlikely_ones(backend, logits):
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    logits[:, :, 7], logits[:, :, 8] = -torch.inf, -1e4
    tokens = torch.tensor([[-1, VOCAB, 1 << 40, 7]] * 2 + [[7, 8, 7, -5]] * 2)
    each.score(logits, SLOTS_OF_ROWS, None, TEMPERATURE, tokens)
    gaps = kept(each, "gaps")
    assert gaps[:2].isnan().tolist() == [[True, True, True, False]] * 2
    assert gaps[:2, 3].tolist() == gaps[2, :3].tolist()[:2] == [40, 40]
    assert gaps[2, 3].isnan()


def test_invalid_rows_have_no_entropy_and_no_gap(backend, logits, seeds):
    logits[0, 0], logits[0, 1, 5], logits[1, 2, 6] = -torch.inf, torch.nan, torch.inf
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    for how in ("drawn", "argmax", "tokens"):
        if how == "tokens":
            each.score(logits, SLOTS_OF_ROWS, None, TEMPERATURE, torch.full((4, K), 6))
        else:
            each.sample(logits, SLOTS_OF_ROWS, seeds if how == "drawn" else None, temperature=TEMPERATURE)
        assert kept(each, "entropies")[0, :2].tolist() == [0, 0]
        assert kept(each, "gaps")[0, :2].isnan().all()
        assert (kept(each, "entropies")[1, 2], kept(each, "gaps")[1, 2]) == (0, 0), "+inf is certain"
        assert kept(each, "gaps")[0, 2:].isfinite().all()


def test_what_is_not_known_is_marked_whatever_was_there_before(backend, logits, seeds):
    """Scored again without tokens, a position's gap of an earlier step is gone; one not scored is told by its score."""
    each = AdaptiveVerifier(SLOTS, K, settings=KEPT, cost=None)
    state, slot = each.estimator.state, ints(3)
    each.sample(logits[:1], slot, seeds[:1])
    assert bool((state.scores[3, :K] >= 0).all() & state.gaps[3, :K].isfinite().all())
    each.observe(slot, ints(2), ints(K))
    assert (state.scores[3, :K] < 0).all()
    each.score(logits[:1, 1], slot, position=1)
    assert state.gaps[3, 1].isnan()
    assert (state.scores[3, :K] >= 0).tolist() == [False, True, False, False]


def test_reset_forgets_the_predecessor(backend, logits, seeds):
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    each.sample(logits, SLOTS_OF_ROWS, seeds)
    each.reset(ints(2, -1))
    assert not each.state.entropies[2].any()
    assert each.state.gaps[2].isnan().all()
    assert (each.state.scores[2] == -1).all()
    assert each.state.entropies[5, :K].all()
    assert each.state.gaps[5, :K].isfinite().all()


def test_scores_do_not_depend_on_what_was_drawn_nor_on_what_is_kept(backend, logits, seeds):
    """Losslessness: p is a function of the distribution."""
    with_tokens, plain = AcceptanceEstimator(SLOTS, K, settings=KEPT), AcceptanceEstimator(SLOTS, K)
    expected = plain.score(logits, SLOTS_OF_ROWS, temperature=TEMPERATURE).clone()
    for tokens in (None, torch.zeros(4, K, dtype=torch.int64), torch.full((4, K), 9)):
        found = with_tokens.score(logits, SLOTS_OF_ROWS, None, TEMPERATURE, tokens)
        assert torch.equal(found, expected)
        assert torch.equal(plain.score(logits, SLOTS_OF_ROWS, None, TEMPERATURE, tokens), expected)
    assert torch.equal(with_tokens.state.features, plain.state.features)
    first, second = (each.sample(logits, SLOTS_OF_ROWS, seeds, None, TEMPERATURE) for each in (with_tokens, plain))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert plain.state.entropies is None
    assert plain.state.gaps is None


@pytest.mark.parametrize("name, other", [("entropy", "gaps"), ("history", "entropies")])
def test_each_alone(backend, logits, seeds, name, other):
    each, both = (AcceptanceEstimator(SLOTS, K, settings=s) for s in (Settings(**{name: True}), KEPT))
    for estimator in (each, both):
        estimator.sample(logits, SLOTS_OF_ROWS, seeds, None, TEMPERATURE)
    assert getattr(each.state, other) is None
    mine = "entropies" if name == "entropy" else "gaps"
    assert torch.equal(kept(each, mine), kept(both, mine))


def test_both_backends_keep_the_same(use, logits, seeds):
    found = []
    for backend in ("torch", "triton"):
        use(backend)
        each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
        each.reset(SLOTS_OF_ROWS)
        each.sample(logits, SLOTS_OF_ROWS, seeds, None, TEMPERATURE)
        found.append(each.state)
    torch.testing.assert_close(found[0].entropies, found[1].entropies, rtol=1e-5, atol=0)
    torch.testing.assert_close(found[0].gaps, found[1].gaps, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_entropies_are_those_of_the_op(backend, logits):
    each = AcceptanceEstimator(SLOTS, K, settings=KEPT)
    each.score(logits, SLOTS_OF_ROWS, temperature=0.7)
    assert torch.equal(kept(each, "entropies"), av.logit_max_and_entropy(logits, 0.7)[1][REAL])
