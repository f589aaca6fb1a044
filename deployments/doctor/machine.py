"""Checks for every machine: installed packages, processor, memory, compiler."""

import importlib.metadata
import os
import platform
from collections.abc import Callable
from functools import partial

from wingbeat.deployments.doctor.examination import Part, Verdict
from wingbeat.runtime.parts import hooks

PACKAGES = ("wingbeat", "torch", "triton", "transformers", "ray", "llguidance", "tensorrt")
MIN_SHM_BYTES = 1 << 30
_GIB = 1 << 30


def machine_parts() -> list[Part]:
    """Return the checks that apply to every machine."""
    return [
        Part("versions", 30, _versions),
        Part("processor", 30, _processor),
        Part("memory", 30, _memory),
        *(Part("CPU kernels", 320, partial(_compiled, why_missing)) for why_missing in hooks("why_not_compiled")),
    ]


def _versions() -> tuple[Verdict, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Verdict.OK, ", ".join([f"Python {platform.python_version()}", *(f"{n} {v}" for n, v in found.items())])


def _processor() -> tuple[Verdict, str]:
    cores = len(os.sched_getaffinity(0))
    return Verdict.OK if cores > 1 else Verdict.WARNING, f"{cores} cores for this process, {platform.machine()}"


def _memory() -> tuple[Verdict, str]:
    from wingbeat.runtime.free_memory import free_memory, free_shared_memory, total_memory

    free, total, shared = free_memory(), total_memory(), free_shared_memory()
    sizes = f"{gib(free)} free of {gib(total)}, {gib(shared)} of shared memory"
    if shared < MIN_SHM_BYTES:
        return Verdict.WARNING, f"{sizes}: containers need --shm-size=2g or more for Ray and the channels"
    return Verdict.OK, sizes


def gib(size: int | None) -> str:
    """Return a size in GiB as text for display."""
    return "an unknown amount" if size is None else f"{size / _GIB:.1f} GiB"


def _compiled(why_missing: Callable[[], str | None]) -> tuple[Verdict, str]:
    if (why := why_missing()) is not None:
        return Verdict.WARNING, f"{why}: CPUs run torch's operations instead, which is slower"
    return Verdict.OK, "compiled"
