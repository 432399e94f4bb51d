"""SGLang's engine on a GPU: drafting and ragged verification eagerly and replayed from CUDA graphs.

SGLang has to be installed beside the project, and the GPU one that its fa3 attention takes (sm_80, sm_90).
"""

import multiprocessing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

runs = pytest.importorskip("tests.integrations.sglang.runs")
jobs = pytest.importorskip("tests.integrations.sglang.cpu_engine.jobs")

pytestmark = [pytest.mark.gpu, pytest.mark.sglang]

LENGTH = 120
DEVICE = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "fa3", "disable_overlap_schedule": False}
# In bfloat16 another order of summation moves a logit by up to this much.
TIE = 0.1


@pytest.fixture
def installed(cuda: Any) -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")


def call(function: Any, **arguments: Any) -> Any:
    """In a process of its own, which takes the engine's with it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, kwds=arguments)


def generate(engine: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True}
    return call(jobs.generate, engine=engine | DEVICE, prompts=runs.PROMPTS, sampling=sampling)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("captured", [False, True], ids=("eager", "graphs"))
@pytest.mark.parametrize("family", runs.FAMILIES.values(), ids=runs.FAMILIES)
def test_text_is_that_of_plain_decoding(
    installed: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    family: Any,
    captured: bool,
) -> None:
    monkeypatch.setenv("SGLANG_LOG_DECODE_GRAPH_KEY", "1")
    plain_engine = runs.plain_engine(family, tmp_path)
    adaptive_engine = runs.engine(family, tmp_path, adaptive=True, cuda_graphs=captured)
    plain = generate(plain_engine)
    capfd.readouterr()
    adaptive = generate(adaptive_engine | {"disable_cuda_graph": not captured})
    replays = [line for line in "".join(capfd.readouterr()).splitlines() if "Decode graph replay: worker=" in line]
    assert any("worker=target" in line for line in replays) == captured
    if family.algorithm in ("DSPARK", "DFLASH"):
        assert any("worker=draft" in line for line in replays) == captured
    status = adaptive["adaptive_verification"]
    assert status["active"]
    assert status["backend"] == "triton"
    assert sum(status["trimmed"]) > 0
    assert sum(status["labelled"]) > 0
    for prompt, want, got in zip(runs.PROMPTS, plain["tokens"][0], adaptive["tokens"][0], strict=True):
        at = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)
        if at is not None:
            pair = [want[at], got[at]]
            first, second = call(
                jobs.next_logprobs, engine=plain_engine | DEVICE, context=prompt + want[:at], tokens=pair
            )
            assert abs(first - second) < TIE, (prompt, at, pair)
