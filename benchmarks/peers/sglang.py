"""SGLang's own planner: its real classes, fed as its scheduler feeds them. ImportError where it is not installed."""

from types import SimpleNamespace

import torch
from sglang.kernels.ops.speculative.dspark.dspark_schedule import ScheduleVerifyLensTopk
from sglang.srt.managers.overlap_utils import CONFIDENCE_RELAY_RING_LAG
from sglang.srt.speculative.dspark_components.dspark_planner import DSparkScheduleConfig, HostConfidenceBudgetPlanner
from sglang.srt.speculative.dspark_components.dspark_sps import SpsCostTable


class SGLangPlanner:
    """`budget` on the host, and `schedule` with the launches of the device path."""

    def __init__(self, confidence: torch.Tensor, milliseconds: list[tuple[int, float]]) -> None:
        """confidence float32 [B, K]; milliseconds: (tokens, step cost), a staircase that holds up to the next count."""
        rows, positions = confidence.shape
        # At most K draft positions besides the anchor: survivals have K columns.
        self.config = DSparkScheduleConfig(gamma=positions)
        table = SpsCostTable(
            sample_batch_tokens=[tokens for tokens, _ in milliseconds],
            sample_steps_per_sec=[1e3 / ms for _, ms in milliseconds],
            max_batch_tokens=max(rows * (positions + 1), milliseconds[-1][0]),
        )
        pool = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(rows, 1)))
        self.planner = HostConfidenceBudgetPlanner(
            sps_table=table, cfg=self.config, model_runner=pool, relay_lag_steps=CONFIDENCE_RELAY_RING_LAG
        )
        self.confidence = confidence
        self.generation, self.slots = torch.ones(rows, dtype=torch.int64), torch.arange(rows)

    def budget(self) -> int:
        return self.planner.compute_budget(
            confidence=self.confidence,
            generation=self.generation,
            current_generation=self.generation,
            req_pool_indices_cpu=self.slots,
        )

    def schedule(self, budget: int) -> torch.Tensor:
        """Its Triton path, eager as in its worker."""
        return ScheduleVerifyLensTopk.triton(confidence=self.confidence, budget=budget, cfg=self.config)


def verify_lengths(confidence: torch.Tensor, budget: int) -> torch.Tensor:
    """Drafts admitted per request and the anchor, [B], by SGLang's kernel on a GPU and by its torch path on a CPU."""
    config = DSparkScheduleConfig(gamma=confidence.shape[1])
    form = ScheduleVerifyLensTopk.triton if confidence.is_cuda else ScheduleVerifyLensTopk.torch
    return form(confidence=confidence, budget=budget, cfg=config)
