"""Block verification stays lossless when its length is chosen by a prefix-only rule.

Block verification (Sun et al., 2024; an option of SGLang) judges a block of L drafts jointly. With w_0 = 1 and

    w_i = min(1, w_{i-1} p(x_i) / q(x_i))
    h_L = w_L,    h_i = S_i / (S_i + 1 - w_i),    S_i = sum_v (w_i p(v | x_1..x_i) - q(v | x_1..x_i))_+

the accepted length is the largest i with u_i <= h_i (u_i uniform, independent), followed by a token from the residual
(w_i p - q)_+ / S_i, or by a bonus token if i = L. It accepts at least as much as token verification for the same L.
"""

import random
from collections import defaultdict
from fractions import Fraction

import pytest

from tests.lossless.exact import Request, Tokens, VerdictLaw, View, output_law, random_request, token_verification
from tests.lossless.rules import Rule


def block_verification(request: Request, prefix: Tokens, drafts: Tokens, length: int) -> VerdictLaw:
    """Law of (accepted drafts, emitted tokens) when ``drafts[:length]`` are verified as one block."""
    law: VerdictLaw = defaultdict(Fraction)
    w, accept, residuals = Fraction(1), [Fraction(1)], []
    for i in range(length):
        p, q = request.target(prefix + drafts[:i]), request.drafter(prefix + drafts[:i])
        residuals.append([max(Fraction(0), w * a - b) for a, b in zip(p, q, strict=True)])
        if i:
            total = sum(residuals[i])
            accept.append(total / (total + 1 - w) if total or w < 1 else Fraction(1))
        w = min(Fraction(1), w * p[drafts[i]] / q[drafts[i]])
    if length:
        accept.append(w)
    longer_rejected = Fraction(1)
    for i in range(length, -1, -1):
        reached = longer_rejected * accept[i]
        longer_rejected *= 1 - accept[i]
        if not reached:
            continue
        last = request.target(prefix + drafts[:length]) if i == length else residuals[i]
        total = sum(last)
        for v, mass in enumerate(last):
            if mass:
                law[i, (*drafts[:i], v)] += reached * mass / total
    return law


def survival_threshold(views: tuple[View, ...]) -> tuple[int, ...]:
    """Prefix-only: admit while the product of the largest draft probabilities is at least .4."""
    lengths = []
    for view in views:
        survival, n = 1.0, 0
        for row in view:
            survival *= row[0]
            if survival < 0.4:
                break
            n += 1
        lengths.append(n)
    return tuple(lengths)


def last_score_decides(views: tuple[View, ...]) -> tuple[int, ...]:
    """Not prefix-only: the score of the *last* position, which knows all tokens before it, decides about the first."""
    return tuple(len(view) if view[-1][0] >= 0.6 else 0 for view in views)


SIZES = [(2, 2, 3, 25), (2, 3, 4, 10), (3, 2, 3, 8), pytest.param(3, 3, 4, 12, marks=pytest.mark.full)]


@pytest.mark.parametrize("vocabulary, depth, horizon, cases", SIZES)
def test_block_verification_is_lossless_under_prefix_only_lengths(vocabulary, depth, horizon, cases):
    rng = random.Random(1)
    for _ in range(cases):
        request = random_request(rng, vocabulary, depth)
        fixed = [Rule(lambda views, n=n: (n,), depth) for n in range(depth + 1)]
        for policy in (*fixed, Rule(survival_threshold, depth)):
            outcome = output_law([request], policy, steps=1, horizon=horizon, verification=block_verification)
            assert outcome.deviation == 0


def test_two_blocks_of_two_requests_are_lossless():
    rng = random.Random(2)
    for _ in range(5):
        requests = [random_request(rng, 2, 2) for _ in range(2)]
        rule = Rule(survival_threshold, 2)
        assert output_law(requests, rule, steps=2, horizon=3, verification=block_verification).deviation == 0


def test_block_verification_accepts_at_least_as_many_drafts():
    rng = random.Random(3)
    strictly = 0
    for _ in range(20):
        request = random_request(rng, 2, 2)
        for drafts in ((0, 0), (0, 1), (1, 0), (1, 1)):
            block, token = (f(request, (), drafts, 2) for f in (block_verification, token_verification))
            assert sum(block.values()) == sum(token.values()) == 1
            means = [sum(n * p for (n, _), p in law.items()) for law in (block, token)]
            strictly += means[0] > means[1]
    assert strictly > 0


def test_block_verification_is_biased_by_a_rule_that_looks_ahead():
    rng = random.Random(4)
    deviations = []
    for _ in range(10):
        request = random_request(rng, 2, 2)
        rule = Rule(last_score_decides, 2)
        deviations.append(output_law([request], rule, steps=1, horizon=3, verification=block_verification).deviation)
    print(f"block verification, look-ahead rule: largest deviation {float(max(deviations)):.4f}")
    assert max(deviations) > Fraction(1, 100)
