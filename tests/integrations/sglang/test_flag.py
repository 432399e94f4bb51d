"""The flag: its configuration, the environment that carries it, and what SGLang's own parser makes of it."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from av_triton import Settings
from av_triton_sglang import flag
from av_triton_sglang.flag import LAUNCH, MODE, Config, FlagError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (LAUNCH, MODE):
        monkeypatch.delenv(name, raising=False)


def test_configuration_is_text_or_a_file(tmp_path: Path) -> None:
    text = '{"settings": {"exploration": 0.05, "refit_interval": 16}, "log_interval": 0}'
    path = tmp_path / "config.json"
    path.write_text(text)
    want = Config(settings=Settings(exploration=0.05, refit_interval=16), log_interval=0)
    assert flag.parse_config(text) == want
    assert flag.parse_config(str(path)) == want
    assert flag.parse_config(None) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"costs": "x"}', r"unknown field `costs`.*the fields are settings, cost_table"),
        ('{"settings": {"exploration": 2}}', r"Settings.exploration = 2.*give a share"),
        ('{"cost_context": 0}', r"cost_context = 0: give a number of tokens"),
        ('{"log_interval": -1}', r"log_interval = -1: give a number of decode steps"),
        ('{"dspark_head": "mine"}', r"dspark_head"),
        ('{"log_interval": ', r"--adaptive-verification-config: .*truncated"),
        ("nowhere.json", r"nowhere.json: No such file.*give JSON text or a file"),
    ],
)
def test_a_bad_configuration_says_what_and_why(text: str, message: str) -> None:
    with pytest.raises(FlagError, match=message):
        flag.parse_config(text)


def test_the_flag_selects_compact_verification_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(flag.os, "environ", environment)
    flag.turn_on(Config())
    assert environment[MODE] == "compact"
    assert flag.current() == flag.Launch(config=Config(), set_mode=True)
    flag.turn_off()
    assert environment == {}


def test_a_mode_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {MODE: "compact"}
    monkeypatch.setattr(flag.os, "environ", environment)
    flag.turn_on(Config())
    flag.turn_off()
    assert environment == {MODE: "compact"}


def test_another_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "static")
    with pytest.raises(FlagError, match=f"{MODE}=static.*unset the variable"):
        flag.turn_on(Config())
    assert flag.current() is None


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flag.os, "environ", {})
    parser = ArgumentParser()
    flag.add_arguments(None, parser)
    activated: list[bool] = []
    hook = flag.from_arguments(lambda: activated.append(True))

    def original(cls: type, arguments: Namespace) -> str:
        return "arguments"

    assert hook(original, object, parser.parse_args([])) == "arguments"
    assert flag.current() is None
    assert not activated
    given = ["--enable-adaptive-verification", "--adaptive-verification-config", json.dumps({"log_interval": 7})]
    assert hook(original, object, parser.parse_args(given)) == "arguments"
    launch = flag.current()
    assert launch is not None
    assert launch.config.log_interval == 7
    assert activated
    with pytest.raises(FlagError, match="no effect without --enable-adaptive-verification"):
        hook(original, object, parser.parse_args(given[1:]))
    assert flag.current() is None


def test_engine_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flag.os, "environ", {})
    make = flag.from_keywords(lambda **keywords: keywords, lambda: None)
    config = {"log_interval": 7}
    assert make(model_path="m", enable_adaptive_verification=True, adaptive_verification_config=config) == {
        "model_path": "m"
    }
    launch = flag.current()
    assert launch is not None
    assert launch.config.log_interval == 7
    assert make(model_path="m") == {"model_path": "m"}
    assert flag.current() is None
