"""docs/results.md: every benchmark rewrites its own section of it and leaves the others as they are."""

import datetime
import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/results.md"
# Their questions, in the order of the page.
SECTIONS = {
    "estimator": "which feature of the draft distribution predicts acceptance, on recorded drafts",
    "score": "what exact labels, an offset and a head add to that, on recorded drafts",
    "score_serving": "what the head is worth in throughput, simulated",
    "online": "how it learns while serving, against the released rule of vLLM 0.33.0, on recorded drafts",
    "simulation": "throughput at the step costs of large deployments, simulated",
    "serving": "throughput of SGLang's real engine, on two CPU cores",
}
PACKAGES = ("torch", "triton", "numpy", "sglang")
HEAD = """# Results

Every section is written by the command that it names; run it to rebuild the section with its figure.

{contents}
Nothing here was timed on a GPU, and every target is a model of 135M parameters: sizes do not carry over to larger
ones. Who decides whether to use this reads the sections on throughput first, and in them where ours loses.

| term | meaning |
| --- | --- |
| A, layer-skip | an autoregressive drafter: 20 of the target's 30 layers |
| B; block | block drafters: one of 18M parameters, with a weak confidence head; the demo's of 7M, without one |
| T | temperature of draft and target; 0 is greedy |
| article's score | sigmoid(w f + b_k), f = logit(q_max), learned from verdicts: the library without additions |
| peer, vLLM 0.33.0 | the rule of that release, restated from its source (`benchmarks/peers/adaptive_rule.py`) |
| exact labels | acceptance probabilities min(1, p/q) in place of verdicts |
| log-loss | nats per labelled draft, lower is better; "above X" and "- X": the difference to X, negative is better |
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
    found = sections_of(page)
    today = datetime.date.today().isoformat()
    found[name] = f"## {title}\n\n`{command}`, {today}; {versions()}.\n\n{body.strip()}\n"
    page.write_text(rendered(found))


def rendered(found: dict[str, str]) -> str:
    """The page of the sections that there are: head, contents, and each between its marks."""
    present = [name for name in SECTIONS if name in found]
    titles = {name: found[name].partition("\n")[0].removeprefix("## ") for name in present}
    contents = "".join(f"- [{titles[name]}](#{anchor(titles[name])}): {SECTIONS[name]}\n" for name in present)
    sections = (f"<!-- begin {name} -->\n{found[name]}<!-- end {name} -->\n" for name in present)
    return "\n".join([HEAD.format(contents=contents), *sections])


def anchor(title: str) -> str:
    """Of a heading, by GitHub's rule."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def sections_of(page: Path) -> dict[str, str]:
    text = page.read_text() if page.exists() else ""
    return dict(re.findall(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->\n", text, flags=re.DOTALL))
