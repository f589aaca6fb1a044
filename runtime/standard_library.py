"""Finds a corpus that every machine has: the source of Python's standard library. This module imports no torch."""

import sysconfig
from pathlib import Path


def stdlib_root() -> Path:
    """Returns the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))
