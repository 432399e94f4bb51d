"""Results of long benchmarks, kept so that a run that was stopped goes on where it was."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).parents[1]


def digest(inputs: Iterable[Path]) -> str:
    """Of the content of the input files, and of every file of av_triton."""
    parts = hashlib.sha256()
    for path in (*sorted((ROOT / "av_triton").rglob("*.py")), *inputs):
        parts.update(f"{path.name}\0".encode() + path.read_bytes())
    return parts.hexdigest()[:16]


class Store:
    """One file of JSON lines (key, value) in `folder`, named by the digest: an edit or other inputs start afresh.

    inputs: what the results are made of: data, and sources outside av_triton.
    """

    def __init__(self, folder: Path, inputs: Iterable[Path]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{digest(inputs)}.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.found: dict[str, Any] = {}
        for line in lines:
            try:
                key, value = msgspec.json.decode(line)
            except (msgspec.DecodeError, ValueError):
                continue  # the line that was being written when the run was stopped
            self.found[key] = value

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """What is stored under the key; made and stored where nothing is. As JSON gives it back in both cases."""
        if key not in self.found:
            line = msgspec.json.encode((key, make()))
            with self.path.open("ab") as file:
                file.write(line + b"\n")
            self.found[key] = msgspec.json.decode(line)[1]
        return self.found[key]
