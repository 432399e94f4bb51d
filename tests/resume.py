"""Pytest plugin of `make test-full`: `--resume` leaves out the tests that have passed on the same sources.

What passed is kept in `.resume/<digest>.txt`, the digest over the content of every source file and over the
versions of torch, triton and numpy; an edit or an upgrade starts afresh.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SOURCES = ("av_triton", "integrations", "tests", "benchmarks")


def digest(root: Path) -> str:
    parts = hashlib.sha256()
    files = [root / "pyproject.toml"]
    for folder in SOURCES:
        files += (p for p in (root / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    for path in sorted(files):
        parts.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    for name in ("torch", "triton", "numpy"):
        parts.update(f"{name} {version(name)}".encode())
    return parts.hexdigest()[:16]


class Resume:
    """store: the file that what passes is added to; None in a worker of pytest-xdist."""

    def __init__(self, store: Path | None, passed: set[str]):
        self.store, self.passed = store, passed
        self.called: set[str] = set()

    def pytest_configure_node(self, node: Any) -> None:
        # Every worker must collect the same tests, also one that is started anew while the store grows.
        node.workerinput["resume_passed"] = sorted(self.passed)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        again = [item for item in items if item.nodeid in self.passed]
        if again:
            items[:] = [item for item in items if item.nodeid not in self.passed]
            config.hook.pytest_deselected(items=again)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.store is None or not report.passed:
            return
        if report.when == "call":
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self.called:
            with self.store.open("a") as lines:
                lines.write(report.nodeid + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.passed:
            terminalreporter.write_line(f"resumed: {len(self.passed)} tests have passed before on the same sources")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", action="store_true", help="leave out tests that passed on the same sources")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--resume"):
        return
    if hasattr(config, "workerinput"):
        resume = Resume(None, set(config.workerinput["resume_passed"]))
    else:
        store = config.rootpath / ".resume" / f"{digest(config.rootpath)}.txt"
        store.parent.mkdir(exist_ok=True)
        resume = Resume(store, set(store.read_text().splitlines()) if store.exists() else set())
    config.pluginmanager.register(resume, "resume")
