"""The code in the documents runs as it is printed, and defaults are those of the code."""

import json
import re
from pathlib import Path

import msgspec
import torch

from av_triton import AdaptiveVerifier, Settings
from av_triton_sglang.flag import Config

DOCS = Path(__file__).parents[1]


def snippet(page: str, number: int = 0) -> str:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)[number]


def test_the_loop_of_the_user_guide_runs_learns_saves_and_counts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(snippet("docs/user-guide.md"), names)
    verifier = names["verifier"]
    assert isinstance(verifier, AdaptiveVerifier)
    status, counters = verifier.status(), verifier.counters()
    assert (status.active, status.steps, status.refits) == (True, 400, 12)
    assert status.additions == ("head, sampled",)
    # Where it learned from anything else than what it drafted, the expected number would be another.
    labelled, hits = counters["labelled"].sum(), counters["labelled_accepted"].sum()
    assert abs(counters["expected_accepted"].sum() / 2**20 - hits) < 0.05 * labelled
    assert 'av_triton_steps_total{model="toy"} 400.0' in capsys.readouterr().out
    again = AdaptiveVerifier(max_slots=32, num_draft_positions=4, cost=names["cost"], hidden_size=16)
    again.load("learned.json")
    assert again.coefficients().intercepts == verifier.coefficients().intercepts


def test_the_steps_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cost.json").write_text('{"draft": [[1, 1.0]], "verify": [[1, 5.0], [40, 60.0]]}')
    code = snippet("README.md").replace('"cuda"', '"cpu"').replace("while serving", "for _ in range(3)")
    slots = torch.arange(8)
    given = {"slots": slots, "new_slots": slots, "accepted": torch.ones(8, dtype=torch.int32), "temperature": 0.7}
    exec(code, names := given | {"draft_logits": torch.randn(8, 4, 50)})
    assert names["verifier"].status().steps == 3
    assert names["plan"].cu_verify[-1] == names["plan"].admitted.sum() + 8


def defaults(page: str, heading: str) -> dict[str, object]:
    """Of the tables below the heading: names in the first column, the default in the second, as JSON or in words."""
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    words = {"none": None, "`False`": False, "`True`": True}
    found: dict[str, object] = {}
    for names, value in re.findall(r"^\| (`.+?) \| (.+?) \|", section, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = words[value] if value in words else json.loads(value.strip("`"))
    return found


def test_the_defaults_of_the_user_guide_are_those_of_settings():
    found = defaults("docs/user-guide.md", "Settings")
    assert len(found) == 10
    assert found == {name: getattr(Settings(), name) for name in found}


def test_the_options_of_the_plug_in_are_all_documented_with_their_defaults():
    found = defaults("docs/sglang.md", "Options")
    assert found == msgspec.to_builtins(Config()) | {"settings": {}, "ragged_backends": []}
