"""The command lines of an operator: server processes that SGLang spawns afresh, from the start to SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine import checkpoints
from tests.integrations.sglang.cpu_engine.attention_name import NAME
from tests.integrations.sglang.cpu_engine.client import ROOT, environment

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(1800)]

COMMANDS = {
    "sglang serve": [str(Path(sys.executable).with_name("sglang")), "serve"],
    "launch_server": [sys.executable, "-m", "sglang.launch_server"],
}
START, STOP = 1500, 120  # seconds: every process imports SGLang, on a slow machine for minutes
PORT = 31911


def shims(folder: Path) -> Path:
    """What SGLang lacks on a CPU, as a plug-in that spawned processes find: the metadata of an installed package."""
    package = folder / "cpu_engine-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu_engine\nVersion: 0\n")
    install = "tests.integrations.sglang.cpu_engine.shims:install"
    (package / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ncpu_engine = {install}\n")
    return folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_server_answers_and_saves_its_coefficients_at_shutdown(
    models: Path, tmp_path: Path, command: list[str]
) -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: run make test-sglang")
    import requests

    coefficients = tmp_path / "coefficients.json"
    config = runs.plugin_config(models, coefficients=str(coefficients), save_interval=0, settings={"refit_interval": 8})
    options = {
        "model-path": checkpoints.make("target", models), "speculative-algorithm": "DSPARK",
        "speculative-draft-model-path": checkpoints.make("dspark", models),
        "adaptive-verification-config": json.dumps(config), "device": "cpu", "dtype": "float32",
        "mem-fraction-static": 0.3, "max-total-tokens": 8192, "max-running-requests": 4, "attention-backend": NAME,
        "port": PORT,
    }  # fmt: skip
    switches = (
        "enable-adaptive-verification", "disable-cuda-graph", "skip-server-warmup", "skip-tokenizer-init",
    )  # fmt: skip
    given = [*(f"--{name}={value}" for name, value in options.items()), *(f"--{name}" for name in switches)]
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(shims(tmp_path / "plugin")), env["PYTHONPATH"]])
    log = tmp_path / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *given], stdout=output, stderr=output, env=env, cwd=ROOT, start_new_session=True
        )
    address = f"http://127.0.0.1:{PORT}"
    try:
        start = time.monotonic()
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < start + START, log.read_text()[-4000:]
            try:
                if requests.get(f"{address}/health", timeout=20).ok:
                    break
            except requests.RequestException:
                time.sleep(1)
        print(f"{' '.join(command[-2:])}: up after {time.monotonic() - start:.0f} s")
        sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
        body = {"input_ids": runs.PROMPTS, "sampling_params": sampling}
        answers = requests.post(f"{address}/generate", json=body, timeout=300).json()
        assert [len(each["output_ids"]) for each in answers] == [60] * len(runs.PROMPTS)
        state = requests.get(f"{address}/server_info", timeout=60).json()["internal_states"][0]
        status = state["adaptive_verification"]
        assert status["active"]
        assert status["refits"] > 0
        assert not coefficients.exists()
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=STOP)
        saved = json.loads(coefficients.read_text())
        assert saved["intercepts"] == [status["coefficients"][name]["intercepts"] for name in ("sampled", "greedy")]
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
