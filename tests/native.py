"""Libraries of the tests' own C++: compiled once, kept by what they were compiled from."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from wingbeat.kernels.disk_cache import cache_dir

COMPILERS = ("g++", "clang++", "c++")


def compiler() -> str | None:
    """$CXX, or the first of the usual compilers; None where there is none."""
    named = os.environ.get("CXX")
    return next((found for name in ([named] if named else COMPILERS) if (found := shutil.which(name))), None)


def compiled_library(
    name: str, sources: Sequence[Path], flags: Sequence[str], depends_on: Sequence[bytes] = ()
) -> Path:
    """The library's file.

    Args:
        depends_on: what else, beside sources and flags, makes another library.

    Raises:
        RuntimeError: there is no C++ compiler.
        subprocess.CalledProcessError: it does not compile.
    """
    parts = [*(file.read_bytes() for file in sources), " ".join(flags).encode(), *depends_on]
    path = cache_dir() / "kernels" / f"{name}-{hashlib.sha256(b''.join(parts)).hexdigest()[:24]}.so"
    if path.is_file():
        return path
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may compile it at once: whoever is last replaces a file by an equal one.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        units = [str(file) for file in sources if file.suffix == ".cpp"]
        subprocess.run([command, "-o", str(made), *units, *flags], check=True)
        os.replace(made, path)
    return path
