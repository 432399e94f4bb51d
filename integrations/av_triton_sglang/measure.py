"""Step costs of this server: the target's verify forward timed when it starts, drafting timed in its first steps.

The result is kept in a file, named after all that it depends on, and the next start takes it from there.
"""

import hashlib
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from av_triton import CostTable
from av_triton_sglang.flag import Config

logger = logging.getLogger(__name__)

REPEATS = 3
LEAST = 1e-6  # ms: costs are positive
# Drafting is timed in these decode steps, after one that warms up; they verify all drafts.
DRAFT_STEPS = 5


def cache_file(config: Config, arguments: Any, device: str, captured: Sequence[int] | None) -> Path:
    """Where the costs of this server are kept. captured: tokens of its verify graphs."""
    folder = config.cost_cache or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "av_triton"
    )
    cuda = torch.cuda.is_available() and device.startswith("cuda")
    key = {
        "packages": {name: version(name) for name in ("av-triton", "sglang", "torch")},
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "captured": captured,
        "context": config.cost_context,
        **{
            name: getattr(arguments, name)
            for name in (
                "model_path", "revision", "dtype", "quantization", "kv_cache_dtype", "attention_backend",
                "prefill_attention_backend", "decode_attention_backend", "speculative_algorithm",
                "speculative_draft_model_path", "speculative_draft_model_revision", "speculative_num_draft_tokens",
                "tp_size", "max_running_requests",
            )
        },
    }  # fmt: skip
    name = hashlib.sha256(msgspec.json.encode(key, enc_hook=str, order="sorted")).hexdigest()[:16]
    return Path(folder) / f"costs-{name}.json"


class VerifyForward:
    """The target's ragged verify forward over made-up requests, which live in the pool's dummy slot. Each of their
    tokens attends to `context` others, or as many as the pool has room for."""

    def __init__(self, runner: Any, width: int, hidden_states: bool, context: int) -> None:
        self._runner, self._width, self._hidden_states = runner, width, hidden_states
        self.context = min(context, runner.req_to_token_pool.req_to_token.shape[1] - width)

    def __call__(self, tokens: int, requests: int | None = None) -> None:
        """tokens: at most max_requests * width. requests: at most `tokens`; None: as few as can hold them."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput
        from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

        runner, device = self._runner, self._runner.device
        rows = requests or fewest(tokens, self._width)
        lengths = [tokens // rows + (row < tokens % rows) for row in range(rows)]
        # A size that was captured is replayed, others run eagerly.
        layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lengths, device=device, grid=[tokens])
        zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
        positions = torch.full((tokens,), self.context, dtype=torch.int64, device=device)
        mode = CaptureHiddenMode.FULL if self._hidden_states else CaptureHiddenMode.NULL
        committed = torch.full((rows,), self.context, dtype=torch.int64)
        extended = committed + torch.tensor(lengths)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=rows,
            input_ids=zeros,
            req_pool_indices=torch.zeros(rows, dtype=torch.int64, device=device),
            seq_lens=committed.to(device),
            seq_lens_cpu=extended,
            seq_lens_sum=int(extended.sum()),
            orig_seq_lens=committed.to(device),
            out_cache_loc=zeros,
            positions=positions,
            return_logprob=False,
            spec_algorithm=runner.spec_algorithm,
            spec_info=DFlashVerifyInput(
                draft_token=zeros,
                positions=positions,
                draft_token_num=self._width,
                custom_mask=None,
                capture_hidden_mode=mode,
                ragged_verify_layout=layout,
                live_seq_lens_cpu=committed,
            ),
            capture_hidden_mode=mode,
        )
        runner.kv_index_translator.bind_runner_slots(batch)
        with torch.inference_mode():
            runner.forward(runner.prepare_dummy_forward_batch(batch))


def fewest(tokens: int, width: int) -> int:
    """Requests that can hold so many tokens, `width` each."""
    return -(-tokens // width)


def waiter() -> Callable[[], object]:
    """Waits for the device, if there is one."""
    return torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None


def request_cost(forward: Callable[[int, int], None], max_requests: int, width: int) -> float:
    """Milliseconds that another request costs at equal tokens, for its context is read as well.

    One token of each request, against as many tokens of as few requests as can hold them.
    """
    tokens, few, wait = max_requests, fewest(max_requests, width), waiter()
    if few == max_requests:
        return 0.0

    def timed(requests: int) -> float:
        wait()
        start = time.perf_counter()
        forward(tokens, requests)
        wait()
        return (time.perf_counter() - start) * 1e3

    differences = [timed(max_requests) - timed(few) for _ in range(1 + REPEATS)]
    return max(statistics.median(differences[1:]), 0.0) / (max_requests - few)


def measure_verify(
    forward: Callable[..., None],
    max_requests: int,
    width: int,
    captured: Sequence[int] | None = None,
    progress: bool = True,
) -> CostTable:
    """What verification costs by tokens and, as `draft`, by requests; drafting is not in it yet.

    A plan does not change how many requests there are, so their own cost must not look like a price of tokens.

    forward(tokens, requests): see `VerifyForward`. captured: tokens of the verify graphs, of which no other size up to
    the largest can run.
    """
    start = time.perf_counter()
    sizes, max_tokens = None, max_requests * width
    if captured is not None:
        sizes = [*captured, *range(captured[-1] * 2, max_tokens, captured[-1])]
    table = CostTable.measure(
        forward,
        sizes,
        max_tokens=max_tokens,
        draft=lambda requests: None,
        max_requests=1,
        captured=captured or (),
        repeats=REPEATS,
        progress=progress,
    )
    # Requests have cost no more than all that the curve rises by, whatever a slow moment in their own measurement says.
    rise = table.verify[-1][1] - min(ms for _, ms in table.verify)
    each = min(request_cost(forward, max_requests, width), rise / max(fewest(max_tokens, width) - 1, 1))
    times = [max(ms - each * fewest(n, width), LEAST) for n, ms in table.verify]
    # A size that costs more than a larger one was measured in a slow moment, or has a slow kernel of its own; the table
    # never falls, and would hide what the sizes above it cost.
    verify = [(n, min(times[at:])) for at, (n, _) in enumerate(table.verify)]
    logger.info(
        "Adaptive verification: measured the cost of verifying 1 to %d tokens (%.2f to %.2f ms, %.3f ms of it for each "
        "request) in %.1f s.",
        max_tokens, table.verify[0][1], table.verify[-1][1], each, time.perf_counter() - start,
    )  # fmt: skip
    return msgspec.structs.replace(
        table,
        draft=[(n, max(each * n, LEAST)) for n in sorted({1, max_requests})],
        verify=verify,
    )


class DraftClock:
    """Times drafting in the first decode steps: from their begin to the plan, and from the verdicts to their end."""

    def __init__(self) -> None:
        self._wait = waiter()
        self._started = self._running = 0.0
        self._steps: list[float] = []

    def start(self) -> None:
        self._wait()
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._wait()
        self._running += time.perf_counter() - self._started

    def end_step(self) -> float | None:
        """Milliseconds, once there are enough steps."""
        self._steps.append(self._running * 1e3)
        self._running = 0.0
        return statistics.median(self._steps[1:]) if len(self._steps) > DRAFT_STEPS else None
