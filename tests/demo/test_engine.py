"""The decode loop: every arm's greedy output is plain decoding's, trimmed drafts are not run, slots are reused."""

import pytest
import torch

from av_triton import AdaptiveVerifier, CostTable, Settings
from av_triton.demo import engine
from av_triton.demo.sampling import Sampler
from tests.demo import tiny

# Verifying a token costs much: budgets stay small.
COST = CostTable(draft=[(1, 1.0), (3, 1.0)], verify=[(1, 1.0), (4, 2.0), (20, 12.0)])
LENGTHS = [4, 9, 2, 15, 6, 3, 12]


def make_arm(model, filled, name, batch=3, max_new=20, temperature=0.0, top_p=1.0, seed=0, **how):
    return engine.Arm(name, model, filled, Sampler(temperature, top_p, seed), batch, max_new, **how)


def make_verifier(batch=3, **settings):
    settings = {"refit_interval": 4, "autoregressive": True, **settings}
    return AdaptiveVerifier(batch, 5, cost=COST, settings=Settings(**settings))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["block", "layer-skip"])
@pytest.mark.parametrize("vocab", [11, 9])
def test_greedy_output_equals_plain_decoding(kind, vocab):
    model = tiny.target()
    drafter = tiny.drafter(kind, model, vocab)
    filled = tiny.prompts(model, LENGTHS, stop=5)
    plain = make_arm(model, filled, "plain")
    arms = [make_arm(model, filled, f"fixed {n}", drafter=drafter, depth=n) for n in range(1, 6)]
    for settings in ({}, {"policy": "fixed", "fixed_budget": 2}, {"policy": "lookahead"}, {"exploration": 0.5}):
        verifier = make_verifier(**settings)
        arms.append(make_arm(model, filled, f"adaptive {settings}", drafter=drafter, depth=5, verifier=verifier))
    engine.run([plain, *arms], 16, lambda arm, n: None)
    for output in plain.outputs[:7]:
        assert len(output) == 20 or output[-1] == 5
        assert 5 not in output[:-1]
    for arm in arms:
        assert arm.outputs[:7] == plain.outputs[:7], arm.name
        assert arm.finished
        assert arm.counts.emitted == sum(map(len, arm.outputs))
        assert engine.first_differences(model, plain, arm) == []
    assert sum(arm.counts.accepted for arm in arms) > 0


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["block", "layer-skip"])
def test_only_admitted_drafts_are_run(kind, monkeypatch):
    model = tiny.target()
    drafter = tiny.drafter(kind, model)
    filled = tiny.prompts(model, LENGTHS)
    verifier = make_verifier(policy="fixed", fixed_budget=2)
    arm = make_arm(model, filled, "adaptive", drafter=drafter, depth=5, verifier=verifier)
    seen = []
    forward = model.forward

    def spy(ids, tokens, layers=None, taps=()):
        if layers is None:
            seen.append(len(ids))
        return forward(ids, tokens, layers, taps)

    monkeypatch.setattr(model, "forward", spy)
    rows = []
    while not arm.finished:
        before = arm.counts.rows
        arm.step()
        rows.append(arm.counts.rows - before)
    assert seen == [n + 2 for n in rows]
    assert arm.counts.admitted + arm.counts.rows == sum(seen)
    assert arm.counts.drafted > arm.counts.admitted


@torch.inference_mode()
def test_slots_are_reused_and_reset():
    model = tiny.target()
    drafter = tiny.drafter("layer-skip", model)
    filled = tiny.prompts(model, LENGTHS * 2)
    verifier = make_verifier()
    resets = []
    reset = verifier.reset
    verifier.reset = lambda slots, strata=None: (resets.append((slots.tolist(), strata.tolist())), reset(slots, strata))
    arm = make_arm(model, filled, "adaptive", drafter=drafter, depth=5, verifier=verifier)
    while not arm.finished:
        arm.step()
    assert len(resets) == arm.started > 14
    assert {slot for slots, _ in resets for slot in slots} == {0, 1, 2}
    assert all(strata == [1] for _, strata in resets)
    assert [len(output) for output in arm.outputs[:14]] == [20] * 14
    # Requests that come again, into other slots and next to others, decode to the same tokens.
    for first, again in zip(arm.outputs, arm.outputs[14:], strict=False):
        assert first[: len(again)] == again


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["block", "layer-skip"])
def test_draft_depth_of_the_plan_is_followed(kind):
    model = tiny.target()
    drafter = tiny.drafter(kind, model)
    filled = tiny.prompts(model, LENGTHS)
    verifier = make_verifier()
    arm = make_arm(model, filled, "adaptive", drafter=drafter, depth=5, verifier=verifier)
    depths = []
    plan = verifier.plan

    def spy(slots, drafts):
        depths.append((set(drafts.tolist()), arm.next_depth))
        return plan(slots, drafts)

    verifier.plan = spy
    while not arm.finished:
        arm.step()
    assert all(given == {wanted} for given, wanted in depths)
    assert min(wanted for _, wanted in depths) < 5


@torch.inference_mode()
def test_a_wrong_token_is_reported_with_the_gap_of_its_logits():
    model = tiny.target()
    filled = tiny.prompts(model, LENGTHS)
    plain, other = make_arm(model, filled, "plain"), make_arm(model, filled, "other")
    engine.run([plain, other], 16, lambda arm, n: None)
    right = other.outputs[2][7]
    other.outputs[2][7] = (right + 1) % 11
    other.outputs[4] = other.outputs[4][:-1]
    (first, second) = engine.first_differences(model, plain, other)
    assert first[:2] == (2, 7)
    assert 1e-3 < first[2] < 100
    assert second == (4, 19, float("inf"))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["block", "layer-skip"])
@pytest.mark.parametrize("budget", [None, 1])
def test_sampled_output_follows_the_target(kind, budget):
    """Chi-square of the first three tokens of many equal requests against the target's exact law."""
    stats = pytest.importorskip("scipy.stats")
    model = tiny.target(seed=2)
    drafter = tiny.drafter(kind, model, vocab=9)
    filled = tiny.prompts(model, [6])
    requests, top_p = 3000, 0.9
    filled.ids, filled.prefilled = filled.ids * requests, filled.prefilled * requests
    settings = {} if budget is None else {"policy": "fixed", "fixed_budget": budget * 6}
    verifier = make_verifier(batch=60, **settings)
    arm = make_arm(
        model,
        filled,
        "adaptive",
        60,
        3,
        temperature=0.7,
        top_p=top_p,
        seed=7,
        drafter=drafter,
        depth=5,
        verifier=verifier,
    )
    while not arm.finished:
        arm.step()
    assert arm.counts.admitted < arm.counts.drafted

    law = target_law(model, filled.ids[0], 3, 0.7, top_p)
    counts = dict.fromkeys(law, 0)
    for output in arm.outputs[:requests]:
        counts[tuple(output)] += 1
    assert stats.chisquare(*merge_rare(counts, law, requests)).pvalue > 1e-3


def target_law(model, prompt, tokens, temperature, top_p):
    """Exact joint distribution of the first tokens: temperature, then the nucleus, by full sort."""
    law = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for prefix, probability in law.items():
            ids = prompt + list(prefix)
            rows = engine.TokenList(
                model.cache(1, len(ids)), torch.tensor([0]), torch.tensor([0]), torch.tensor([len(ids)])
            )
            hidden, _ = model.forward(torch.tensor(ids), rows)
            p = torch.softmax(model.head(hidden[-1:])[0].double() / temperature, -1)
            order = p.argsort(descending=True)
            kept = order[(p[order].cumsum(0) - p[order]) < top_p]
            for token in kept.tolist():
                longer[*prefix, token] = probability * float(p[token] / p[kept].sum())
        law = longer
    return law


def merge_rare(counts, law, total, least=10):
    """(observed, expected) with the rare cells in one."""
    common = [cell for cell in law if law[cell] * total >= least]
    observed = [counts[cell] for cell in common]
    expected = [law[cell] * total for cell in common]
    if len(common) < len(law):
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    return observed, expected
