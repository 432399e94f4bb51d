"""The estimator's report: its features, its held-out fits, its tables, its command, and the page in docs/."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import results
from benchmarks.traces import cut, features, quality, report
from benchmarks.traces.features import Drafts, Fit, Group

TRACE = report.DATA / "A_gsm8k_T0.npz"


def rows_of(markdown: str, part: str) -> list[list[str]]:
    """The cells of the table under a heading, without its two head lines."""
    lines = markdown.split(f"#### {part}\n\n", 1)[1].split("\n\n", 1)[0].strip().splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_the_page_says_what_the_traces_say():
    group = Group.of(Drafts.join([Drafts.read(TRACE)]))
    rebuilt = rows_of(report.features_table([group]).markdown(), group.name)
    written = rows_of(results.PAGE.read_text(), group.name)
    assert len(written) == 6
    number = r"-?\d+\.\d+"
    for ours, theirs in zip(rebuilt, written, strict=True):
        assert [re.sub(number, "", cell) for cell in ours] == [re.sub(number, "", cell) for cell in theirs]
        found, wanted = (np.array(re.findall(number, " ".join(row)), float) for row in (ours, theirs))
        assert found == pytest.approx(wanted, abs=1.1e-4), ours[0]


def draw(n=6000, slope=0.6, intercepts=(0.4, -0.3, -1.0), seed=0, own=(0.0, 0.0, 0.0), temperature="1") -> Drafts:
    """Synthetic drafts of 60 prompts; `own` is added to the slope of each position."""
    rng = np.random.default_rng(seed)
    f, k = rng.normal(0.5, 2, n), rng.integers(0, 3, n)
    p = quality.sigmoid((slope + np.array(own)[k]) * f + np.array(intercepts)[k])
    columns = {"f": f, "entropy": 2 - 0.3 * f + rng.normal(0, 0.1, n)}
    observed = (rng.random(n) < p).astype(float)
    return Drafts("pair", "gsm8k", temperature, 3, k, observed, rng.integers(0, 60, n), columns)


@pytest.fixture
def few_resamples(monkeypatch):
    monkeypatch.setattr(features, "RESAMPLES", 40)


def test_features_are_what_their_names_say():
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 4, (500, 5))
    q = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    drawn, top = rng.integers(0, 5, 500), q.max(1)
    q_sampled = q[np.arange(500), drawn]
    columns = {
        "f": np.log(top / (1 - top)),
        "is_top1": (q.argmax(1) == drawn).astype(float),
        # Half precision, as committed: nearly 0 for a token that is nearly certain.
        "log_q_sampled": np.log(q_sampled).astype(np.float16).astype(float),
    }
    wanted = {
        "logit(q_max)": np.log(top / (1 - top)),
        "log q_max": np.log(top),
        "-log(-log q_max)": -np.log(-np.log(top)),
        "q_max, raw": top,
        "logit(q_sampled)": np.log(q_sampled / (1 - q_sampled)),
        "-log(-log q_sampled)": -np.log(-np.log(q_sampled)),
    }
    assert top.max() > 0.9999
    for feature in features.FEATURES:
        if feature.name in wanted:
            assert feature.of(columns) == pytest.approx(wanted[feature.name], abs=0.02), feature.name
            assert feature.lossless == ("sampled" not in feature.name)


def test_a_prompt_is_never_judged_by_a_fit_that_has_seen_it():
    drafts = draw(600)
    prompts = (drafts.cluster[:, None] == np.arange(60)).astype(float)
    assert (features.held_out(prompts, drafts) == 0.5).all()


def test_fits_and_intervals_of_known_drafts(few_resamples):
    for temperature, first in (("0.7", 0.4), ("1", 1.4)):
        fit = Fit.of(draw(intercepts=(first, -0.3, -1.0), temperature=temperature), seed=0)
        group, workload, labels, entropy, *coefficients = fit.row()
        assert (group, workload, labels) == (f"pair, T = {temperature}", "gsm8k", 6000)
        for interval, truth in zip((entropy, *coefficients), (1.85, 0.6, first, -0.3, -1.0), strict=True):
            assert interval.low < interval.value < interval.high
            assert interval.value == pytest.approx(truth, abs=0.15)
            assert 0 < interval.high - interval.low < 0.4
    starved = draw(60)
    position = np.where(np.arange(60) < 50, 0, 1)
    assert Fit.of(replace(starved, position=position), seed=0).row()[6:] == ("", "")


def test_correlation_of_intercepts_and_entropy(few_resamples):
    def fit(shift: float, seed: int) -> Fit:
        drafts = draw(3000, intercepts=(0.5 - shift, 0.0, 0.0), seed=seed)
        return Fit.of(replace(drafts, columns=drafts.columns | {"entropy": drafts.columns["entropy"] + shift}), seed)

    rows = features.correlation_rows([fit(shift, seed) for seed, shift in enumerate((0.0, 0.7, 1.4, 2.1))])
    assert [row[:2] for row in rows] == [("pair, T = 1", 4), ("every pair, T = 1", 4)]
    assert rows[0][2].value == pytest.approx(-1, abs=0.03)
    assert features.correlation_rows([fit(0.0, 0), fit(1.0, 1)]) == []


def test_the_shared_slope_costs_where_slopes_differ(few_resamples):
    _, *alike = Group.of(draw()).sharing_row()
    _, *unlike = Group.of(draw(own=(0.8, 0.0, -0.5))).sharing_row()
    assert abs(alike[5].value) < 0.002
    assert alike[5].low <= 0.001
    assert unlike[5].low > 0.01
    assert unlike[2].high < 0
    for row in (alike, unlike):
        assert row[2].value == pytest.approx(row[0].value - row[1].value)
        assert row[5].value == pytest.approx(row[3].value - row[4].value)


def test_rows_say_what_the_traces_lack(few_resamples):
    plain = {row[1]: row for row in Group.of(draw(1000)).feature_rows()}
    assert plain["top-2 margin"][2:] == ("no column gap", "", "", "", "")
    assert plain["logit(q_sampled), *not lossless*"][2] == "no column log_q_sampled, is_top1"
    assert not any(features.HEAD in name for name in plain)
    greedy = {row[1] for row in Group.of(draw(1000, temperature="0")).feature_rows()}
    assert not any("q_sampled" in name for name in greedy)


def test_a_head_is_compared_at_every_position(few_resamples):
    drafts = draw(3000)
    drafts.columns["conf"] = np.where(drafts.position == 0, 50.0 * drafts.observed, 0.0)
    rows = {row[1]: row[2:] for row in Group.of(drafts).position_rows()}
    assert list(rows) == ["1", "2", "3", "all", "all but 1"]
    assert rows["1"][3].value == 1.0
    assert rows["1"][4].low > 0
    assert rows["2"][3].value == 0.5
    assert rows["2"][4].high < 0
    assert sum(rows[name][0] for name in "123") == rows["all"][0] == 3000
    assert rows["all but 1"][0] == 3000 - rows["1"][0]


def test_labels_end_at_the_first_rejection_and_rows_stand_in_for_prompts(tmp_path):
    with np.load(TRACE) as file:
        columns = {name: file[name] for name in file.files if name != "prompt"}
    np.savez(tmp_path / TRACE.name, **columns)
    rows, prompts = Drafts.read(tmp_path / TRACE.name), Drafts.read(TRACE)
    accepted = quality.load(TRACE).accepted
    assert len(rows.observed) == np.minimum(accepted + 1, 7).sum()
    assert rows.observed.sum() == accepted.sum()
    assert set(rows.cluster) == set(range(48))
    with np.load(TRACE) as file:
        assert set(prompts.cluster) == set(file["prompt"].tolist())
    with pytest.raises(ValueError, match="rename it to PAIR_WORKLOAD"):
        Drafts.read(tmp_path / "x.npz")


def test_a_workload_without_a_name_and_a_trace_of_few_prompts(tmp_path):
    with np.load(TRACE) as file:
        columns = {name: file[name][file["row"] < 3] for name in file.files}
    columns["workload"] = np.full_like(columns["workload"], 9)
    np.savez(tmp_path / "x_other_T0.npz", **columns)
    assert Drafts.read(tmp_path / "x_other_T0.npz").workload == "9"
    with pytest.raises(ValueError, match="x, T = 0 has 3 prompts, 5 folds need as many"):
        report.read(tmp_path)


def test_a_cut_keeps_whole_steps():
    with np.load(TRACE) as file:
        columns = {name: file[name] for name in file.files} | {"ctx": np.zeros_like(file["step"])}
    found = cut.cut(columns, 4)
    assert set(found) == {*quality.COLUMNS, *quality.EXTRA}
    assert set(found["step"]) == set(range(0, columns["step"].max() + 1, 4))
    assert found["f"].dtype == np.float32
    assert found["f"] == pytest.approx(columns["f"][columns["step"] % 4 == 0], rel=5e-4)


def test_command(tmp_path, monkeypatch, few_resamples):
    data, more = tmp_path / "data", tmp_path / "more"
    for folder, name in ((data, "block_gsm8k_T1.npz"), (more, "third_gsm8k_T0.npz")):
        folder.mkdir()
        (folder / name).symlink_to(TRACE)
    monkeypatch.setattr(report, "DATA", data)
    app = Typer()
    app.command()(report.main)

    def run(*folders: Path) -> tuple[int, str]:
        options = ["--out", tmp_path / "out", "--page", tmp_path / "results.md"]
        result = CliRunner().invoke(app, list(map(str, (*folders, *options))))
        return result.exit_code, result.output

    status, output = run(more)
    assert status == 0, output
    page = (tmp_path / "results.md").read_text()
    assert "block, T = 1" in page
    assert "third" not in page
    assert "Features: third, T = 0" in output
    assert (tmp_path / "results-estimator.png").read_bytes()[:4] == b"\x89PNG"
    with (tmp_path / "out" / "features.csv").open() as stream:
        head, first, *_ = csv.reader(stream)
    assert head[:5] == ["traces", "feature", "AUC", "AUC low", "AUC high"]
    assert first[:2] == ["block, T = 1", "logit(q_max)"]
    assert float(first[3]) < float(first[2]) < float(first[4])
    assert (tmp_path / "out" / f"{tmp_path.name}-more" / "coefficients.csv").exists()
    (tmp_path / "empty").mkdir()
    status, output = run(tmp_path / "empty")
    assert status == 2
    assert "has no .npz traces" in output
