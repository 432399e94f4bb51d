"""Results of long benchmarks, kept so that a run that was stopped goes on where it was."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import results

ROOT = Path(__file__).parents[1]


def digest(inputs: Iterable[Path]) -> str:
    """Of the content of the input files, of every file of av_triton, and of the versions."""
    parts = hashlib.sha256(results.versions().encode())
    for path in (*sorted((ROOT / "av_triton").rglob("*.py")), *inputs):
        parts.update(f"{path.name}\0".encode() + path.read_bytes())
    return parts.hexdigest()[:16]


def whole_lines(path: Path) -> list[bytes]:
    """Of a file that may not exist; a line that was being written when the run was stopped is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]


def append_line(path: Path, line: bytes) -> None:
    """Add a line to the file, after its last whole one."""
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line + b"\n")


class Store:
    """One file of JSON lines (key, value) in `folder`, named by the digest: an edit or other inputs start afresh.

    inputs: what the results are made of: data, and sources outside av_triton.
    """

    def __init__(self, folder: Path, inputs: Iterable[Path]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{digest(inputs)}.jsonl"
        self.found: dict[str, Any] = dict(map(msgspec.json.decode, whole_lines(self.path)))

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """What is stored under the key; made and stored where nothing is. As JSON gives it back in both cases."""
        if key not in self.found:
            line = msgspec.json.encode((key, make()))
            append_line(self.path, line)
            self.found[key] = msgspec.json.decode(line)[1]
        return self.found[key]
