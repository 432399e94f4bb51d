"""What the steady-state tests see a step with: a GPU that is not there, and a log of what torch is asked to do."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import triton
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from av_triton.aot import StandInDriver, stand_in

# Reads of values or memory that dispatch nothing for a tensor that already lies on the CPU, and what makes tensors of
# Python numbers. `aten.lift_fresh` counts as a view but stands for a new tensor.
HOST_READS = {"cpu", "to", "tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}
HOST_WRITES = {"tensor", "as_tensor", "cuda", "pin_memory"}


class GPU:
    """Counts of a stand-in sm_90: `launches` and `compilations`, by kernel name."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.compilations: Counter[str] = Counter()

    def clear(self) -> None:
        self.launches.clear()
        self.compilations.clear()


@contextlib.contextmanager
def gpu() -> Iterator[GPU]:
    """Kernels on CPU tensors are compiled for sm_90, counted and dropped."""
    counts = GPU()

    def launched(name: str) -> None:
        counts.launches[name] += 1

    def compiled(*, fn: Any, **_: Any) -> None:
        counts.compilations[fn.jit_function.__name__] += 1

    with stand_in(StandInDriver("sm_90", launched)), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = compiled
        yield counts


class _Aten(TorchDispatchMode):
    def __init__(self, log: Counter[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view or "lift_fresh" in str(func):
            self.log[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _Python(TorchFunctionMode):
    def __init__(self, log: Counter[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HOST_READS | HOST_WRITES:
            self.log[resolve_name(func) or func.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def torch_log() -> Iterator[Counter[str]]:
    """Everything but views that torch is asked for inside: allocations, arithmetic, copies, and reads by the host."""
    log: Counter[str] = Counter()
    with _Aten(log), _Python(log):
        yield log
