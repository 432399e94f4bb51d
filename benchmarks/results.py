"""docs/results.md: every benchmark rewrites its own section of it and leaves the others as they are."""

import datetime
import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/results.md"
SECTIONS = ("estimator", "score", "online", "simulation", "serving")
PACKAGES = ("torch", "triton", "numpy", "sglang")
HEAD = """# Results

Every section is written by the command that it names; run it to rebuild the section with its figure.
"""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown; all but the first column to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def command(target: str, usual: dict[str, object], given: dict[str, object]) -> str:
    """`make target`, with the options whose values are not the usual ones (False: `--no-NAME`)."""
    changed = {name: value for name, value in given.items() if value != usual[name]}
    options = [f"--no-{name}" if value is False else f"--{name} {value}" for name, value in changed.items()]
    return f"make {target}" + (f' ARGS="{" ".join(options)}"' if options else "")


def publish(name: str, title: str, command: str, body: str, page: Path = PAGE) -> None:
    """Put a section into the page, with its command, the versions and today's date. `name`: one of SECTIONS."""
    if name not in SECTIONS:
        raise ValueError(f"{name!r} is no section of the results: give one of {', '.join(SECTIONS)}")
    found = dict(re.findall(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->\n", _text(page), flags=re.DOTALL))
    today = datetime.date.today().isoformat()
    found[name] = f"## {title}\n\n`{command}`, {today}; {versions()}.\n\n{body.strip()}\n"
    sections = (f"<!-- begin {each} -->\n{found[each]}<!-- end {each} -->\n" for each in SECTIONS if each in found)
    page.write_text("\n".join([HEAD, *sections]))


def _text(page: Path) -> str:
    return page.read_text() if page.exists() else ""
