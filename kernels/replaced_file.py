"""Files that are written whole or not at all, by any number of processes on any number of machines at once."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def unused_name(path: Path) -> Path:
    """A temporary name beside `path`. Random: containers that share a folder have processes of equal ids."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to be written by the block, which takes the place of `path` when the block ends.

    Raises:
        Exception: what the block raises; then `path` is what it was, and the temporary file is gone.
    """
    temporary = unused_name(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
