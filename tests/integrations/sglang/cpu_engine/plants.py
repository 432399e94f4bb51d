"""Mistakes to plant in the plug-in, for tests that have to see them."""

from typing import Any

import torch

from tests.integrations.sglang.cpu_engine import jobs


def score_by_a_later_token(result: Any, **kwargs: Any) -> None:
    """In place of `dspark.score`: every draft of a block is scored by the probability of the second one that was drawn.

    Whether the first draft is admitted then depends on the second one's token. A score by a draft's *own* token would
    not do: SGLang judges the first draft that was trimmed as well (the row that judges it was verified), and a prefix
    that depends on its own tokens alone is then lossless.
    """
    from av_triton_sglang import step

    if not step.exists():
        return
    tokens, logits = result
    drawn = torch.softmax(logits.float(), -1).gather(-1, tokens.view(logits.shape[:2])[..., None])
    # Two columns whose log-odds rise steeply with that probability, so that the budget goes to whole blocks.
    odds = 30 * drawn[:, 1:2].expand(-1, logits.shape[1], 1)
    step.current().score(torch.cat([odds, torch.zeros_like(odds)], -1))


def generate(**job: Any) -> dict[str, Any]:
    """As `jobs.generate`, with `score_by_a_later_token` planted."""
    from av_triton_sglang import dspark, plugin

    hooks, targets = plugin.FAMILIES["DSPARK"]
    planted = tuple(
        hook._replace(function=score_by_a_later_token) if hook.function is dspark.score else hook for hook in hooks
    )
    plugin.FAMILIES = {**plugin.FAMILIES, "DSPARK": (planted, targets)}
    return jobs.generate(**job)
