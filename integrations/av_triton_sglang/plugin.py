"""Entry point `sglang.srt.plugins`: SGLang calls `load` once in each of its processes.

Without the flag only the command line and `Engine`'s keywords are hooked. With it, the launching process checks what it
was asked for when SGLang checks its own arguments, hooks the drafter's family, and tells the scheduler processes
through the environment.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from av_triton.snapshot import Snapshot
from av_triton_sglang import acceptance, costs, dflash, dspark, eagle, flag, hooks, status, step, supports, targets
from av_triton_sglang.hooks import AFTER, AROUND, Hook

FAMILIES: Mapping[str, tuple[tuple[Hook, ...], Mapping[str, str]]] = {
    "DSPARK": (dspark.HOOKS, targets.DSPARK),
    "DFLASH": (dflash.HOOKS, targets.DFLASH),
    "EAGLE": (eagle.HOOKS, targets.EAGLE),
    "EAGLE3": (eagle.HOOKS, targets.EAGLE),
    "STANDALONE": (eagle.HOOKS, targets.EAGLE),
}

COMMON = (
    *acceptance.HOOKS,
    Hook(targets.STATE, status.add_to_internal_state, AFTER),
    Hook(targets.SHUTDOWN, step.save_at_shutdown, AFTER),
)

_loaded = False


def load() -> None:
    global _loaded
    if _loaded:
        return
    _loaded = True
    _register(
        Hook("sglang.srt.server_args.ServerArgs.add_cli_args", flag.add_arguments, AFTER),
        Hook("sglang.srt.server_args.ServerArgs.from_cli_args", flag.from_arguments(activate), AROUND),
    )
    _accept_keywords()
    launch = flag.current()
    if launch is not None and launch.algorithm is not None:
        try:
            hook_family(launch.algorithm)
        except Exception as error:
            # SGLang logs an exception of a plug-in and goes on; a server that half works is worse than none.
            raise SystemExit(f"adaptive verification: {error}") from error


def _register(*wanted: Hook) -> None:
    """For SGLang to apply when all plug-ins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in wanted:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def _accept_keywords() -> None:
    """`Engine.server_args_class` is a class, which SGLang's registry can only replace everywhere."""
    from sglang.srt.entrypoints.engine import Engine

    Engine.server_args_class = staticmethod(flag.from_keywords(Engine.server_args_class, activate))


def activate() -> None:
    """The flag is on in the launching process: check the arguments once SGLang has resolved them."""
    hooks.apply([Hook("sglang.srt.server_args.ServerArgs.check_server_args", check, AFTER)])


def check(result: None, server_args: Any) -> None:
    """A hook after `ServerArgs.check_server_args`. Raises with the reasons where adaptive verification cannot work."""
    from sglang.srt.arg_groups.overrides import resolving_view

    launch = flag.current()
    if launch is None:
        return
    arguments = resolving_view(server_args)
    supports.check(arguments, launch.config)
    algorithm = arguments.speculative_algorithm
    hook_family(algorithm)
    check_files(launch.config, arguments)
    flag.publish(msgspec.structs.replace(launch, algorithm=algorithm))


def check_files(config: flag.Config, arguments: Any) -> None:
    """Raises ValueError where a file that the scheduler processes will read does not fit."""
    costs.load(config, arguments)
    if config.coefficients and Path(config.coefficients).exists():
        positions = arguments.speculative_num_draft_tokens - 1
        Snapshot.read(Path(config.coefficients), positions, list(config.settings.strata))


def hook_family(algorithm: str) -> None:
    """Raises TargetError where the installed SGLang is another than the one the hooks were written for."""
    family, expected = FAMILIES[algorithm]
    targets.check({**targets.COMMON, **expected})
    hooks.apply([*family, *COMMON])
