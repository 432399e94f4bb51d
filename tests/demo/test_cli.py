"""Bad input is refused with the place and the remedy; the figures are what their names say."""

import math
from types import SimpleNamespace

import pytest
import torch
import typer

from av_triton.demo import cli, report
from av_triton.demo.drafters import BlockDrafter
from av_triton.demo.engine import Labelled
from tests.demo import tiny


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"\n  \n", "holds no prompt; write one a line"),
        ("a.txt", b"\xff\xfe\x00", "cannot be read"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', r"a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n\n{"text": "x"}\n', r'line 3: no "prompt"'),
        ("a.jsonl", b"[1]\n", r'line 1: no "prompt"'),
    ],
)
def test_bad_prompt_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(typer.BadParameter, match=message):
        cli.read_prompts(path)


def test_missing_prompt_file(tmp_path):
    with pytest.raises(typer.BadParameter, match="cannot be read"):
        cli.read_prompts(tmp_path / "absent.txt")


def test_prompt_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "one\\nmore"}\n{"prompt": "two"}\n')
    assert cli.read_prompts(tmp_path / "a.txt") == ["one", "two"]
    assert cli.read_prompts(tmp_path / "b.jsonl") == ["one\nmore", "two"]


def test_shipped_prompts():
    assert len(cli.read_prompts(cli.shipped("prompts", "prompts.jsonl"))) == 96
    assert "MIT" in cli.shipped("prompts", "README.md").read_text()


def test_too_long_a_prompt_is_refused():
    class Tokenizer:
        def apply_chat_template(self, messages, **options):
            return messages[0]["content"]

        def __call__(self, text, **options):
            return {"input_ids": text.split()}

    assert cli.encode(Tokenizer(), ["a b"]) == [["a", "b"]]
    with pytest.raises(typer.BadParameter, match="prompt 2 has 300 tokens, at most 256"):
        cli.encode(Tokenizer(), ["a", "a " * 300])


def test_wrong_drafter_weights_are_refused(tmp_path):
    model = tiny.target()
    with pytest.raises(FileNotFoundError, match=r"config.json not found; give a folder in DFlash's form"):
        BlockDrafter.load(tmp_path, model, model.head, 64)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ValueError, match="has hidden_size 64, the target has 32"):
        BlockDrafter.load(tmp_path, model, model.head, 64)


def arm_with(labelled):
    return SimpleNamespace(labelled=labelled)


def test_calibration_error():
    predicted = torch.tensor([0.1] * 100 + [0.9] * 100)
    observed = torch.tensor([True] * 30 + [False] * 70 + [True] * 90 + [False] * 10)
    mixed = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    order = torch.cat([mixed, mixed + 100])
    labels = report.Labels(arm_with([Labelled(torch.zeros(200, dtype=torch.long), predicted[order], observed[order])]))
    assert labels.error() >= 0.1
    assert sum(n for _, _, n in labels.bins()) == 200
    perfect = report.Labels(arm_with([Labelled(torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([False, True]))]))
    assert perfect.error() == 0
    assert math.isnan(report.Labels(arm_with([])).error())


def test_ratio_is_the_median_over_rounds():
    fast = SimpleNamespace(rounds=[(10, 1.0), (10, 1.0), (10, 9.0)])
    slow = SimpleNamespace(rounds=[(10, 2.0), (20, 4.0), (10, 9.0), (10, 1.0)])
    assert report.ratio(fast, slow) == 2
