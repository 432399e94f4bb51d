"""Compile the kernels for GPUs that are not here, and read what the compiler made of them.

The launches of the library are recorded, not described: under a stand-in Triton driver the library runs on CPU tensors;
every launch is noted with the types, constants and options that it passes, and dropped. What is compiled is what runs.
"""

import contextlib
import csv
import io
import itertools
import json
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import rich.box
import rich.console
import rich.progress
import rich.table
import torch
import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

import av_triton as av

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel has to keep to; spills and compare-and-swap loops are never allowed.

    registers: most 32-bit registers per thread, NVIDIA and AMD (vector). wide_loads: fewest loads of 16 bytes.
    atomics_64: fewest 64-bit atomic instructions. per_logit: most instructions per logit in the loop over the
    vocabulary, with one exp2 each; checked on NVIDIA, where one instruction is one issue slot.
    """

    registers: int
    wide_loads: int = 0
    atomics_64: int = 0
    per_logit: float = float("inf")


# By kernel. Registers: half of what a thread may have, so that two blocks share a multiprocessor; select and
# segmented_topk hold a whole batch in one block of up to 512 threads, which cannot have more. sample draws four random
# words at a time, and most registers hold them: one block of 256 threads a multiprocessor, from 129 registers on.
LIMITS = {
    "logit_max_kernel": Limits(registers=96, wide_loads=2, per_logit=10),
    "sample_kernel": Limits(registers=224, wide_loads=4),
    "acceptance_score_kernel": Limits(registers=64),
    "survival_kernel": Limits(registers=64),
    "segmented_topk_kernel": Limits(registers=128),
    "select_kernel": Limits(registers=128, atomics_64=4),
    "budget_kernel": Limits(registers=128),
    "accumulate_kernel": Limits(registers=128, atomics_64=6),
    "observe_kernel": Limits(registers=128, atomics_64=12),
    "refit_kernel": Limits(registers=128),
    "correct_kernel": Limits(registers=64, wide_loads=3),
    "learn_kernel": Limits(registers=128, wide_loads=1, atomics_64=6),
    "reset_kernel": Limits(registers=64),
}


class KernelCase(msgspec.Struct, frozen=True):
    """One kernel as launched: `signature` maps arguments to Triton types, `constants` and `attributes` are keyed by
    argument path, `options` are the launch options."""

    kernel: Any
    target: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def limits(self) -> Limits:
        """The limits in force; rows that start at any address cannot be read 16 bytes at a time."""
        limits = LIMITS[self.name]

        def given(pointer: str) -> bool:
            return bool(self.signature[pointer] != "constexpr")

        unaligned = "row_stride" in self.signature and ["tt.divisibility", 16] not in self.attributes.get(
            (self.kernel.arg_names.index("row_stride"),), []
        )
        if self.name == "logit_max_kernel":
            # The argmax takes one more, for the block in which a lane's maximum was met; the entropy, another running
            # sum, four, on sm_120 five; a token drawn before one load a row. They, and rows that start at any address,
            # take registers.
            argmax, entropy, drawn = given("tokens"), given("out_t") or given("entropies"), given("drawn")
            registers = 128 if argmax or entropy or drawn or unaligned else limits.registers
            per_logit = limits.per_logit + argmax + 5 * entropy + 0.5 * drawn
            limits = msgspec.structs.replace(limits, registers=registers, per_logit=per_logit)
        if self.name == "sample_kernel" and TARGETS[self.target].backend == "hip":
            # Loads of 8 bytes: with twice as many logits a thread AMD's compiler spills scalar registers.
            return msgspec.structs.replace(limits, wide_loads=0)
        if self.name == "correct_kernel":
            block = self.constants[(self.kernel.arg_names.index("BLOCK"),)]
            if self.signature["hidden"] == "constexpr" or block < 256:  # none to read, or less than 16 bytes a thread
                return msgspec.structs.replace(limits, wide_loads=0)
        if unaligned:
            return msgspec.structs.replace(limits, wide_loads=0, per_logit=float("inf"))
        return limits


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the compiler made of one case. Counts are instructions of the whole kernel, per thread.

    spilled: bytes (NVIDIA: stores and loads that ptxas reports) or registers (AMD). local: accesses to thread-local
    memory (LDL/STL; scratch_*). per_logit: instructions of the loop over the vocabulary per logit loaded in it, None
    for a kernel without such a loop.
    """

    kernel: str
    workload: str
    target: str
    registers: int
    spilled: int
    local: int
    wide_loads: int
    atomics_64: int
    atomics_32: int
    compare_and_swap: int
    exp2: int
    instructions: int
    per_logit: float | None
    exp2_per_logit: float | None
    shared: int
    seconds: float


class StandInDriver:
    """A Triton driver for a GPU that is not here: kernels compile for `target`, launches are dropped.

    `launched` is called with the kernel's name at every launch. Pass it to `triton.runtime.driver.set_active`.
    """

    _devices = itertools.count(1000)

    def __init__(self, target: str, launched: Callable[[str], None] = lambda name: None) -> None:
        self.target = TARGETS[target]
        # A device number of its own: kernels that are already compiled for another stand-in are not reused.
        self.device = next(self._devices)
        self.utils = self

        def launcher(source: Any, metadata: Any) -> Callable[..., None]:
            name = metadata.name
            return lambda *args, **kwargs: launched(name)

        self.launcher_cls = launcher

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[object, int, int, int, int]:
        return object(), 1, 0, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module: object) -> None:
        pass

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextlib.contextmanager
def stand_in(driver: StandInDriver) -> Iterator[None]:
    """Run the library's kernels through `driver`, on CPU tensors too; restores the driver and the backend."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so the kernels are Python functions and cannot be compiled: "
            "unset it before triton is imported"
        )
    active = triton.runtime.driver
    try:
        before = active.active
    except RuntimeError:  # no GPU
        before = None
    backend = os.environ.get("AV_TRITON_BACKEND")
    active.set_active(driver)
    os.environ["AV_TRITON_BACKEND"] = "triton"
    try:
        yield
    finally:
        active.set_active(before)
        del os.environ["AV_TRITON_BACKEND"]
        if backend is not None:
            os.environ["AV_TRITON_BACKEND"] = backend


def record(run: Callable[[], object], target: str) -> list[KernelCase]:
    """The kernels that `run()` launches, in order and without repetition, as they are launched on `target`.

    Nothing is compiled and nothing runs: outputs are left unwritten.
    """
    cases: dict[str, KernelCase] = {}

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = json.loads(compile["specialization_data"])["options"]
        case = KernelCase(
            kernel=fn.jit_function,
            target=target,
            signature=compile["signature"],
            constants=compile["constants"],
            attributes=compile["configs"][0],
            options={k: v for k, v in options.items() if isinstance(v, bool | int | float | str) and k != "arch"},
        )
        cases[f"{case.name} {key}"] = case
        return True  # do not compile: the launch is dropped

    with stand_in(StandInDriver(target)), triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = hook
        run()
    return list(cases.values())


def compile_case(case: KernelCase, workload: str = "") -> Report:
    """Compile one case with Triton and the assembler of its target; raises what the compiler raises."""
    start = time.perf_counter()
    source = ASTSource(case.kernel, case.signature, case.constants, case.attributes)
    target = TARGETS[case.target]
    compiled = triton.compile(source, target=target, options=case.options)
    itemsize = torch.finfo(getattr(torch, _TORCH[kind])).bits // 8 if (kind := case.signature.get("logits")) else 0
    if target.backend == "cuda":
        found = _read_nvidia(compiled.asm["cubin"], _ptxas_log(compiled.asm["ptx"], case), itemsize)
    else:
        found = _read_amd(compiled.asm["amdgcn"], itemsize)
    return Report(
        kernel=case.name,
        workload=workload,
        target=case.target,
        shared=compiled.metadata.shared,
        seconds=time.perf_counter() - start,
        **found,
    )


_TORCH = {"*fp32": "float32", "*bf16": "bfloat16", "*fp16": "float16"}
# "   /*0220*/   @!P0 LDG.E.128 R0, desc[UR8][R2.64] ;" and "   v_exp_f32_e32 v1, v2"
_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_AMDGCN = re.compile(r"^\s+([a-z]\w*)(.*)")
_LABEL = re.compile(r"^(\.L\w+):")


def _parse(text: str, instruction: re.Pattern[str]) -> tuple[list[tuple[str, str]], list[tuple[int, int]]]:
    """(instructions as (opcode, operands), loops as (first, last) indices: every jump back to an earlier label)."""
    instructions: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    loops = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif (match := instruction.match(line)) and match[1] != "NOP":
            instructions.append((match[1], match[2]))
            jump = re.search(r"\.L\w+", match[2]) if match[1].startswith(("BRA", "s_branch", "s_cbranch")) else None
            if jump and jump[0] in labels:
                loops.append((labels[jump[0]], len(instructions) - 1))
    return instructions, loops


def _per_logit(
    instructions: list[tuple[str, str]], loops: list[tuple[int, int]], width: Callable[[str], int], exp2: str, item: int
) -> tuple[float | None, float | None]:
    """Instructions and exp2 per logit, of the innermost loop that loads most; `width`: bytes that an opcode loads."""
    best = (0, 0, 0, 0)  # bytes, -length, length, exp2
    for first, last in loops if item else ():
        body = [opcode for opcode, _ in instructions[first : last + 1]]
        count = sum(opcode.startswith(exp2) for opcode in body)
        if count:
            best = max(best, (sum(map(width, body)), -len(body), len(body), count))
    logits = best[0] // item if item else 0
    return (best[2] / logits, best[3] / logits) if logits else (None, None)


def _sass_width(opcode: str) -> int:
    if not re.match(r"LDG(STS)?\b", opcode):
        return 0
    size = re.search(r"\.(256|128|64|[US]16|[US]8)\b", opcode)
    return {None: 4, "256": 32, "128": 16, "64": 8, "16": 2, "8": 1}[size and size[1].lstrip("US")]


def _amd_width(opcode: str) -> int:
    if not re.match(r"(global|buffer)_load_", opcode):
        return 0
    size = re.search(r"(dwordx4|b128|dwordx3|b96|dwordx2|b64|short|[ui]16|d16|byte|[ui]8)", opcode)
    known = {"dwordx4": 16, "b128": 16, "dwordx3": 12, "b96": 12, "dwordx2": 8, "b64": 8, "byte": 1, "u8": 1, "i8": 1}
    return 4 if size is None else known.get(size[1], 2)


def _ptxas_log(ptx: str, case: KernelCase) -> str:
    """What `ptxas -v` says when Triton assembles `ptx` with the flags of its version."""
    backend = make_backend(TARGETS[case.target])
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        triton.knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(ptx, {}, backend.parse_options(dict(case.options)), TARGETS[case.target].arch)
    return log.getvalue()


def _read_nvidia(cubin: bytes, log: str, itemsize: int) -> dict[str, Any]:
    """Read SASS and registers out of the cubin, spills out of the log of `ptxas -v` (STACK and LOCAL mislead)."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        usage = _tool(tools / "cuobjdump", "--dump-resource-usage", binary)
        sass = _tool(tools / "nvdisasm", "-c", binary)
    registers = re.search(r"REG:(\d+)", usage)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    instructions, loops = _parse(sass, _SASS)
    if registers is None or not spills or not instructions:
        raise RuntimeError(f"the output of cuobjdump, nvdisasm or ptxas has an unknown form: {usage!r} {log!r}")
    count = Counter(opcode for opcode, _ in instructions)
    atomics = {k: n for k, n in count.items() if re.match(r"(RED|ATOM)G?\b", k)}
    cas = sum(n for k, n in atomics.items() if "CAS" in k.split("."))
    wide = sum(n for k, n in atomics.items() if re.search(r"\.(64|S64|U64)\b", k) and "CAS" not in k.split("."))
    per_logit, exp2_per_logit = _per_logit(instructions, loops, _sass_width, "MUFU.EX2", itemsize)
    return {
        "registers": int(registers[1]),
        "spilled": sum(map(int, spills)),
        "local": sum(n for k, n in count.items() if re.match(r"(LDL|STL)\b", k)),
        "wide_loads": sum(n for k, n in count.items() if _sass_width(k) >= 16),
        "atomics_64": wide,
        "atomics_32": sum(atomics.values()) - wide - cas,
        "compare_and_swap": cas,
        "exp2": sum(n for k, n in count.items() if k.startswith("MUFU.EX2")),
        "instructions": len(instructions),
        "per_logit": per_logit,
        "exp2_per_logit": exp2_per_logit,
    }


def _read_amd(amdgcn: str, itemsize: int) -> dict[str, Any]:
    """Read the assembly and its metadata."""

    def metadata(name: str) -> int:
        value = re.search(rf"\.{name}:\s*(\d+)", amdgcn)
        if value is None:
            raise RuntimeError(f"the amdgcn metadata has no .{name}")
        return int(value[1])

    instructions, loops = _parse(amdgcn.split("s_endpgm\n\t.section")[0], _AMDGCN)
    count = Counter(opcode for opcode, _ in instructions)
    atomics = {k: n for k, n in count.items() if re.match(r"(global|flat|buffer)_atomic_", k)}
    cas = sum(n for k, n in atomics.items() if "cmpswap" in k)
    wide = sum(n for k, n in atomics.items() if re.search(r"_(x2|u64|i64|b64)$", k) and "cmpswap" not in k)
    per_logit, exp2_per_logit = _per_logit(instructions, loops, _amd_width, "v_exp_f32", itemsize)
    return {
        "registers": metadata("vgpr_count"),
        "spilled": metadata("vgpr_spill_count") + metadata("sgpr_spill_count"),
        "local": sum(n for k, n in count.items() if k.startswith("scratch_")),
        "wide_loads": sum(n for k, n in count.items() if _amd_width(k) >= 16),
        "atomics_64": wide,
        "atomics_32": sum(atomics.values()) - wide - cas,
        "compare_and_swap": cas,
        "exp2": sum(n for k, n in count.items() if k.startswith("v_exp_f32")),
        "instructions": len(instructions),
        "per_logit": per_logit,
        "exp2_per_logit": exp2_per_logit,
    }


def _tool(program: str | Path, *arguments: str | Path) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(program).name} failed: {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout + done.stderr


def check(report: Report, limits: Limits) -> list[str]:
    """What `report` violates, in words; empty if nothing."""
    found = []
    if report.spilled or report.local:
        found.append(f"spills: {report.spilled}, accesses to local memory: {report.local}")
    if report.registers > limits.registers:
        found.append(f"{report.registers} registers, at most {limits.registers}")
    if report.wide_loads < limits.wide_loads:
        found.append(f"{report.wide_loads} loads of 16 bytes, at least {limits.wide_loads}")
    if report.atomics_64 < limits.atomics_64:
        found.append(f"{report.atomics_64} 64-bit atomics, at least {limits.atomics_64}")
    if report.compare_and_swap:
        found.append(f"{report.compare_and_swap} compare-and-swap: an atomic became a loop")
    if limits.per_logit < float("inf") and TARGETS[report.target].backend == "cuda":
        if report.per_logit is None or report.exp2_per_logit is None:
            found.append("no loop over the vocabulary was found")
        else:
            if report.per_logit > limits.per_logit:
                found.append(f"{report.per_logit:.2f} instructions per logit, at most {limits.per_logit:g}")
            if report.exp2_per_logit > 1:
                found.append(f"{report.exp2_per_logit:.2f} exp2 per logit, at most 1")
    return found


class Workload(msgspec.Struct, frozen=True):
    """A use of the library that launches kernels. `quick`: one of the few that together launch every kernel."""

    name: str
    run: Callable[[], object]
    quick: bool = False


def workloads() -> list[Workload]:
    """Every kernel at the shapes, dtypes and options that change what is compiled."""
    return [*_op_workloads(), *_verifier_workloads()]


def _op_workloads() -> Iterator[Workload]:
    f32, i32, i64 = (partial(torch.empty, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        logits = torch.empty(8, 7, 129_280, dtype=dtype)
        odd = torch.empty(8, 50_257, dtype=dtype)
        yield Workload(f"logit_max {name}", partial(av.logit_max, logits))
        yield Workload(f"logit_max {name}, odd vocabulary", partial(av.logit_max, odd))
        yield Workload(f"logit_max_partial {name}, a quarter", partial(av.logit_max_partial, logits[..., :32_320]))
        yield Workload(f"logit_max_and_entropy {name}", partial(av.logit_max_and_entropy, logits))
        yield Workload(f"logit_max_and_entropy {name}, odd vocabulary", partial(av.logit_max_and_entropy, odd))
        yield Workload(f"entropy_partial {name}, a quarter", partial(av.entropy_partial, logits[..., :32_320]))
        yield Workload(f"score_logits {name}", partial(av.score_logits, logits, f32(1), f32(7), f32(8)))
        quick = dtype is torch.bfloat16
        yield Workload(
            f"sample_and_score {name}", partial(av.sample_and_score, logits[:, 0], i64(8), f32(8)), quick=quick
        )
        yield Workload(f"sample_and_score {name}, argmax", partial(av.sample_and_score, logits, None, f32(8, 7)))
    yield Workload("acceptance_score", partial(av.acceptance_score, f32(64, 7), f32(1), f32(7)), quick=True)
    for rows, positions in ((64, 7), (256, 7), (1024, 16)):
        label, quick = f"{rows} x {positions}", rows == 256
        table, length, budget = f32(rows, positions), i32(rows), i32(1)
        yield Workload(f"survival {label}", partial(av.survival, table, length), quick=quick)
        yield Workload(f"segmented_topk {label}", partial(av.segmented_topk, table, length, budget), quick=quick)
        cost = torch.empty(rows * positions + 1, dtype=torch.float64)
        for policy in ("argmax", "lookahead"):
            run = partial(av.choose_budget, table, length, cost, policy=policy)
            yield Workload(f"choose_budget {policy} {label}", run)
        run = partial(av.accumulate, table, length, length, f32(2), f32(2, positions), length)
        yield Workload(f"accumulate {label}", run, quick=quick)
        run = partial(av.accumulate, table, length, length, f32(2), f32(2, positions), length, acceptance=table)
        yield Workload(f"accumulate {label}, exact labels", run)
        yield Workload(
            f"refit {label}", partial(av.refit, i64(2, 6, positions), f32(2), f32(2, positions)), quick=quick
        )


def _verifier_workloads() -> Iterator[Workload]:
    variants: dict[str, dict[str, Any]] = {
        "earlier": {},
        "fixed": {"policy": "fixed", "fixed_budget": 8},
        "lookahead": {"policy": "lookahead", "offset_prior": 4.0},
        "autoregressive": {"autoregressive": True},
        "entropy and history": {"entropy": True, "history": True},
    }
    for rows, positions in ((8, 3), (64, 7), (256, 7), (1024, 7), (1024, 16)):
        for name, settings in variants.items():
            run = partial(_steps, rows, positions, av.Settings(**settings))
            quick = (rows, name) in ((256, "earlier"), (64, "lookahead"), (256, "entropy and history"))
            yield Workload(f"verifier {name} {rows} x {positions}", run, quick=quick)
    for rows, positions, d in ((1024, 7, 64), (256, 7, 576), (64, 16, 4096), (8, 3, 8192)):
        for prior in (None, 4.0):
            run = partial(_head_steps, rows, positions, d, av.Settings(offset_prior=prior))
            label = f"verifier head of {d}{', offsets' if prior else ''} {rows} x {positions}"
            yield Workload(label, run, quick=rows == 256 and prior is not None)


def _head_steps(rows: int, positions: int, d: int, settings: av.Settings) -> None:
    """Steps of a verifier with a head: a hidden state for each position, one for all, one position, none."""
    cost = av.CostTable(draft=[(1, 1.0), (rows, 2.0)], verify=[(1, 1.0), (16 * rows, 9.0)])
    verifier = av.AdaptiveVerifier(rows, positions, cost=cost, settings=settings, max_rows=rows, hidden_size=d)
    slots, length = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    logits = torch.empty(rows, positions, 32_000, dtype=torch.bfloat16)
    tokens = torch.zeros(rows, positions, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        hidden = torch.empty(rows, positions, d, dtype=dtype)
        verifier.score(logits, slots, tokens=tokens, hidden=hidden)
        verifier.score(logits, slots, tokens=tokens, hidden=hidden[:, 0].contiguous())
        verifier.sample(logits[:, 0].contiguous(), slots, position=0, hidden=hidden[:, 0].contiguous())
    verifier.score(logits, slots)
    verifier.observe(slots, length, length)
    verifier.observe(slots, length, length, acceptance=torch.ones(rows, positions))


def _steps(rows: int, positions: int, settings: av.Settings) -> None:
    """Steps of a verifier, block or autoregressive, with and without what is optional."""
    cost = av.CostTable(draft=[(1, 1.0), (rows, 2.0)], verify=[(1, 1.0), (16 * rows, 9.0)], captured=[1, 8, 64])
    verifier = av.AdaptiveVerifier(2 * rows, positions, cost=cost, settings=settings, max_rows=rows)
    slots = torch.arange(rows, dtype=torch.int32)
    length, segments = torch.zeros(rows, dtype=torch.int32), torch.tensor([0, rows], dtype=torch.int32)
    budget, teach = torch.zeros(1, dtype=torch.int32), torch.ones(rows, dtype=torch.bool)
    logits = torch.empty(rows, positions, 32_000, dtype=torch.bfloat16)
    acceptance = torch.ones(rows, positions)
    verifier.reset(slots, length)
    seeds, temperature = torch.zeros(rows, positions, dtype=torch.int64), torch.ones(rows)
    if settings.autoregressive:
        verifier.score(logits[:, 0].contiguous(), slots, position=0, temperature=1.0)
        verifier.sample(logits[:, 0].contiguous(), slots, seeds[:, 0].contiguous(), position=0, temperature=1.0)
        verifier.sample(logits[:, 0].contiguous(), slots, position=0)
    else:
        verifier.score(logits, slots, temperature=temperature)
        if settings.history:
            verifier.score(logits, slots, temperature=temperature, tokens=seeds)
        verifier.sample(logits, slots, seeds, temperature=temperature)
        verifier.sample(logits, slots)
    verifier.plan(slots)
    verifier.observe(slots, length)
    verifier.plan(slots, length, non_draft_tokens=rows, budget=budget, segments=segments)
    verifier.observe(slots, length, length, teach, acceptance)


def table(reports: list[tuple[Report, list[str]]]) -> rich.table.Table:
    """The reports as a table, violations in red."""
    columns = ("kernel", "workload", "target", "registers", "spills", "16 B loads", "atomics 64/32/CAS", "exp2")
    out = rich.table.Table(*columns, "instructions", "per logit", "", box=rich.box.SIMPLE_HEAD)
    for r, violations in reports:
        out.add_row(
            r.kernel,
            r.workload,
            r.target,
            str(r.registers),
            f"{r.spilled}" if r.local == 0 else f"{r.spilled} ({r.local} accesses)",
            str(r.wide_loads),
            f"{r.atomics_64}/{r.atomics_32}/{r.compare_and_swap}",
            str(r.exp2),
            str(r.instructions),
            "" if r.per_logit is None else f"{r.per_logit:.2f}",
            f"[red]{'; '.join(violations)}[/]" if violations else "[green]ok[/]",
        )
    return out


app = typer.Typer(add_completion=False)


@app.command()
def compile_command(
    target: Annotated[list[str] | None, typer.Option(help=f"One or more of {', '.join(TARGETS)}; default all.")] = None,
    kernel: Annotated[str, typer.Option(help="Only kernels or workloads that match this regular expression.")] = "",
    full: Annotated[
        bool, typer.Option("--full", help="Every shape, dtype and option, not one of each kernel.")
    ] = False,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the table to this file, too.")] = None,
) -> None:
    """Compile every kernel for a list of GPUs, none of which has to be here. Status 1 if a limit is violated."""
    console = rich.console.Console()
    unknown = set(target or ()) - set(TARGETS)
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {', '.join(TARGETS)}", param_hint="--target")
    try:
        cases = [
            (work.name, case)
            for work in workloads()
            if full or work.quick
            for name in target or TARGETS
            for case in record(work.run, name)
            if re.search(kernel, f"{case.name} {work.name}")
        ]
    except RuntimeError as error:
        console.print(f"[red]{error}[/]")
        raise typer.Exit(1) from error
    reports = []
    for name, case in rich.progress.track(cases, "compiling", console=console, transient=True):
        report = compile_case(case, name)
        reports.append((report, check(report, case.limits())))
    reports.sort(key=lambda pair: (pair[0].kernel, pair[0].workload, list(TARGETS).index(pair[0].target)))
    console.print(table(reports))
    if csv_file is not None:
        with csv_file.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*Report.__struct_fields__, "violations"])
            writer.writerows([*msgspec.structs.astuple(r), "; ".join(found)] for r, found in reports)
    violated = sum(bool(found) for _, found in reports)
    console.print(f"triton {triton.__version__}: {len(reports)} compiled, {violated} with a violation")
    if violated:
        raise typer.Exit(1)
