"""Jobs for the fork server of the SGLang tests: engines that serve prompts in turn, timed step by step."""

import asyncio
import fcntl
import functools
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.serving.points import PROFILED, Arm, Point, Step, append, load, profiled_costs
from tests.integrations.sglang.cpu_engine.jobs import DEFAULTS

TRIES = 5


class Turn(NamedTuple):
    """A point to measure. arm: index in the list of arms."""

    arm: int
    repetition: int
    concurrency: int
    requests: int


def serve(
    arms: list[tuple[Arm, dict[str, Any]]],
    turns: list[Turn],
    prompts: list[list[int]],
    length: int,
    warm_up: int,
    points: str,
    owner: int,
) -> None:
    """Append a Point to the file `points` for every turn. Arms keep their engines, of which one works at a time.

    arms: with the keywords of `sglang.Engine`. length: new tokens of every request; warm_up: of a run of all prompts,
    at the highest concurrency, for which an engine is started. owner: the process whose end also ends this job.
    """
    store, engines = Path(points), {}
    with store.open("a") as lock:
        # A job that outlived its owner may still be at work on its last point.
        fcntl.flock(lock, fcntl.LOCK_EX)
        highest = max(Turn(*turn).concurrency for turn in turns)
        for turn in map(Turn._make, turns):
            if not Path(f"/proc/{owner}").exists():
                return
            arm, keywords = Arm(*arms[turn.arm][0]), arms[turn.arm][1]
            if turn.arm not in engines:
                if arm.kind == PROFILED:
                    _profile(arm, Path(keywords["adaptive_verification_config"]["cost_table"]), store)
                steps = store.with_name(f"steps-{turn.arm}.jsonl")
                engines[turn.arm] = _start(keywords, steps, prompts, highest, warm_up)
            seconds, recorded, outputs = measured(engines[turn.arm], prompts[: turn.requests], length, turn.concurrency)
            append(
                store,
                Point(
                    arm=arm,
                    repetition=turn.repetition,
                    concurrency=turn.concurrency,
                    requests=turn.requests,
                    length=length,
                    seconds=seconds,
                    steps=recorded,
                    outputs=outputs,
                ),
            )


def measured(
    engine: "Connection[Any, Any]", prompts: list[list[int]], length: int, concurrency: int
) -> tuple[float, list[Step], list[list[int]]]:
    """(seconds, steps, outputs). Once more where no step had all requests, for some came too late for the others."""
    for _ in range(TRIES):
        engine.send((prompts, length, concurrency))
        seconds, steps, outputs = engine.recv()
        if any(step.requests == concurrency for step in steps):
            return seconds, steps, outputs
    raise RuntimeError(
        f"in {TRIES} runs of {len(prompts)} requests of {length} tokens, no decode step had {concurrency} of them; "
        "give the requests more tokens"
    )


def _profile(arm: Arm, table: Path, store: Path) -> None:
    """The step costs of a profiled arm, from the first points of plain decoding and the fixed arms."""
    if not table.exists():
        profiled_costs(load(store).values(), arm).save(table)


def _start(
    keywords: dict[str, Any], steps: Path, prompts: list[list[int]], concurrency: int, warm_up: int
) -> "Connection[Any, Any]":
    """An engine in a process of its own, forked; returns once it has served all prompts."""
    here, there = multiprocessing.Pipe()
    multiprocessing.Process(target=_engine, args=(there, keywords, steps)).start()
    there.close()  # so that its end is seen here
    here.send((prompts, warm_up, concurrency))
    here.recv()
    return here


def _engine(jobs: "Connection[Any, Any]", keywords: dict[str, Any], steps: Path) -> None:
    """Answers (prompts, new tokens, concurrency) with (seconds, steps, outputs)."""
    import sglang

    _record_steps(steps)
    with sglang.Engine(**DEFAULTS | keywords) as running:
        while True:
            before, job = len(_read(steps)), jobs.recv()
            start = time.perf_counter()
            outputs = running.loop.run_until_complete(_closed_loop(running, *job))
            jobs.send((time.perf_counter() - start, _read(steps)[before:], outputs))


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


def _read(steps: Path) -> list[Step]:
    time.sleep(0.2)  # the scheduler records a step after it has sent the step's tokens
    return [msgspec.json.decode(line, type=Step) for line in steps.read_bytes().splitlines()]


def _record_steps(path: Path) -> None:
    """Have the scheduler process, which is forked from this one, append every decode step to `path`."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker

    from av_triton import AdaptiveVerifier

    path.write_text("")
    forward, process = TpModelWorker.forward_batch_generation, Scheduler.process_batch_result
    ended: tuple[float, float] | None = None  # `_clocks` at the end of the batch before
    target = [0.0, 0.0]  # milliseconds of the target's forwards since then
    own = 0.0  # of the verifier's calls

    @functools.wraps(forward)
    def timed_forward(worker: Any, *args: Any, **kwargs: Any) -> Any:
        start = _clocks()
        result = forward(worker, *args, **kwargs)
        if not worker.is_draft_worker:
            target[:] = [sum(each) for each in zip(target, _since(start), strict=True)]
        return result

    def timed_call(call: Any) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal own
            start = _clocks()
            result = call(*args, **kwargs)
            own += _since(start)[1]
            return result

        return timed

    @functools.wraps(process)
    def timed_process(scheduler: Any, batch: Any, result: Any) -> None:
        nonlocal ended, own
        requests, width = list(batch.reqs), result.speculative_num_draft_tokens or 1
        verified = len(requests) * width if result.cap_lens is None else int(result.cap_lens.sum())
        before = sum(len(each.output_ids) for each in requests)
        process(scheduler, batch, result)
        if batch.forward_mode.is_decode() and ended is not None:
            emitted = sum(len(each.output_ids) for each in requests) - before
            (ms, cpu_ms), (target_ms, target_cpu_ms) = _since(ended), target
            step = Step(len(requests), verified, emitted, ms, cpu_ms, target_ms, target_cpu_ms, own)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(step) + b"\n")
        target[:], own = (0.0, 0.0), 0.0
        ended = _clocks()

    TpModelWorker.forward_batch_generation = timed_forward
    Scheduler.process_batch_result = timed_process
    for name in ("sample", "score", "plan", "observe"):
        setattr(AdaptiveVerifier, name, timed_call(getattr(AdaptiveVerifier, name)))


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
