"""This Python for a child process, which imports what this process does and nothing from the working directory."""

import os
import sys
from pathlib import Path


def module_command(module: str, *arguments: object) -> list[str]:
    """Command that runs a module; `python -m` alone would import from the working directory: a checkpoint, perhaps."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def module_environment(**more: str) -> dict[str, str]:
    """Environment of such a process: this one's with its import paths, and `more`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path), **more}
