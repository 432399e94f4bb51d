"""Hooks as data, and their way into SGLang's registry."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from av_triton_sglang import targets

AFTER, AROUND, BEFORE = "after", "around", "before"

_applied: set[str] = set()


class Hook(NamedTuple):
    target: str
    function: Callable[..., Any]
    kind: str  # AFTER, AROUND or BEFORE


def apply(hooks: Sequence[Hook]) -> None:
    """Put the hooks in force, once per process. Raises TargetError where SGLang does not apply one.

    SGLang's registry skips a target that is patched already: then another plug-in was there first.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    new = [hook for hook in hooks if hook.target not in _applied]
    taken = sorted({hook.target for hook in new} & HookRegistry._patched)
    if taken:
        raise targets.TargetError(
            f"another plug-in has hooked {', '.join(taken)}: adaptive verification cannot; limit SGLANG_PLUGINS to "
            "the plug-ins that you need"
        )
    for hook in new:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    HookRegistry.apply_hooks()
    targets.check_applied((hook.target for hook in new), HookRegistry._patched)
    _applied.update(hook.target for hook in new)
