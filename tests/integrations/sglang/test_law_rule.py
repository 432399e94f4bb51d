"""Which scores bias SGLang's rule of acceptance, by exact enumeration of two drafts.

SGLang judges the first draft that was trimmed too: its row was verified. So a draft's own token may decide whether the
draft is admitted, and only a score by *later* tokens biases the output: that is the mistake that `test_law.py` plants.
"""

import itertools
import random
from collections.abc import Callable

import pytest

TOKENS = range(3)


def distribution(pick: random.Random) -> list[float]:
    weights = [pick.random() ** 2 + 0.05 for _ in TOKENS]
    return [each / sum(weights) for each in weights]


class Model:
    """first[x] and second[x][y]: of the first token and of the one after it."""

    def __init__(self, pick: random.Random) -> None:
        self.first = distribution(pick)
        self.second = [distribution(pick) for _ in TOKENS]


def verdict(p: list[float], q: list[float], draft: int) -> tuple[float, list[float]]:
    """Probability that the draft is accepted, and the distribution of what replaces it."""
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return min(1.0, p[draft] / q[draft]), [each / (sum(rest) or 1.0) for each in rest]


def law(target: Model, drafter: Model, admitted: Callable[[int, int], int]) -> list[list[float]]:
    """Of two tokens when `admitted(x, y)` of the drafts x, y are verified."""
    result = [[0.0 for _ in TOKENS] for _ in TOKENS]
    for x, y in itertools.product(TOKENS, TOKENS):
        weight = drafter.first[x] * drafter.second[x][y]
        accept, rest = verdict(target.first, drafter.first, x)
        accept_next, rest_next = verdict(target.second[x], drafter.second[x], y)
        judged = admitted(x, y) >= 1  # whether the second draft gets a verdict in this step
        for t in TOKENS:
            for u in TOKENS:
                result[t][u] += weight * (1 - accept) * rest[t] * target.second[t][u]
            replaced = accept_next * (t == y) + (1 - accept_next) * rest_next[t]
            result[x][t] += weight * accept * (replaced if judged else target.second[x][t])
    return result


@pytest.mark.parametrize("seed", range(20))
def test_only_a_later_token_biases_the_law(seed: int) -> None:
    pick = random.Random(seed)
    target, drafter = Model(pick), Model(pick)

    def deviation(admitted: Callable[[int, int], int]) -> float:
        found = law(target, drafter, admitted)
        return max(abs(found[t][u] - target.first[t] * target.second[t][u]) for t in TOKENS for u in TOKENS)

    def by_own_tokens(x: int, y: int) -> int:
        return 0 if drafter.first[x] < 0.4 else 1 if drafter.second[x][y] < 0.4 else 2

    def by_a_later_token(x: int, y: int) -> int:
        return 2 if drafter.second[x][y] >= 0.4 else 0

    assert deviation(by_own_tokens) < 1e-12
    assert deviation(by_a_later_token) > 5e-3
