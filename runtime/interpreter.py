"""Starts child processes with this Python interpreter and this process's import paths, except the working directory."""

import os
import sys
from pathlib import Path


def module_command(module: str, *arguments: object) -> list[str]:
    """Returns a command that runs a module.

    A plain `python -m` would import from the working directory, which may be a checkpoint.
    """
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def module_environment(**more: str) -> dict[str, str]:
    """Returns the environment for a command of `module_command`.

    The environment consists of this process's variables, its import paths, and `more`.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path), **more}
