"""Every kernel, compiled for GPUs that are not here: no spills, few registers, wide loads, native 64-bit atomics."""

import csv
import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch
import triton
from typer.testing import CliRunner

import av_triton.ops
from av_triton import aot
from tests.compiled.kernels import narrow_kernel, retrying_kernel, spilling_kernel

WORKLOADS = {work.name: work for work in aot.workloads()}
QUICK = [name for name, work in WORKLOADS.items() if work.quick]


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if work.quick else pytest.mark.full) for name, work in WORKLOADS.items()]
)
def test_kernels_keep_their_limits(name: str, target: str) -> None:
    cases = aot.record(WORKLOADS[name].run, target)
    assert cases
    found = {}
    for case in cases:
        report = aot.compile_case(case, name)
        if violations := aot.check(report, case.limits()):
            found[f"{case.name} {case.signature}"] = violations
    assert not found


def test_quick_workloads_launch_every_kernel() -> None:
    launched = {case.name for name in QUICK for case in aot.record(WORKLOADS[name].run, "sm_90")}
    modules = (importlib.import_module(f"av_triton.ops.{m.name}") for m in pkgutil.iter_modules(av_triton.ops.__path__))
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert launched == kernels == set(aot.LIMITS)


def compile_one(run: object, target: str) -> aot.Report:
    (case,) = aot.record(run, target)
    return aot.compile_case(case)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_gate_refuses_a_spilling_kernel(target: str) -> None:
    few = {"maxnreg": 32} if target.startswith("sm_") else {"waves_per_eu": 8}
    x = torch.empty(8192)
    report = compile_one(lambda: spilling_kernel[(1,)](x, x, N=8192, num_warps=1, **few), target)
    assert report.spilled > 0
    assert any("spills" in text for text in aot.check(report, aot.Limits(registers=255)))
    report = compile_one(lambda: spilling_kernel[(1,)](x, x, N=8192, num_warps=8), target)
    assert aot.check(report, aot.Limits(registers=255, wide_loads=1)) == []
    assert any("registers" in text for text in aot.check(report, aot.Limits(registers=8)))


@pytest.mark.parametrize("target", aot.TARGETS)
def test_gate_refuses_narrow_loads_and_a_second_exp2(target: str) -> None:
    logits, out = torch.empty(99_999, dtype=torch.bfloat16), torch.empty(1024)
    report = compile_one(lambda: narrow_kernel[(1,)](logits, out, 4096, N=1024), target)
    assert report.wide_loads == 0
    assert report.exp2_per_logit == 2
    found = " ".join(aot.check(report, aot.Limits(registers=255, wide_loads=1, per_logit=1.0)))
    assert "0 loads of 16 bytes" in found
    if target.startswith("sm_"):
        assert "instructions per logit" in found
        assert "exp2 per logit" in found


@pytest.mark.parametrize("target", aot.TARGETS)
def test_gate_refuses_a_compare_and_swap_loop(target: str) -> None:
    x = torch.empty(1, dtype=torch.int64)
    report = compile_one(lambda: retrying_kernel[(1,)](x, x), target)
    found = aot.check(report, aot.Limits(registers=255, atomics_64=1))
    assert any("compare-and-swap" in text for text in found)
    assert any("0 64-bit atomics" in text for text in found)


def test_command_writes_the_table(tmp_path: object) -> None:
    file = tmp_path / "table.csv"
    arguments = ["--target", "sm_90", "--target", "gfx942", "--kernel", "survival|reset", "--csv", str(file)]
    result = CliRunner().invoke(aot.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert f"triton {triton.__version__}: 8 compiled, 0 with a violation" in result.output
    rows = list(csv.DictReader(file.open()))
    assert {(row["kernel"], row["target"]) for row in rows} == {
        (kernel, target) for kernel in ("survival_kernel", "reset_kernel") for target in ("sm_90", "gfx942")
    }
    assert all(int(row["registers"]) > 0 and row["spilled"] == "0" and row["violations"] == "" for row in rows)


def test_command_fails_on_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aot.LIMITS, "survival_kernel", aot.Limits(registers=4))
    result = CliRunner().invoke(aot.app, ["--target", "sm_90", "--kernel", "survival"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "at most 4" in result.output


def test_command_refuses_an_unknown_target() -> None:
    result = CliRunner().invoke(aot.app, ["--target", "sm_70"])
    assert result.exit_code == 2
    assert "sm_70" in result.output


def test_command_refuses_the_interpreter() -> None:
    code = "from av_triton.aot import app; app(args=['--target', 'sm_90', '--kernel', 'survival'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unset it before triton is imported" in " ".join(done.stdout.split())
