"""Jobs for the fork server of the SGLang tests: an engine that serves every concurrency in turn, timed by step."""

import asyncio
import fcntl
import functools
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.serving.points import Point, Step, append
from tests.integrations.sglang.cpu_engine.jobs import DEFAULTS


def serve(
    engine: dict[str, Any],
    prompts: list[list[int]],
    requests: list[tuple[int, int]],
    length: int,
    warm_up: int,
    labels: dict[str, Any],
    points: str,
    steps: str,
    owner: int,
) -> None:
    """Append a Point to the file `points` for every (concurrency, requests), after a warm-up at the highest of them.

    engine: keywords of `sglang.Engine`. length: new tokens of every request. warm_up: the same for the warm-up, in
    which all prompts are served. labels: arm and repetition of the points. steps: a file for the scheduler's records.
    owner: the process whose end also ends this job.
    """
    import sglang

    with Path(points).open("a") as lock:
        # A job that outlived its owner may still be at work on its last point.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _record_steps(Path(steps))
        highest = max(concurrency for concurrency, _ in requests)
        with sglang.Engine(**DEFAULTS | engine) as running:
            loop = running.loop
            loop.run_until_complete(_closed_loop(running, prompts, warm_up, highest))
            for concurrency, count in requests:
                if not Path(f"/proc/{owner}").exists():
                    return
                before = _read(steps)
                start = time.perf_counter()
                outputs = loop.run_until_complete(_closed_loop(running, prompts[:count], length, concurrency))
                seconds = time.perf_counter() - start
                point = Point(
                    **labels,
                    concurrency=concurrency,
                    requests=count,
                    length=length,
                    seconds=seconds,
                    steps=_read(steps)[len(before) :],
                    outputs=outputs,
                )
                append(Path(points), point)


async def _closed_loop(running: Any, prompts: list[list[int]], length: int, concurrency: int) -> list[list[int]]:
    """Greedy output tokens of every prompt; a request starts when another one has ended."""
    places = asyncio.Semaphore(concurrency)
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}

    async def one(prompt: list[int]) -> list[int]:
        async with places:
            result = await running.async_generate(input_ids=prompt, sampling_params=sampling)
            tokens: list[int] = result["output_ids"]
            return tokens

    return await asyncio.gather(*map(one, prompts))


def _read(steps: str) -> list[Step]:
    time.sleep(0.2)  # the scheduler records a step after it has sent the step's tokens
    return [msgspec.json.decode(line, type=Step) for line in Path(steps).read_bytes().splitlines()]


def _record_steps(path: Path) -> None:
    """Have the scheduler process, which is forked from this one, append every decode step to `path`."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker

    path.write_text("")
    forward, process = TpModelWorker.forward_batch_generation, Scheduler.process_batch_result
    ended: tuple[float, float] | None = None  # `_clocks` at the end of the batch before
    target = [0.0, 0.0]  # milliseconds of the target's forwards since then

    @functools.wraps(forward)
    def timed_forward(worker: Any, *args: Any, **kwargs: Any) -> Any:
        start = _clocks()
        result = forward(worker, *args, **kwargs)
        if not worker.is_draft_worker:
            target[:] = [sum(each) for each in zip(target, _since(start), strict=True)]
        return result

    @functools.wraps(process)
    def timed_process(scheduler: Any, batch: Any, result: Any) -> None:
        nonlocal ended
        requests, width = list(batch.reqs), result.speculative_num_draft_tokens or 1
        verified = len(requests) * width if result.cap_lens is None else int(result.cap_lens.sum())
        before = sum(len(each.output_ids) for each in requests)
        process(scheduler, batch, result)
        if batch.forward_mode.is_decode() and ended is not None:
            emitted = sum(len(each.output_ids) for each in requests) - before
            (ms, cpu_ms), (target_ms, target_cpu_ms) = _since(ended), target
            step = Step(len(requests), verified, emitted, ms, cpu_ms, target_ms, target_cpu_ms)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(step) + b"\n")
        target[:] = 0.0, 0.0
        ended = _clocks()

    TpModelWorker.forward_batch_generation = timed_forward
    Scheduler.process_batch_result = timed_process


def _clocks() -> tuple[float, float]:
    """(wall, CPU of the process), seconds"""
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    """Milliseconds."""
    wall, cpu = _clocks()
    return (wall - start[0]) * 1e3, (cpu - start[1]) * 1e3


def gaps(engine: dict[str, Any], cases: list[tuple[list[int], int, int]]) -> list[float]:
    """|difference| of the target's logits of two tokens after a context, for every (context, token, other token)."""
    import sglang

    with sglang.Engine(**DEFAULTS | engine) as running:
        results = running.generate(
            input_ids=[context for context, _, _ in cases],
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            token_ids_logprob=[[first, second] for _, first, second in cases],
        )
    found = []
    for (_, first, second), result in zip(cases, results, strict=True):
        by_token = {token: value for value, token, *_ in result["meta_info"]["output_token_ids_logprobs"][0]}
        found.append(abs(by_token[first] - by_token[second]))
    return found
