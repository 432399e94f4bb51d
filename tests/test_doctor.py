import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from av_triton import cli, doctor

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def versions(monkeypatch, **change):
    real = importlib.metadata.version

    def version(package):
        if package in change:
            if change[package] is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return change[package]
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)


def find(findings, what):
    return next(finding for finding in findings if finding.what == what)


def test_the_ranges_are_those_of_the_package():
    wanted = {f"{name}>={least}" + (f",<{below}" if below else "") for name, (least, below) in doctor.SUPPORTED.items()}
    assert set(PROJECT["dependencies"]) == wanted
    assert PROJECT["requires-python"] == f">={doctor.PYTHON}"
    assert PROJECT["optional-dependencies"]["sglang"] == [f"sglang=={doctor.SGLANG}"]
    assert set(doctor.EXTRAS) | {"sglang", "dev"} == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.14.1+cpu", (2, 14, 1)), ("3.10.0rc1", (3, 10, 0)), ("2.11.0a0+git1234", (2, 11, 0)), ("1", (1,)), ("x", ())],
)
def test_release_numbers(text, numbers):
    assert doctor._release(text) == numbers


@pytest.mark.parametrize(
    ("package", "version", "state", "remedy"),
    [
        ("torch", "2.14.1+cu130", "ok", ""),
        ("torch", "2.10.3", "broken", "install 2.11 or later, before 2.15"),
        ("torch", "2.15.0", "note", "install 2.11 or later"),
        ("torch", None, "broken", "pip install 'torch>=2.11'"),
        ("triton", "3.9.9", "ok", ""),
        ("triton", "3.10.0", "note", "before 3.10"),
        ("numpy", "2.5.0", "note", "interpreter fails with numpy 2.5"),
        ("msgspec", "9.0", "ok", ""),
    ],
)
def test_versions_are_judged_with_the_remedy(monkeypatch, package, version, state, remedy):
    versions(monkeypatch, **{package: version})
    finding = find(doctor._versions(), package)
    assert finding.state == state
    assert remedy in finding.remedy


def test_a_backend_that_does_not_exist_is_broken(monkeypatch):
    monkeypatch.setenv("AV_TRITON_BACKEND", "cuda")
    finding = find(doctor._backend(), "backend")
    assert finding.state == "broken"
    assert "cuda" in finding.found


def test_the_backend_in_force_is_named(monkeypatch):
    monkeypatch.delenv("AV_TRITON_BACKEND", raising=False)
    assert "torch references on cpu" in find(doctor._backend(), "backend").found


def test_an_extra_names_what_it_lacks(monkeypatch):
    monkeypatch.setitem(doctor.EXTRAS, "metrics", ("prometheus_client", "no_such_module"))
    finding = find(doctor._extras(), "extra metrics")
    assert finding.state == "absent"
    assert "no_such_module" in finding.found
    assert "av-triton[metrics]" in finding.remedy


class Plugin:
    name, value = "adaptive_verification", "av_triton_sglang:register"


@pytest.mark.parametrize(
    ("version", "plugins", "allowed", "expected"),
    [
        (None, [], "", [("SGLang", "absent")]),
        ("0.5.23", [], "", [("SGLang", "ok"), ("SGLang plug-in", "absent")]),
        ("0.5.24", [Plugin], "", [("SGLang", "note"), ("SGLang plug-in", "ok")]),
        ("0.5.23", [Plugin], "other", [("SGLang", "ok"), ("SGLang plug-in", "note")]),
        ("0.5.23", [Plugin], "other,adaptive_verification", [("SGLang", "ok"), ("SGLang plug-in", "ok")]),
    ],
)
def test_sglang_and_its_plug_in(monkeypatch, version, plugins, allowed, expected):
    versions(monkeypatch, sglang=version)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    assert [(finding.what, finding.state) for finding in doctor._sglang()] == expected


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch):
    def fail():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(doctor, "_devices", fail)
    findings = doctor.diagnose()
    assert any(f.state == "broken" and "driver too old" in f.found for f in findings)
    assert find(findings, "Python").state == "ok"


def test_doctor_passes_where_the_tests_run():
    result = CliRunner().invoke(cli.application(), ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in ("torch", "triton", "backend", "self-test on cpu", "SGLang", "av_triton works here"):
        assert text in result.output


def test_doctor_fails_only_when_the_core_cannot_work(monkeypatch):
    findings = [doctor.Finding("SGLang", "not [installed]", "absent"), doctor.Finding("triton", "3.1", "broken", "[x]")]
    monkeypatch.setattr(cli, "diagnose", lambda: findings)
    result = CliRunner().invoke(cli.application(), ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "cannot work here: triton" in result.output
    assert "not [installed]" in result.output
    findings.pop()
    assert CliRunner().invoke(cli.application(), ["doctor"]).exit_code == 0


def test_version(monkeypatch):
    versions(monkeypatch, **{"av-triton": "1.2.3"})
    result = CliRunner().invoke(cli.application(), ["--version"])
    assert (result.exit_code, result.output) == (0, "1.2.3\n")


def test_a_command_whose_packages_are_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(cli.DELEGATED, "demo", ("no_such_module", "demo", ""))
    result = CliRunner().invoke(cli.application(), ["demo", "--batch", "4"])
    assert result.exit_code == 1
    assert "no_such_module is missing: pip install 'av-triton[demo]'" in result.output


def test_arguments_and_help_reach_the_delegated_command(monkeypatch, tmp_path):
    (tmp_path / "some_command.py").write_text(
        "import typer\napp = typer.Typer()\n@app.command()\ndef run(batch: int = 1): print('batch', batch)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.DELEGATED, "demo", ("some_command", "demo", ""))
    runner = CliRunner()
    assert "batch 7" in runner.invoke(cli.application(), ["demo", "--batch", "7"]).output
    assert "--batch" in runner.invoke(cli.application(), ["demo", "--help"], env={"COLUMNS": "200"}).output
    assert runner.invoke(cli.application(), ["demo", "--no-such"]).exit_code == 2


def test_without_typer_the_entry_point_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"typer is missing: pip install 'av-triton\[cli\]'"):
        cli.main()
