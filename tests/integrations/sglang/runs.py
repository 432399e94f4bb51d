"""Engine runs that the tests share: plain, static and adaptive decoding of the same prompts, and how they compare."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from av_triton import CostTable
from tests.integrations.sglang.cpu_engine import checkpoints
from tests.integrations.sglang.cpu_engine.attention_name import NAME
from tests.integrations.sglang.cpu_engine.client import ForkServer

GENERATE = "tests.integrations.sglang.cpu_engine.jobs:generate"
PROMPTS = [[5, 6, 7, 8], [100, 4, 200], [17, 18, 19, 20, 21], [300, 301]]
# A machine whose step costs twice as much at 20 tokens as at 4.
COST = CostTable(draft=[(1, 1.0), (16, 1.5)], verify=[(1, 4.0), (4, 6.0), (8, 9.0), (20, 18.0), (80, 66.0)])
# Two logits that are closer may swap where a batch is summed in another order.
LOGIT_TOLERANCE = 1e-3

CHAIN = {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}


class Family(NamedTuple):
    algorithm: str
    drafter: str  # name in checkpoints.MAKERS
    width: int  # K + 1
    options: dict[str, Any]
    target: str = "target"

    @property
    def drafts_to_depth(self) -> bool:
        """Whether forwards of the drafter are left out where the planner says so: those of the EAGLE worker."""
        return self.algorithm not in ("DSPARK", "DFLASH")

    @property
    def overlaps(self) -> bool:
        """Whether SGLang's overlapped event loop runs on a CPU: it turns it off for the EAGLE worker there."""
        return self.algorithm in ("DSPARK", "DFLASH")


FAMILIES = {
    "DSPARK": Family("DSPARK", "dspark", 5, {}),
    "DFLASH": Family("DFLASH", "dflash", 5, {}),
    "DFLASH2": Family("DFLASH", "dflash2", 5, {}),
    "STANDALONE": Family("STANDALONE", "standalone", 5, CHAIN),
    "EAGLE": Family("EAGLE", "eagle", 5, CHAIN),
    "EAGLE3": Family("EAGLE3", "eagle3", 5, CHAIN),
    "NEXTN": Family("NEXTN", "mtp", 5, CHAIN, target="mtp"),
}


def plain_engine(family: Family, models: Path) -> dict[str, Any]:
    """Keywords of `sglang.Engine` for the family's target without a drafter."""
    return {"model_path": str(checkpoints.make(family.target, models))}


def engine(family: Family, models: Path, adaptive: bool = False, **config: Any) -> dict[str, Any]:
    """Keywords of `sglang.Engine`. config: of the plug-in, over the defaults here."""
    drafter = checkpoints.make(family.drafter, models)
    keywords = plain_engine(family, models)
    keywords |= {"speculative_algorithm": family.algorithm, "speculative_draft_model_path": str(drafter)}
    keywords |= family.options
    if adaptive:
        keywords["enable_adaptive_verification"] = True
        keywords["adaptive_verification_config"] = plugin_config(models, **config)
    return keywords


def plugin_config(models: Path, **changes: Any) -> dict[str, Any]:
    """With a head, which by default the test models' small vocabularies would not have."""
    COST.save(models / "cost.json")
    settings = {"head": True} | changes.pop("settings", {})
    usual = {"cost_table": str(models / "cost.json"), "ragged_backends": [NAME], "log_interval": 20}
    return usual | {"settings": settings} | changes


class Outcome(NamedTuple):
    prompts: list[list[int]]
    tokens: list[list[int]]
    meta: list[dict[str, Any]]
    status: dict[str, Any] | None
    log: str

    @property
    def steps(self) -> int:
        """Verified rows: requests times decode steps."""
        return sum(each["spec_verify_ct"] for each in self.meta)

    @property
    def decoded(self) -> int:
        """Tokens that came from decode steps: all but the first of each request."""
        return sum(len(each) - 1 for each in self.tokens)

    def verified(self, family: Family) -> int:
        """Tokens that the target verified: anchors, and drafts or those of them that were admitted."""
        if self.status is None:
            return self.steps * family.width
        return self.steps + sum(self.status["admitted"])


def run(
    server: ForkServer,
    keywords: dict[str, Any],
    length: int = 120,
    prompts: list[list[int]] = PROMPTS,
    timeout: float = 240,
    captured: list[int] | None = None,
    **sampling: Any,
) -> Outcome:
    """captured: see `jobs.generate`. sampling: parameters of the requests, over greedy decoding of `length` tokens."""
    parameters = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True} | sampling
    return _run(
        server, json.dumps(keywords), json.dumps(prompts), json.dumps(parameters), json.dumps(captured), timeout
    )


@lru_cache(maxsize=64)
def _run(server: ForkServer, keywords: str, prompts: str, sampling: str, captured: str, timeout: float) -> Outcome:
    job = {"engine": json.loads(keywords), "prompts": json.loads(prompts), "sampling": json.loads(sampling)}
    job["captured"] = json.loads(captured)
    result, log = server.call(GENERATE, timeout=timeout, **job)
    return Outcome(job["prompts"], result["tokens"][0], result["meta"][0], result["adaptive_verification"], log)


def assert_same_text(server: ForkServer, keywords: dict[str, Any], plain: Outcome, other: Outcome) -> None:
    """Equal over the full output; a first difference passes where the two logits nearly tie, and is printed."""
    for prompt, want, got in zip(plain.prompts, plain.tokens, other.tokens, strict=True):
        if want == got:
            continue
        at = next(i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
        gap = logit_gap(server, keywords, prompt + want[:at], want[at], got[at])
        print(f"prompt {prompt}: token {at} is {got[at]} for {want[at]}; their logits differ by {gap:.1e}")
        assert gap < LOGIT_TOLERANCE, (prompt, at, want[at], got[at], gap)


def logit_gap(server: ForkServer, keywords: dict[str, Any], context: list[int], first: int, second: int) -> float:
    result, _ = server.call(
        "tests.integrations.sglang.cpu_engine.jobs:next_logprobs",
        engine=keywords,
        context=context,
        tokens=[first, second],
    )
    return abs(result[0] - result[1])
