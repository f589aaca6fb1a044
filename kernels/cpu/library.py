"""The C++ of this folder as a shared library: compiled once for a machine, kept in a folder, opened by ctypes.

It includes nothing of torch or Python, so that compiling takes seconds.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from wingbeat.kernels.disk_cache import cache_dir

SOURCES = Path(__file__).parent
MAIN = "native.cpp"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=fast")
ARCHITECTURE = "WINGBEAT_CPU_ARCH"
"""Names, in the compiler's words, an older processor whose instructions alone are used, so that tests run on a newer
one as they would there: `x86-64-v3` has AVX2, `x86-64` no AVX. The processor at hand where it is not set."""
WIDE = ("native", "x86-64-v4")
"""Architectures that have what the processor has of AVX-512."""
TIMEOUT_S = 300
LARGEST_MATRIX = 1 << 23
"""Numbers of a matrix up to which narrow registers multiply as quickly as torch: with AVX2, rounds of 1 and 16 rows
were slower through layers of 2048 x 8192 by this library, and no slower through layers of 1024 x 3072."""


class NoLibraryError(RuntimeError):
    """The library is not to be had; one line that says why."""


def open_library(folder: Path) -> ctypes.CDLL:
    """The library of these sources for this machine, compiled into `folder` unless it is there.

    Raises:
        NoLibraryError: there is no compiler, it fails, or the folder cannot be written.
    """
    try:
        path = folder / f"{fingerprint()}.so"
        if not path.is_file():
            _compile(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"{type(error).__name__}: {error}") from error


def why_missing() -> str | None:
    """Reason, in one line, why this machine has no library; None once it is compiled."""
    try:
        open_library(kept_in())
    except NoLibraryError as error:
        return str(error)
    return None


def kept_in() -> Path:
    """The folder of the libraries of this machine."""
    return cache_dir() / "kernels"


@cache
def largest_matrix() -> float:
    """Numbers of a matrix that should be multiplied by this library; of larger ones torch's products are quicker."""
    return float("inf") if "avx512f" in _processor() and _architecture() in WIDE else LARGEST_MATRIX


def compiler() -> str | None:
    """$CXX, or the first of the usual compilers; None where there is none."""
    named = os.environ.get("CXX")
    return next((found for name in ([named] if named else COMPILERS) if (found := shutil.which(name))), None)


def _compile(path: Path) -> None:
    command = compiler()
    if command is None:
        raise NoLibraryError(f"no C++ compiler ({', '.join(COMPILERS)}, or $CXX)")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may start at once: whoever is last to finish replaces a file by an equal one.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        included = [word for header in _of_parts() for word in ("-include", str(header))]
        arguments = [command, *FLAGS, _processor_flag(), *included, "-o", str(made), str(SOURCES / MAIN)]
        try:
            result = subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NoLibraryError(f"{command} took more than {TIMEOUT_S} s") from error
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or [f"exit {result.returncode}"]
            raise NoLibraryError(f"{command}: {lines[0]}")
        made.replace(path)


def _of_parts() -> list[Path]:
    """Sources of the parts of the kernels that are there, each with functions of its own."""
    return sorted(SOURCES.parent.glob("*/native.h"))


def _architecture() -> str:
    return os.environ.get(ARCHITECTURE) or "native"


def _processor_flag() -> str:
    return f"-march={_architecture()}" if platform.machine() in ("x86_64", "AMD64") else f"-mcpu={_architecture()}"


def fingerprint() -> str:
    """Of the sources, the flags and the processor: a home folder may be shared by machines."""
    parts = [file.read_bytes() for file in (*sorted(SOURCES.glob("*.h")), *_of_parts(), SOURCES / MAIN)]
    parts += [" ".join((*FLAGS, _processor_flag())).encode(), platform.machine().encode(), _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """What the processor is, and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
