"""Writing a file whole or not at all."""

import contextlib
import os
import secrets
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces `path` by `data`: a reader, or a crash at any moment, sees the old content or the new one.

    A temporary file in the same folder is written, synced and renamed. Raises OSError as `open` would.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself survives a power cut only when the folder is synced; not every file system offers that.
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
