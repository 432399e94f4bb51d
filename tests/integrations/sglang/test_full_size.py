"""Each drafter family at full size: 16 prompts, 220 tokens each, 1 to 8 requests at a time, with overlap if it can.

Figures are printed: run with `-rA` or `-s`.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine.client import ForkServer
from tests.integrations.sglang.runs import FAMILIES, engine, plain_engine

pytestmark = [pytest.mark.sglang, pytest.mark.full]

LENGTH, LARGEST = 220, 8
_pick = random.Random(0)
PROMPTS = [[_pick.randrange(3, 512) for _ in range(_pick.choice((2, 5, 20, 60)))] for _ in range(16)]


def run(server: ForkServer, keywords: dict[str, Any], concurrency: int) -> runs.Outcome:
    options = {"max_running_requests": concurrency, "disable_overlap_schedule": False}
    return runs.run(server, keywords | options, LENGTH, PROMPTS, timeout=1800)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("concurrency", [1, 2, 4, LARGEST])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_text_and_savings(server: ForkServer, models: Path, family: runs.Family, concurrency: int) -> None:
    plain = run(server, plain_engine(family, models), LARGEST)
    static = run(server, engine(family, models), concurrency)
    adaptive = run(server, engine(family, models, adaptive=True), concurrency)
    assert [len(each) for each in adaptive.tokens] == [LENGTH] * len(PROMPTS)
    assert ("overlapped event loop" in adaptive.log) == family.overlaps
    runs.assert_same_text(server, plain_engine(family, models), plain, adaptive)
    before, after = ((each.verified(family), each.steps, each.decoded) for each in (static, adaptive))
    per_step = [verified / steps for verified, steps, _ in (before, after)]
    per_token = [decoded / verified for verified, _, decoded in (before, after)]
    print(
        f"{family.drafter}, {concurrency} at a time: verified tokens per request and step {per_step[0]:.2f} -> "
        f"{per_step[1]:.2f}, tokens per verified token {per_token[0]:.3f} -> {per_token[1]:.3f}"
    )
    assert per_step[1] < per_step[0]
    assert per_token[1] > per_token[0]
