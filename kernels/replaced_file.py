"""Atomic file replacement, safe between processes and between machines that share a folder."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def unused_name(path: Path) -> Path:
    """Temporary name beside `path`; random, because process ids collide between containers that share a folder."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file for the block to write, which replaces `path` when the block ends.

    Raises:
        Exception: whatever the block raises; `path` is then unchanged and the temporary file is deleted.
    """
    temporary = unused_name(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
