"""Builds the C++ of this folder as a shared library, once per machine, caches the file, and opens it with ctypes.

The sources include neither torch nor Python headers, so that compilation takes seconds.
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
"""Environment variable with a target architecture in the compiler's notation (`x86-64-v3` has AVX2, `x86-64` has no
AVX). The variable restricts the library to the instructions of an older processor, so that tests on a newer machine can
cover these instructions. Unset means this processor."""
WIDE = ("native", "x86-64-v4")
"""Architectures that use AVX-512 if the processor has it."""
TIMEOUT_S = 300
LARGEST_MATRIX = 1 << 23
"""Maximum number of elements of a matrix that this library multiplies as fast as torch on a processor without AVX-512.
Measured with AVX2: with layers of 2048 x 8192, rounds of 1 and 16 rows were slower than in torch; with layers of 1024 x
3072 the rounds were not slower.
"""


class NoLibraryError(RuntimeError):
    """The library is unavailable; the message is one line with the reason."""


def open_library(folder: Path) -> ctypes.CDLL:
    """Opens the library of these sources for this machine, compiling it into `folder` if it is missing.

    Raises:
        NoLibraryError: there is no compiler, the compiler fails, or the folder is not writable.
    """
    try:
        path = folder / f"{fingerprint()}.so"
        if not path.is_file():
            _compile(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"{type(error).__name__}: {error}") from error


def why_missing() -> str | None:
    """Returns the reason why this machine has no library, in one line.

    None if the library opens. Compiles if needed.
    """
    try:
        open_library(kept_in())
    except NoLibraryError as error:
        return str(error)
    return None


def kept_in() -> Path:
    """Folder that caches the libraries."""
    return cache_dir() / "kernels"


@cache
def largest_matrix() -> float:
    """Maximum number of elements of a matrix to multiply with this library; torch is faster for larger matrices."""
    return float("inf") if "avx512f" in _processor() and _architecture() in WIDE else LARGEST_MATRIX


def compiler() -> str | None:
    """Returns the path of $CXX or else of the first usual compiler found; None if there is none."""
    named = os.environ.get("CXX")
    return next((found for name in ([named] if named else COMPILERS) if (found := shutil.which(name))), None)


def _compile(path: Path) -> None:
    command = compiler()
    if command is None:
        raise NoLibraryError(f"no C++ compiler ({', '.join(COMPILERS)}, or $CXX)")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may compile at once. Each process replaces the file when it finishes; all of these files are
    # equal.
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
    """C++ sources of the installed optional parts, which define functions of their own."""
    return sorted(SOURCES.parent.glob("*/native.h"))


def _architecture() -> str:
    return os.environ.get(ARCHITECTURE) or "native"


def _processor_flag() -> str:
    return f"-march={_architecture()}" if platform.machine() in ("x86_64", "AMD64") else f"-mcpu={_architecture()}"


def fingerprint() -> str:
    """Hash of sources, flags and processor. The processor is included, because machines with different processors may
    share a home folder.
    """
    parts = [file.read_bytes() for file in (*sorted(SOURCES.glob("*.h")), *_of_parts(), SOURCES / MAIN)]
    parts += [" ".join((*FLAGS, _processor_flag())).encode(), platform.machine().encode(), _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """Identity and features of the processor, from /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
