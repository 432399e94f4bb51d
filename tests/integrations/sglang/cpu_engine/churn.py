"""A job for the fork server: requests that are streamed, and some of them aborted, while others come and go."""

import asyncio
from typing import Any

from tests.integrations.sglang.cpu_engine.jobs import DEFAULTS, plain


def stream(
    engine: dict[str, Any],
    prompts: list[list[int]],
    sampling: list[dict[str, Any]],
    abort: dict[str, int],
    retract_every: int,
) -> dict[str, Any]:
    """Tokens and statistics of each request. abort: {index of the request: tokens after which it is given up}."""
    import sglang
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, retract_every

    async def one(running: Any, index: int) -> dict[str, Any]:
        rid, tokens, meta = f"request-{index:04}", [], {}  # an abort takes every request whose name begins alike
        chunks = await running.async_generate(
            input_ids=prompts[index], sampling_params=sampling[index], return_logprob=True, stream=True, rid=rid
        )
        async for chunk in chunks:
            meta, new = chunk["meta_info"], chunk["output_ids"]
            tokens = new if len(new) == meta["completion_tokens"] else tokens + new
            if len(tokens) >= abort.get(str(index), 1 << 30):
                running.tokenizer_manager.abort_request(rid)
        return {"tokens": tokens, "meta": plain(meta), "finished": (meta["finish_reason"] or {}).get("type")}

    async def every(running: Any) -> list[dict[str, Any]]:
        return await asyncio.gather(*(one(running, index) for index in range(len(prompts))))

    with sglang.Engine(**DEFAULTS | engine) as running:
        requests = running.loop.run_until_complete(every(running))
        state = running.get_server_info()["internal_states"][0]
        return {"requests": requests, "adaptive_verification": state.get("adaptive_verification")}
