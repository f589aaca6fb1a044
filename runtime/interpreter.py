"""Runs this Python for child processes with this process's import paths, without the working directory."""

import os
import sys
from pathlib import Path


def module_command(module: str, *arguments: object) -> list[str]:
    """Command that runs a module; plain `python -m` would import from the working directory, perhaps a checkpoint."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def module_environment(**more: str) -> dict[str, str]:
    """Environment of such a process: this process's, with its import paths, and `more`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path), **more}
