"""The machine of machine/*.cpp from Python: compiled once, kept by what it was compiled from."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.native import compiled_library
from tests.ptx.program import Program
from tests.ptx.statements import PtxError

SOURCES = Path(__file__).parent / "machine"
FLAGS = ("-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
MOST_STEPS = 500_000_000
"""Instructions of warps that a launch may take."""


class Fault(RuntimeError):
    """A forbidden act of a kernel: an access out of bounds, a race, a barrier that some lanes miss."""


@dataclass(frozen=True)
class Grid:
    """A launch: how many blocks, and what it is given."""

    size: tuple[int, int, int]
    parameters: Sequence[int]
    """As bits; missing ones are 0."""
    allocations: Sequence[tuple[int, int]]
    """Address and bytes of each piece of memory that it may touch."""
    shared_bytes: int = 0
    races: bool = True
    """Whether accesses that nothing orders are faults."""
    seed: int = 0
    """Seed of the order of warps and blocks, and of when asynchronous copies land."""


class Machine:
    """A program, ready to be launched.

    Raises:
        PtxError: it has an instruction that the machine does not know.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._library = program, _library()
        text = program.text
        self._own = self._library.ptx_program(
            program.lines.encode(),
            program.num_registers,
            text.num_threads,
            program.special,
            program.parameters,
            len(text.parameters),
        )
        if self._own is None:
            raise PtxError(f"{text.name}: {self._message()}")

    def __del__(self) -> None:
        if getattr(self, "_own", None) is not None:
            self._library.ptx_free(self._own)

    def launch(self, grid: Grid) -> int:
        """Run all blocks; returns the number of steps.

        Raises:
            Fault: says what is wrong, where, and the instruction.
        """
        count = len(self._program.text.parameters)
        parameters = [*grid.parameters, *[0] * count][:count]
        spans = sorted(set(grid.allocations))
        steps = ctypes.c_uint64()
        done = self._library.ptx_launch(
            self._own,
            (ctypes.c_uint32 * 3)(*grid.size),
            (ctypes.c_uint64 * max(1, count))(*parameters),
            (ctypes.c_uint64 * max(1, len(spans)))(*(base for base, _ in spans)),
            (ctypes.c_uint64 * max(1, len(spans)))(*(size for _, size in spans)),
            len(spans),
            grid.shared_bytes,
            grid.races,
            grid.seed,
            MOST_STEPS,
            ctypes.byref(steps),
        )
        if not done:
            raise Fault(self._where(self._message()))
        return steps.value

    def _where(self, message: str) -> str:
        what, *rest = message.split("\n")
        if len(rest) != 2:
            return what
        statements = self._program.text.statements
        at = int(rest[0])
        text = statements[at].text if at < len(statements) else "end"
        return f"{what} [{self._program.text.name}, {rest[1]}, instruction {at}: {text}]"

    def _message(self) -> str:
        return self._library.ptx_message().decode()


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled_library("ptx", sorted(SOURCES.iterdir()), FLAGS, [_processor()])))
    library.ptx_program.restype = ctypes.c_void_p
    library.ptx_program.argtypes = [ctypes.c_char_p, *[ctypes.c_int] * 5]
    library.ptx_free.argtypes = [ctypes.c_void_p]
    library.ptx_message.restype = ctypes.c_char_p
    library.ptx_launch.restype = ctypes.c_bool
    library.ptx_launch.argtypes = [
        ctypes.c_void_p,
        *[ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64)],
        *[ctypes.POINTER(ctypes.c_uint64)] * 2,
        *[ctypes.c_int, ctypes.c_uint64, ctypes.c_bool, ctypes.c_uint64, ctypes.c_uint64],
        ctypes.POINTER(ctypes.c_uint64),
    ]
    return library


def _processor() -> bytes:
    """Description of this processor, on which `-march=native` depends."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name"))})).encode()
