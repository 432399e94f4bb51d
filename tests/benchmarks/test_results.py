"""The results page and the bootstrap intervals."""

import re

import numpy as np
import pytest

from benchmarks import intervals, results


def test_a_section_replaces_itself_alone(tmp_path):
    page = tmp_path / "results.md"
    results.publish("serving", "Serving", "make b", "old", page)
    results.publish("estimator", "Estimator", "make a", "first", page)
    before = page.read_text()
    results.publish("serving", "Serving", "make b", "new", page)
    assert page.read_text() == before.replace("old", "new")
    assert before.index("## Estimator") < before.index("## Serving")
    assert "`make a`" in before
    assert f"torch {results.version('torch')}" in before


def test_the_contents_link_the_sections_that_are_there(tmp_path):
    page = tmp_path / "results.md"
    results.publish("online", "Learning online, against the peer's rule", "make b", "text", page)
    results.publish("simulation", "At scale, simulated", "make c", "text", page)
    links = re.findall(r"^- \[.*?\]\(#(.*?)\):", page.read_text(), flags=re.MULTILINE)
    assert links == ["learning-online-against-the-peers-rule", "at-scale-simulated"]


def test_the_page_in_the_repository_is_what_would_be_written():
    assert results.PAGE.read_text() == results.rendered(results.sections_of(results.PAGE))


def test_the_command_says_what_was_not_as_usual():
    usual = {"seeds": 3, "steps": 400, "variants": True}
    assert results.command("simulate", usual, usual) == "make simulate"
    given = {"seeds": 5, "steps": 400, "variants": False}
    assert results.command("simulate", usual, given) == 'make simulate ARGS="--seeds 5 --no-variants"'


def test_an_unknown_section_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'other' is no section"):
        results.publish("other", "", "", "", tmp_path / "results.md")


def test_a_table_is_markdown():
    assert results.table(("a", "b"), [("x", 1)]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(80), 5)
    covered = 0
    for trial in range(200):
        values = rng.normal(size=80).repeat(5) + rng.normal(size=400)
        interval = intervals.of_mean(values, cluster, resamples=500, seed=trial)
        covered += interval.low <= 0 <= interval.high
    assert 180 <= covered <= 199  # 95 % of 200, give or take three deviations


def test_whole_clusters_are_drawn():
    values, cluster = np.array([0.0, 1.0, 0.0, 1.0]), np.array([3, 3, 5, 5])
    same = intervals.of(lambda at: float(values[at].mean()), cluster)
    assert (same.value, same.low, same.high) == (0.5, 0.5, 0.5)
    mean = intervals.of_mean(values, np.array([0, 1, 0, 1]))
    assert (mean.low, mean.high) == (0.0, 1.0)
