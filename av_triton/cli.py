"""`av-triton`: the command line."""

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Annotated, Any

from av_triton.doctor import Finding, diagnose

if TYPE_CHECKING:
    import typer

STYLE = {"ok": "green", "note": "yellow", "absent": "dim", "broken": "bold red"}

# Sub-commands that live elsewhere and are imported only when called: (module with a typer `app`, extra, help).
DELEGATED = {
    "demo": ("av_triton.demo.cli", "demo", "Decode real prompts with plain, fixed and adaptive verification."),
    "bench": ("av_triton.tune", "cli", "Find the launch parameters that this GPU wants; write a launch table."),
    "compile": ("av_triton.aot", "cli", "Compile every kernel for a list of GPUs; show registers, spills and loads."),
}


def main() -> None:
    """The entry point; exits with the command's status."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"av-triton: {error.name} is missing: pip install 'av-triton[cli]'")
    application()(prog_name="av-triton")


def application() -> "typer.Typer":
    import typer

    text = "Adaptive verification for speculative decoding."
    app = typer.Typer(no_args_is_help=True, add_completion=False, help=text)

    def show_version(wanted: bool) -> None:
        if wanted:
            print(importlib.metadata.version("av-triton"))
            raise typer.Exit

    version = typer.Option("--version", is_eager=True, callback=show_version, help="Show the version and exit.")

    @app.callback()
    def options(version: Annotated[bool, version] = False) -> None:
        pass

    @app.command()
    def doctor() -> None:
        """Versions, device and backend; what is supported, what is not and why. Status 1 if the core cannot work."""
        findings = diagnose()
        show(findings)
        if any(finding.state == "broken" for finding in findings):
            raise typer.Exit(1)

    for name, (module, extra, text) in DELEGATED.items():
        # Arguments and --help pass through, so that nothing heavy is imported before the command is known.
        settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        app.command(name, help=text, context_settings=settings)(_delegate(name, module, extra))
    return app


def _delegate(name: str, module: str, extra: str) -> Any:
    import typer

    def command(context: typer.Context) -> None:
        try:
            target = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("av_triton"):
                raise
            print(f"av-triton {name}: {error.name} is missing: pip install 'av-triton[{extra}]'", file=sys.stderr)
            raise typer.Exit(1) from error
        target.app(args=context.args, prog_name=f"av-triton {name}")

    return command


def show(findings: list[Finding]) -> None:
    """The report as a table on standard output, and its conclusion."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "found", "state", "what to do", title="av-triton doctor", title_justify="left")
    for finding in findings:
        state = Text(finding.state, STYLE[finding.state])
        table.add_row(Text(finding.what), Text(finding.found), state, Text(finding.remedy))
    console = Console()
    console.print(table)
    broken = [finding.what for finding in findings if finding.state == "broken"]
    if broken:
        console.print(f"[bold red]av_triton cannot work here[/]: {', '.join(broken)}")
    else:
        console.print("[green]av_triton works here[/]")
