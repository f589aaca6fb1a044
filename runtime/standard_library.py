"""The corpus that every machine has: Python's own source. Loads no torch."""

import sysconfig
from pathlib import Path


def stdlib_root() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))
