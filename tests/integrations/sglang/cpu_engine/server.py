"""Fork server: imports SGLang once, then runs each job in a forked child, so that an engine starts in seconds.

One JSON object per line on stdin: {"call": "module:function", "kwargs": {...}, "env": {...}, "result": path,
"log": path, "timeout": seconds}. The child writes what the function returns as JSON to `result` and its output to
`log`; the server answers one line: "ok", "failed" or "timeout".
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

PRELOAD = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.llama",
    "sglang.srt.models.dflash",
    "sglang.srt.models.dspark",
    "sglang.srt.models.llama_eagle",
    "sglang.srt.models.llama_eagle3",
    "sglang.srt.speculative.dflash_worker_v2",
    "sglang.srt.speculative.dspark_components.dspark_worker_v2",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.standalone_worker_v2",
)


def preload() -> None:
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    for name in PRELOAD:
        importlib.import_module(name)
    from sglang.srt.models.registry import ModelRegistry

    from tests.integrations.sglang.cpu_engine import shims

    ModelRegistry.get_supported_archs()
    shims.install()
    # SGLang asks for "spawn", which would import everything again in each of its processes.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[method-assign]


def _child(job: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(job["log"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(job["env"])
    code = 1
    try:
        module, function = job["call"].split(":")
        result = getattr(importlib.import_module(module), function)(**job["kwargs"])
        Path(job["result"]).write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(job: dict[str, Any]) -> str:
    pid = os.fork()
    if pid == 0:
        _child(job)
    deadline = time.monotonic() + job["timeout"]
    answer = "timeout"
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            answer = "ok" if status == 0 else "failed"
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the engine's own processes, where it left some
    if answer == "timeout":
        os.waitpid(pid, 0)
    return answer


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    preload()
    print("ready", file=replies)
    for line in sys.stdin:
        print(_run(json.loads(line)), file=replies)


if __name__ == "__main__":
    main()
