"""Which implementation runs: the torch reference or the Triton kernel."""

import functools
import os
from typing import Any

import torch
import triton

BACKENDS = ("auto", "torch", "triton")


def backend() -> str:
    """The value of AV_TRITON_BACKEND (default "auto": kernels on a GPU, torch references on the CPU)."""
    value = os.environ.get("AV_TRITON_BACKEND", "auto")
    if value not in BACKENDS:
        raise ValueError(f"AV_TRITON_BACKEND={value!r} is not a backend: set it to one of {', '.join(BACKENDS)}")
    return value


def use_triton(device: torch.device) -> bool:
    """Whether tensors on `device` take the Triton kernels; RuntimeError where they were asked for and cannot run."""
    choice = backend()
    if choice == "torch":
        return False
    if device.type == "cuda":
        return True
    if choice == "auto":
        return False
    if not triton.knobs.runtime.interpret and not _has_driver():
        raise RuntimeError(
            f"AV_TRITON_BACKEND=triton on {device.type} tensors needs the Triton interpreter: set TRITON_INTERPRET=1 "
            "before the first import of triton, or use AV_TRITON_BACKEND=auto"
        )
    return True


def _has_driver() -> bool:
    try:
        triton.runtime.driver.active.get_current_target()
    except RuntimeError:
        return False
    return True


def compiler() -> str:
    """What compiles the kernels here: "cuda", "hip" or "interpreter"."""
    return "interpreter" if triton.knobs.runtime.interpret else _compiler_of(triton.runtime.driver.active)


@functools.cache
def _compiler_of(driver: Any) -> str:
    return str(driver.get_current_target().backend)


def architecture() -> str:
    """The GPU that kernels are compiled for, as in `launches.json`: "sm_90", "gfx942", ... (of several the
    one that was current at the first call), or "interpreter"."""
    return "interpreter" if triton.knobs.runtime.interpret else _architecture_of(triton.runtime.driver.active)


@functools.cache
def _architecture_of(driver: Any) -> str:
    target = driver.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def register_ceiling() -> dict[str, int]:
    """Launch options of the kernels over a batch. Without a ceiling ptxas spills a few bytes at 48, 64 or 80 registers
    to fit one more block on a multiprocessor; AMD's compiler does not, and has no such option."""
    return {"maxnreg": 128} if compiler() == "cuda" else {}
