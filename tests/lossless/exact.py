"""Exact joint law of the tokens that speculative decoding emits when a policy chooses how many drafts are verified.

The claim under test is: *whatever the policy admits, the requests' output tokens follow the target's law, jointly.*
Nothing here is sampled or rounded. Every probability is a ``fractions.Fraction``, so "lossless" means a deviation of
exactly 0, and a biased rule shows its exact bias.

**The process.** Request r has a target p_r(. | prefix) and an autoregressive drafter q_r(. | prefix). In one step, for
each request of the batch, with o_r what it has emitted so far and D_r its draft depth,

1. drafts are drawn: x_1 ~ q_r(. | o_r), x_2 ~ q_r(. | o_r x_1), ..., D_r of them;
2. the policy is shown, for every position k, the distribution that x_k was drawn from (never x_k itself; the
   counter-examples lie to it here), and names a number L_r <= D_r of drafts to verify;
3. x_1 .. x_{L_r} are verified: accept x_k with probability min(1, p(x_k) / q(x_k)); at the first rejection emit a token
   from the residual (p - q)_+ / sum (p - q)_+ and stop; if all are accepted emit a bonus token from
   p(. | o_r x_1 .. x_{L_r});
4. the policy is told the number of accepted drafts and, if it learns from them, the acceptance probabilities
   min(1, p(x_k) / q(x_k)) of the verified ones.

After the last step the outputs are completed with the target's own law up to the horizon T, which is what any later
lossless steps would deliver. The result is compared with prod_r p_r(first T tokens).

**Why lengths can bias.** Given L_r, step 3 emits p's law only if L_r tells nothing about the tokens that it does not
verify. The event {L_r >= k} must be decided by x_1 .. x_{k-1} (of r, and of the other requests anything that is itself
decided before x_k is looked at), by the past, and by counters. What the policy is shown at position k already contains
x_1 .. x_{k-1}, since q_k = q(. | o x_1 .. x_{k-1}): with an autoregressive drafter the scores of the later positions
depend on the earlier drawn tokens, and a policy that lets them decide an earlier position is biased. That is why the
drafter here has to be autoregressive, and why the law is the *joint* one: the tokens of one request may leak into the
lengths of another.

**How it is enumerated.** A policy sees the drafts only through the scored distributions, so all drafts of a request
that show it the same rows (a *view*) are one case. For every request, context, view and length the law of (accepted,
emitted tokens), weighted by the probability of the view, is computed once:

    verified[view, L](accepted, tokens) = sum over x with this view of  q(x) * P(accepted, tokens | x, L)

and one step is, for every policy state and every combination of views, the product of those laws over the batch. States
are (policy state, per request the first T tokens and the context that the Markov tables need); equal states are merged.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

Tokens = tuple[int, ...]
Distribution = tuple[Fraction, ...]
Lengths = tuple[int, ...]
VerdictLaw = dict[tuple[int, Tokens], Fraction]
"""Probability of (number of accepted drafts, emitted tokens)."""
Acceptance = tuple[float, ...]
"""Acceptance probabilities of a request's verified drafts."""
View = tuple[tuple[float, ...], ...]
"""What the policy is shown of one request's drafts: one row of probabilities per draft position."""


@dataclass(frozen=True)
class Markov:
    """A next-token law that depends on the last ``order`` tokens of the prefix: an autoregressive model."""

    table: dict[Tokens, Distribution]
    order: int

    def __call__(self, prefix: Tokens) -> Distribution:
        return self.table[self.context(prefix)]

    def context(self, prefix: Tokens) -> Tokens:
        return prefix[max(0, len(prefix) - self.order) :]

    @property
    def vocabulary(self) -> int:
        return len(self.table[()])


@dataclass(frozen=True)
class Request:
    """A target and a drafter over one vocabulary, with the same Markov order."""

    target: Markov
    drafter: Markov

    def __post_init__(self) -> None:
        if self.target.order != self.drafter.order or self.target.vocabulary != self.drafter.vocabulary:
            raise ValueError("target and drafter of a request need one order and one vocabulary")


class Policy(Protocol):
    """A rule for the verify lengths, as a deterministic function of its history.

    A state is any hashable name of a history; equal states must behave equally for ever.
    """

    def start(self) -> Hashable: ...

    def depths(self, state: Hashable, batch: tuple[int, ...]) -> Lengths:
        """Drafts to draw for every request of the batch, decided before any is drawn."""
        ...

    def plan(self, state: Hashable, batch: tuple[int, ...], views: tuple[View, ...]) -> tuple[Lengths, Hashable]:
        """Verify lengths of the batch and the state after planning."""
        ...

    def observe(self, state: Hashable, accepted: Lengths, acceptance: tuple[Acceptance, ...] | None) -> Hashable:
        """The state after the verdicts of the step that was planned last."""
        ...


def honest(distribution: Distribution, drawn: int) -> tuple[float, ...]:
    """The view that losslessness rests on: the distribution, sorted; the drawn token plays no part."""
    return tuple(sorted((float(x) for x in distribution), reverse=True))


def drawn_token(distribution: Distribution, drawn: int) -> tuple[float, ...]:
    """The lie: a row whose largest probability is that of the *drawn* token, so that its score becomes logit(q(x))."""
    others = 15
    q = distribution[drawn]
    if q * (others + 1) < 1:
        raise ValueError(f"q(x) = {q} is too small to be shown as the largest of {others + 1} probabilities")
    return (float(q), *[float((1 - q) / others)] * others)


def with_the_drawn_token(distribution: Distribution, drawn: int) -> tuple[float, ...]:
    """The honest view, and behind it the probability of the drawn token, which is for later positions only."""
    return (*honest(distribution, drawn), float(distribution[drawn]))


Verification = Callable[[Request, Tokens, Tokens, int], VerdictLaw]


def token_verification(request: Request, prefix: Tokens, drafts: Tokens, length: int) -> VerdictLaw:
    """Law of (accepted drafts, emitted tokens) when ``drafts[:length]`` are verified token by token."""
    law: VerdictLaw = defaultdict(Fraction)
    reached = Fraction(1)
    for k in range(length):
        p, q, x = request.target(prefix + drafts[:k]), request.drafter(prefix + drafts[:k]), drafts[k]
        accept = min(Fraction(1), p[x] / q[x])
        if accept < 1:
            residual = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
            total = sum(residual)
            for v, mass in enumerate(residual):
                if mass:
                    law[k, (*drafts[:k], v)] += reached * (1 - accept) * mass / total
        reached *= accept
        if not reached:
            return law
    for v, mass in enumerate(request.target(prefix + drafts[:length])):
        if mass:
            law[length, (*drafts[:length], v)] += reached * mass
    return law


def acceptances(request: Request, prefix: Tokens, drafts: Tokens) -> Acceptance:
    found = []
    for k, x in enumerate(drafts):
        p, q = request.target(prefix + drafts[:k]), request.drafter(prefix + drafts[:k])
        found.append(float(min(Fraction(1), p[x] / q[x])))
    return tuple(found)


@dataclass
class Outcome:
    """The joint law of the outputs, the target's, and what the policy did on the way."""

    law: dict[tuple[Tokens, ...], Fraction]
    target: dict[tuple[Tokens, ...], Fraction]
    lengths: list[set[Lengths]] = field(default_factory=list)
    """Per step, every combination of verify lengths that occurred."""

    @property
    def deviation(self) -> Fraction:
        """Largest difference of a joint probability from the target's: 0 if and only if decoding was lossless."""
        return max(abs(self.law.get(o, Fraction(0)) - p) for o, p in self.target.items())

    @property
    def total_variation(self) -> Fraction:
        return sum((abs(self.law.get(o, Fraction(0)) - p) for o, p in self.target.items()), Fraction(0)) / 2

    def marginal(self, request: int) -> dict[Tokens, Fraction]:
        law: dict[Tokens, Fraction] = defaultdict(Fraction)
        for outputs, p in self.law.items():
            law[outputs[request]] += p
        return dict(law)


def continuations(request: Request, prefix: Tokens, count: int) -> Iterator[tuple[Tokens, Fraction]]:
    """Every continuation by ``count`` tokens that the target can produce, with its probability."""
    if count <= 0:
        yield (), Fraction(1)
        return
    for v, p in enumerate(request.target(prefix)):
        if p:
            for rest, mass in continuations(request, (*prefix, v), count - 1):
                yield (v, *rest), p * mass


def target_law(requests: Sequence[Request], horizon: int) -> dict[tuple[Tokens, ...], Fraction]:
    """prod_r p_r(o_r), over *all* outputs, the impossible ones (probability 0) included."""
    laws = []
    for request in requests:
        possible = dict(continuations(request, (), horizon))
        every = itertools.product(range(request.target.vocabulary), repeat=horizon)
        laws.append([(o, possible.get(o, Fraction(0))) for o in every])
    joint = {}
    for combination in itertools.product(*laws):
        mass = Fraction(1)
        for _, p in combination:
            mass *= p
        joint[tuple(o for o, _ in combination)] = mass
    return joint


def output_law(
    requests: Sequence[Request],
    policy: Policy,
    *,
    steps: int,
    horizon: int,
    batches: Sequence[tuple[int, ...]] | None = None,
    verification: Verification = token_verification,
    show: Callable[[Distribution, int], tuple[float, ...]] = honest,
    acceptance: bool = False,
) -> Outcome:
    """The exact joint law of the first ``horizon`` tokens of every request after ``steps`` speculative steps.

    ``batches[t]`` are the requests that take part in step t (default: all in every step). ``show`` is what the policy
    is shown of one draft. ``acceptance``: whether it is told the acceptance probabilities.
    """
    every = tuple(range(len(requests)))
    batches = [every] * steps if batches is None else batches
    view_cache: dict[tuple[int, Tokens, int], dict[View, list[tuple[Tokens, Fraction]]]] = {}
    law_cache: dict[tuple, list[tuple[tuple[int, Acceptance], tuple[Tokens, Tokens], Fraction]]] = {}

    def views(r: int, context: Tokens, depth: int) -> dict[View, list[tuple[Tokens, Fraction]]]:
        key = r, context, depth
        if key not in view_cache:
            drafter, found = requests[r].drafter, view_cache.setdefault(key, defaultdict(list))
            for drafts in itertools.product(range(drafter.vocabulary), repeat=depth):
                mass, view = Fraction(1), []
                for k, x in enumerate(drafts):
                    q = drafter(context + drafts[:k])
                    mass *= q[x]
                    if not mass:
                        break
                    view.append(show(q, x))
                if mass:
                    found[tuple(view)].append((drafts, mass))
        return view_cache[key]

    def verified(
        r: int, row: tuple[Tokens, Tokens], depth: int, view: View, length: int, last: bool
    ) -> list[tuple[tuple[int, Acceptance], tuple[Tokens, Tokens], Fraction]]:
        output, context = row
        key = r, row, depth, view, length, last
        if key not in law_cache:
            law: dict[tuple[tuple[int, Acceptance], tuple[Tokens, Tokens]], Fraction] = defaultdict(Fraction)
            for drafts, mass in views(r, context, depth)[view]:
                told = acceptances(requests[r], context, drafts[:length]) if acceptance else ()
                for (accepted, tokens), p in verification(requests[r], context, drafts, length).items():
                    verdict, after = (accepted, told), (output + tokens)[:horizon]
                    state = requests[r].target.context(context + tokens)
                    if last:  # only what is emitted counts now
                        verdict, state = (0, ()), state if len(after) < horizon else ()
                    law[verdict, (after, state)] += mass * p
            law_cache[key] = [(verdict, after, p) for (verdict, after), p in law.items() if p]
        return law_cache[key]

    start = tuple(((), ()) for _ in requests)
    states: dict[tuple[Hashable, tuple[tuple[Tokens, Tokens], ...]], Fraction] = {(policy.start(), start): Fraction(1)}
    done: dict[tuple[tuple[Tokens, Tokens], ...], Fraction] = defaultdict(Fraction)
    lengths_used: list[set[Lengths]] = []
    for step, batch in enumerate(batches):
        last = step == len(batches) - 1
        used: set[Lengths] = set()
        cases: dict[tuple, Fraction] = defaultdict(Fraction)
        for (state, rows), weight in states.items():
            depths = policy.depths(state, batch)
            for shown in itertools.product(*(views(r, rows[r][1], d) for r, d in zip(batch, depths, strict=True))):
                lengths, planned = policy.plan(state, batch, shown)
                if any(not 0 <= n <= d for n, d in zip(lengths, depths, strict=True)):
                    raise AssertionError(f"verify lengths {lengths} for {depths} drafts")
                used.add(lengths)
                cases[None if last else planned, rows, depths, shown, lengths] += weight
        lengths_used.append(used)
        states = defaultdict(Fraction)
        for (planned, rows, depths, shown, lengths), weight in cases.items():
            laws = [
                verified(r, rows[r], d, v, n, last) for r, d, v, n in zip(batch, depths, shown, lengths, strict=True)
            ]
            for outcomes in itertools.product(*laws):
                mass, after = weight, list(rows)
                for r, (_, row, p) in zip(batch, outcomes, strict=True):
                    mass *= p
                    after[r] = row
                if last or all(len(output) == horizon for output, _ in after):
                    done[tuple(after)] += mass
                else:
                    accepted, told = zip(*(verdict for verdict, _, _ in outcomes), strict=True)
                    state = policy.observe(planned, accepted, told if acceptance else None)
                    states[state, tuple(after)] += mass

    law: dict[tuple[Tokens, ...], Fraction] = defaultdict(Fraction)
    rest_cache: dict[tuple[int, Tokens, int], list[tuple[Tokens, Fraction]]] = {}
    for rows, weight in done.items():
        tails = []
        for r, (output, context) in enumerate(rows):
            key = r, context, horizon - len(output)
            if key not in rest_cache:
                rest_cache[key] = list(continuations(requests[r], context, key[2]))
            tails.append(rest_cache[key])
        for combination in itertools.product(*tails):
            mass = weight
            for _, p in combination:
                mass *= p
            law[tuple(rows[r][0] + tail for r, (tail, _) in enumerate(combination))] += mass
    if sum(law.values()) != 1:
        raise AssertionError(f"the enumerated probabilities sum to {sum(law.values())}, not to 1")
    return Outcome(dict(law), target_law(requests, horizon), lengths_used)


def random_request(
    rng: random.Random,
    vocabulary: int,
    order: int,
    *,
    peaks: Sequence[Fraction] | None = None,
    zeros: bool = False,
) -> Request:
    """A request with random tables.

    ``peaks``: the drafter's largest probability is drawn from these (they fix how many different scores there are, and
    so how often the policy has to be asked); None: any. ``zeros``: some target tokens are impossible.
    """

    def weights(may_vanish: bool) -> Distribution:
        w = [rng.randint(0 if may_vanish and rng.random() < 0.3 else 1, 12) for _ in range(vocabulary)]
        w[rng.randrange(vocabulary)] += 1
        return tuple(Fraction(x, sum(w)) for x in w)

    def peaked() -> Distribution:
        peak, shares = rng.choice(list(peaks or ())), vocabulary * (vocabulary - 1) // 2
        row = [peak, *((1 - peak) * Fraction(n, shares) for n in range(1, vocabulary))]
        if max(row) > peak:
            raise ValueError(f"a largest probability of {peak} leaves more than that to another token")
        rng.shuffle(row)
        return tuple(row)

    contexts = [c for n in range(order + 1) for c in itertools.product(range(vocabulary), repeat=n)]
    target = {c: weights(zeros) for c in contexts}
    drafter = {c: peaked() if peaks else weights(False) for c in contexts}
    return Request(Markov(target, order), Markov(drafter, order))
