"""The flag: command line, `Engine` keywords, and the environment that carries both to the scheduler processes."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from av_triton import Settings

# What the launching process decided, as JSON; the scheduler processes inherit it.
LAUNCH = "AV_TRITON_SGLANG"
MODE = "SGLANG_RAGGED_VERIFY_MODE"

FLAG, CONFIG = "enable_adaptive_verification", "adaptive_verification_config"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`--adaptive-verification-config`: JSON text, or the path of a file with it.

    settings: of the library (`av_triton.Settings`): exploration, refit_interval, policy, minimum_gain and others.
    cost_table: a file that `av_triton.CostTable.save` or SGLang's SPS profiler wrote; None: the server measures its
        step costs when it starts, and keeps them for its next start.
    cost_cache: the folder where it keeps them; None: ~/.cache/av_triton.
    cost_context: tokens that the requests have before them when it measures, for reading them is part of a request's
        cost; best about as many as real requests have.
    coefficients: a file that fitted coefficients are loaded from at the start, if it exists, and saved to every
        `save_interval` decode steps and at shutdown.
    log_interval: decode steps between two lines in the log and two updates of /metrics; 0: none.
    dspark_head: what scores the drafts of a DSPARK checkpoint that has a confidence head of its own: the "head"
        (SGLang's own scheduler; start without the flag), or the "estimator".
    refine_interval: decode steps between two refinements of the step costs by the times of live steps; 0: never.
    cuda_graphs: let SGLang capture drafting and verification; written, and not yet run on a GPU.
    ragged_backends: further attention backends, registered by other plug-ins, that take ragged verify lengths.
    """

    settings: Settings = Settings()
    cost_table: str | None = None
    cost_cache: str | None = None
    cost_context: int = 512
    coefficients: str | None = None
    save_interval: int = 10_000
    log_interval: int = 200
    refine_interval: int = 1_000
    cuda_graphs: bool = False
    dspark_head: Literal["head", "estimator"] = "head"
    ragged_backends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("save_interval", "log_interval", "refine_interval"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: give a number of decode steps, or 0 for never")
        if self.cost_context < 1:
            raise ValueError(f"cost_context = {self.cost_context}: give a number of tokens, 1 or more")
        if self.settings.lag:
            raise ValueError(f"settings.lag = {self.settings.lag}: leave it out; it is that of SGLang's scheduler")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """config: the user's. algorithm: SGLang's resolved name, known once its arguments are checked."""

    config: Config
    algorithm: str | None = None
    set_mode: bool = False  # compact verification was selected by the flag, not by the user


class FlagError(ValueError):
    """An option of the plug-in that cannot be used as given; the message says what, its value and the remedy."""


def parse_config(text: str | None) -> Config:
    """From JSON text (it starts with a brace) or a file. Raises FlagError."""
    if text is None:
        return Config()
    source = "--adaptive-verification-config"
    if not text.lstrip().startswith("{"):
        source = text
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise FlagError(
                f"--adaptive-verification-config {text}: {error.strerror}; give JSON text or a file with it"
            ) from error
    try:
        return msgspec.json.decode(text, type=Config)
    except msgspec.DecodeError as error:
        names = ", ".join(Config.__struct_fields__)
        raise FlagError(f"{source}: {error}; the fields are {names}") from error


def current() -> Launch | None:
    """What this process was launched with; None: the flag is off."""
    text = os.environ.get(LAUNCH)
    return None if text is None else msgspec.json.decode(text, type=Launch)


def publish(launch: Launch) -> None:
    os.environ[LAUNCH] = msgspec.json.encode(launch).decode()


def turn_on(config: Config) -> None:
    """Select compact verification and tell the processes to come. Raises FlagError for another mode of the user's."""
    mode = os.environ.get(MODE)
    if mode not in (None, "compact"):
        raise FlagError(
            f"{MODE}={mode}: adaptive verification needs compact verification; unset the variable "
            "(the flag selects it), or leave out --enable-adaptive-verification"
        )
    os.environ[MODE] = "compact"
    publish(Launch(config=config, set_mode=mode is None))


def turn_off() -> None:
    """Take back what `turn_on` put into the environment, for another engine of this process."""
    launch = current()
    if launch is not None:
        del os.environ[LAUNCH]
        if launch.set_mode:
            os.environ.pop(MODE, None)


def add_arguments(result: None, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adaptive verification (av-triton)")
    group.add_argument(
        "--enable-adaptive-verification",
        action="store_true",
        help="Verify only the drafts that are worth it, for drafters without a confidence head.",
    )
    group.add_argument(
        "--adaptive-verification-config",
        metavar="JSON|FILE",
        help="Settings of adaptive verification as JSON text or a file: " + ", ".join(Config.__struct_fields__) + ".",
    )


def _switch(enabled: bool, config: str | None, activate: Callable[[], None]) -> None:
    turn_off()
    if not enabled:
        if config is not None:
            raise FlagError(
                f"--adaptive-verification-config {config}: it has no effect without --enable-adaptive-verification; "
                "give both or neither"
            )
        return
    turn_on(parse_config(config))
    activate()


def from_arguments(activate: Callable[[], None]) -> Callable[..., Any]:
    """A hook around `ServerArgs.from_cli_args`; `activate` registers what only the flag needs."""

    def hook(original: Callable[..., Any], cls: type, arguments: argparse.Namespace) -> Any:
        _switch(getattr(arguments, FLAG, False), getattr(arguments, CONFIG, None), activate)
        return original(cls, arguments)

    return hook


def from_keywords(original: Callable[..., Any], activate: Callable[[], None]) -> Callable[..., Any]:
    """In place of `Engine.server_args_class`. The configuration may be a dict as well.

    SGLang loads plug-ins inside `Engine.__init__`, where it is too late to hook that function itself.
    """

    def server_args(**keywords: Any) -> Any:
        enabled, config = keywords.pop(FLAG, False), keywords.pop(CONFIG, None)
        if isinstance(config, dict):
            config = msgspec.json.encode(config).decode()
        _switch(enabled, config, activate)
        return original(**keywords)

    return server_args
