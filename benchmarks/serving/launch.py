"""How the engine of an arm is started."""

from pathlib import Path
from typing import Any

from benchmarks.serving import models
from benchmarks.serving.points import ADAPTIVE, HEADED, HEADLESS, PLAIN, PROFILED, Arm
from tests.integrations.sglang.cpu_engine.attention_name import NAME

TRIMMING = (ADAPTIVE, PROFILED, HEADED, HEADLESS)


def costs(arm: Arm, kept: Path) -> Path:
    """File of the step costs that an adaptive arm plans by."""
    return kept / f"{arm._replace(kind=ADAPTIVE) if arm.kind in (HEADED, HEADLESS) else arm} costs"


def coefficients(arm: Arm, kept: Path) -> Path:
    """File of what an adaptive arm has learned."""
    return kept / f"{arm} coefficients.json"


def keywords(arm: Arm, checkpoints: Path, kept: Path, highest: int) -> dict[str, Any]:
    """Of `sglang.Engine`. kept: folder of what an adaptive arm takes over from one pass to the next. highest:
    concurrency."""
    engine: dict[str, Any] = {
        "model_path": str(models.target(checkpoints)),
        "max_running_requests": highest,
        "max_total_tokens": 12288,
        "log_level": "warning",
        "sleep_on_idle": True,  # other engines work meanwhile
    }
    if arm.kind == PLAIN:
        return engine
    engine |= {
        "speculative_algorithm": arm.drafter,
        "speculative_draft_model_path": str(models.drafter(checkpoints, arm.drafter)),
        "speculative_num_draft_tokens": arm.length + 1,
    }
    if arm.drafter == "STANDALONE":
        engine |= {"speculative_num_steps": arm.length, "speculative_eagle_topk": 1}
    if arm.drafter == "DSPARK":
        engine["speculative_dspark_block_size"] = arm.length
    if arm.kind in TRIMMING:
        engine["enable_adaptive_verification"] = True
        engine["adaptive_verification_config"] = {
            "cost_table" if arm.kind == PROFILED else "cost_cache": str(costs(arm, kept)),
            "cost_context": 96,  # about what the prompts and half of an output have
            "coefficients": str(coefficients(arm, kept)),
            "save_interval": 20,
            "settings": {"refit_interval": 8},  # the runs are short
            "ragged_backends": [NAME],
        }
    if arm.kind in (HEADED, HEADLESS):
        engine["adaptive_verification_config"]["settings"]["head"] = arm.kind == HEADED
    return engine
