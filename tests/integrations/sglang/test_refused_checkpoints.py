"""What only a checkpoint tells, and is refused when it is loaded: each with its message."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from av_triton_sglang import dflash, eagle, flag
from av_triton_sglang.flag import Config, FlagError, Launch

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed: run make test-sglang"),
]


@pytest.fixture(autouse=True)
def the_flag_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag.LAUNCH, "")  # so that what `publish` puts there is taken back
    flag.publish(Launch(config=Config(), algorithm="DFLASH"))


def model_runner(linear_attention: bool) -> SimpleNamespace:
    """With a target of full attention, or one whose layers alternate with linear attention."""
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig
    from transformers import LlamaConfig

    config = Qwen3NextConfig() if linear_attention else LlamaConfig()
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=config, linear_attn_registry_result=None))


def dflash_worker(linear_attention: bool = False, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"_is_domino": False, "lilicorr": None} | changes, model_runner=model_runner(linear_attention)
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"_is_domino": True}, "a Domino head drafts by a recurrent rollout whose logits it does not keep"),
        ({"lilicorr": object()}, "a LiLiCorr head's drafts are not supported"),
        ({"linear_attention": True}, "a target with linear attention is not supported: its state is committed for one"),
    ],
    ids=["Domino", "LiLiCorr", "linear attention"],
)
def test_dflash_checkpoints(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FlagError) as error:
        dflash.refuse(None, dflash_worker(**changes))
    message = str(error.value)
    assert message.startswith(f"this DFLASH drafter cannot use adaptive verification: {reason}")
    assert message.endswith("; leave out the flag")


def test_other_dflash_checkpoints_pass() -> None:
    dflash.refuse(None, dflash_worker())


def test_a_target_with_linear_attention_under_the_eagle_worker() -> None:
    target = SimpleNamespace(model_runner=model_runner(linear_attention=True))
    with pytest.raises(FlagError) as error:
        eagle.build(None, SimpleNamespace(target_worker=target))
    assert str(error.value).startswith("a target with linear attention is not supported with the EAGLE worker")
    assert str(error.value).endswith("; leave out --enable-adaptive-verification")
