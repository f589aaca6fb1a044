"""Triton's launches on CPU tensors: each kernel is compiled for a GPU that is not there, and its PTX executed."""

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.ptx.machine import Grid, Machine
from tests.ptx.program import Program

_PACKED = {"fp32": "<f", "f32": "<f", "fp64": "<d", "f64": "<d"}
MOST_REGISTERS = 255
"""Registers of a thread at most, by the ISA; only an assembler determines how many a kernel takes."""


class NamedDriver:
    """Driver that only names the GPU of a launch."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Target of the GPU; compute capability 8.0 is 80."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0


class Loaded(NamedTuple):
    """A kernel that was asked for without a launch, as far as a caller reads it."""

    metadata: Any
    run: None = None
    n_regs: int = MOST_REGISTERS


@dataclass
class Launches:
    """Launched kernels, and the memory that they may reach."""

    capability: int
    races: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    """Launches by kernel."""
    steps: Counter[str] = field(default_factory=Counter)
    reachable: list[torch.Tensor] = field(default_factory=list)
    """Memory that kernels reach by addresses in other memory."""
    machines: dict[str, Machine] = field(default_factory=dict)
    without: Callable[[str, Program], Sequence[int]] | None = None
    """Mutation: instructions to leave out, for a kernel's name and program."""

    def run(self, compiled: Any, names: Sequence[str], given: dict[str, Any], size: Sequence[int]) -> None:
        """Execute a compiled kernel."""
        name, signature = compiled.src.name, compiled.src.signature
        machine = self.machines.get(compiled.hash)
        if machine is None:
            program = Program(compiled.asm["ptx"])
            if self.without is not None:
                program = Program(compiled.asm["ptx"], self.without(name, program))
            machine = self.machines[compiled.hash] = Machine(program)
        used = [key for key in names if signature.get(key, "constexpr") != "constexpr"]
        tensors = [given[key] for key in used if isinstance(given[key], torch.Tensor)]
        parameters = [bits for key in used for bits in _parameters(given[key], signature[key])]
        grid = Grid(
            size=(*size, 1, 1)[:3],
            parameters=parameters,
            allocations=list(spans([*tensors, *self.reachable])),
            shared_bytes=compiled.metadata.shared,
            races=self.races,
            seed=sum(self.counts.values()),
        )
        self.counts[name] += 1
        self.steps[name] += machine.launch(grid)


def spans(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Address and bytes of the storage of each."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            yield storage.data_ptr(), storage.nbytes()


@contextmanager
def executing(capability: int, races: bool = True) -> Iterator[Launches]:
    """Within it, launches of Triton's kernels on CPU tensors are compiled for this capability and executed.

    Raises:
        RuntimeError: the process has chosen Triton's interpreter.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("this process runs kernels in Triton's interpreter")
    launches = Launches(capability, races)
    compile_and_launch = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        if warmup:
            return Loaded(compiled.metadata)
        given = dict(zip(self.arg_names, args, strict=False)) | {
            key: value for key, value in options.items() if key in self.arg_names
        }
        for parameter in self.params:
            given.setdefault(parameter.name, parameter.default)
        launches.run(compiled, self.arg_names, given, tuple(grid(given) if callable(grid) else grid))
        return compiled

    before = driver._active
    driver.set_active(NamedDriver(capability))
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = compile_and_launch
        driver._active = before


def _parameters(value: Any, kind: Any) -> Iterator[int]:
    """Parameters of an argument: none of a constant; a tuple has those of its elements."""
    if isinstance(kind, tuple):
        for part, its in zip(value, kind, strict=True):
            yield from _parameters(part, its)
    elif kind != "constexpr":
        yield _bits(value, kind)


def _bits(value: Any, kind: str) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if kind in _PACKED:
        return int.from_bytes(struct.pack(_PACKED[kind], float(value)), "little")
    return int(value) & (2**64 - 1)
