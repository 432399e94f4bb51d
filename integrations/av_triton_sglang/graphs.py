"""SGLang's captured verify graphs: what of them there is, and how they are captured for the workers that do not by
themselves verify ragged lengths. They are captured by tokens, not by requests.

What is captured are the very functions that run without graphs: they read slots from a persistent buffer that is
written before the replay.
"""

from collections.abc import Callable
from typing import Any

from av_triton_sglang import flag


def captured_sizes(runner: Any, rows: int = 1) -> list[int] | None:
    """Tokens of the captured verify graphs, ascending; None: no graph takes a batch of so many requests."""
    from sglang.srt.speculative.dspark_components.dspark_planner import (
        ragged_capture_max_slots,
        ragged_capture_num_tokens,
    )

    sizes: list[int] | None = ragged_capture_num_tokens(model_runner=runner)
    if sizes is None or rows > ragged_capture_max_slots(model_runner=runner):
        return None
    return sizes if runner.attn_backend.supports_ragged_verify_graph else None


def by_tokens(supported: bool, algorithm: Any) -> bool:
    """A hook after `SpeculativeAlgorithm.supports_ragged_verify`."""
    return supported or flag.current() is not None


def verify_input(original: Callable[..., Any], runner: Any, num_tokens: int) -> Any:
    """Around the input that an EAGLE worker's verify graph is captured with: what `eagle.pack` makes of it."""
    given = original(runner, num_tokens)
    if flag.current() is None or not runner.ragged_verify_mode:
        return given
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput

    return DFlashVerifyInput(
        draft_token=None,
        positions=None,
        draft_token_num=runner.captured_req_width,
        custom_mask=None,
        capture_hidden_mode=given.capture_hidden_mode,
        ragged_verify_layout=runner._capture_ragged_verify_layout(num_tokens),
    )
