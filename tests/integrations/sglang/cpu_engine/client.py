"""Runs functions in children of the fork server (see server.py)."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
STANDIN = Path(__file__).parent / "standin"
TAIL = 6000


class JobError(AssertionError):
    """A job failed; the message ends with the tail of its log, all of which is in `log`."""

    def __init__(self, text: str, log: str) -> None:
        super().__init__(f"{text}\n{log[-TAIL:]}")
        self.log = log


# Files below sglang/srt/models that the CPU engine needs; importing all the others takes a minute.
MODELS = {
    "deepseek_v4_dspark", "dflash", "dspark", "llama", "llama_eagle", "llama_eagle3", "mimo", "mimo_mtp", "qwen2",
    "registry", "utils",
}  # fmt: skip


def unused_models() -> str:
    """For SGLANG_DISABLED_MODEL_ARCHS."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    return ",".join(sorted({path.stem for path in folder.iterdir()} - MODELS))


def environment() -> dict[str, str]:
    paths = [str(STANDIN), str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # one entry for each of two ranks; nothing is bound
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a test
        "SGLANG_DISABLED_MODEL_ARCHS": unused_models(),
    }


class ForkServer:
    """Context manager; `call` runs one job and returns its result and log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "ForkServer":
        self._log = (self._folder / "server.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.sglang.cpu_engine.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, cwd=ROOT, env=environment(), start_new_session=True,
        )  # fmt: skip
        if self._reply() != "ready":
            raise JobError("the fork server did not start", (self._folder / "server.log").read_text())
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._log.close()

    def _reply(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def call(
        self, function: str, timeout: float = 240, env: dict[str, str] | None = None, **kwargs: Any
    ) -> tuple[Any, str]:
        """function: "module:name", called with `kwargs` in a fresh child. Raises JobError where it fails."""
        assert self._process is not None
        assert self._process.stdin is not None
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        job = {
            "call": function,
            "kwargs": kwargs,
            "env": env or {},
            "timeout": timeout,
            "result": str(folder / "result.json"),
            "log": str(folder / "log.txt"),
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._reply()
        log = (folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").exists() else ""
        if answer != "ok":
            raise JobError(f"{function}: {answer or 'the fork server ended'}", log)
        return json.loads((folder / "result.json").read_text()), log
