"""What a machine needs to serve, asked part by part before anybody depends on it: `wingbeat doctor`.

Each part has a limit of time and one line, and none stops those behind it. Knows nothing of terminals.
"""

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from wingbeat.runtime.checks.bounded_step import bounded_step

PACKAGES = ("wingbeat", "torch", "triton", "transformers", "ray", "xgrammar", "tensorrt")
MIN_SHM_BYTES = 1 << 30
_GIB = 1 << 30


class Verdict(StrEnum):
    """Of one part."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """One line of the report."""

    part: str
    verdict: Verdict
    detail: str
    seconds: float = 0.0


class Part(NamedTuple):
    """What is asked."""

    name: str
    most_s: float
    ask: Callable[[], tuple[Verdict, str]]


def examine(parts: list[Part]) -> Iterator[Finding]:
    """Ask part after part; what raises or hangs has failed."""
    for part in parts:
        started = time.monotonic()
        try:
            verdict, detail = bounded_step(part.name, part.most_s, "it was given up", part.ask)
        except Exception as error:  # whatever a broken installation raises is what the report is for
            text = (str(error).strip().splitlines() or [""])[0]
            verdict, detail = Verdict.FAILED, f"{type(error).__name__}: {text}"
        yield Finding(part.name, verdict, detail, time.monotonic() - started)


def machine_parts() -> list[Part]:
    """What every machine is asked."""
    return [
        Part("versions", 30, _versions),
        Part("processor", 30, _processor),
        Part("memory", 30, _memory),
        Part("CPU kernels", 320, _cpu_kernels),
    ]


def gpu_parts() -> list[Part]:
    """What a machine is asked of its first GPU, in the order of a start; one part says so where there is none."""
    import torch

    if not torch.cuda.is_available():
        return [Part("GPU", 30, _no_gpu)]
    return [Part("GPU", 60, _gpu), Part("GPU kernels", 600, _gpu_kernels), Part("CUDA graphs", 120, _graphs)]


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
    sizes = f"{_gib(free)} free of {_gib(total)}, {_gib(shared)} of shared memory"
    if shared < MIN_SHM_BYTES:
        return Verdict.WARNING, f"{sizes}: containers need --shm-size=2g or more for Ray and the channels"
    return Verdict.OK, sizes


def _gib(size: int | None) -> str:
    return "an unknown amount" if size is None else f"{size / _GIB:.1f} GiB"


def _cpu_kernels() -> tuple[Verdict, str]:
    from wingbeat.kernels.cpu.library import NoLibraryError, open_library
    from wingbeat.runtime.disk_cache import cache_dir

    try:
        open_library(cache_dir() / "kernels")
    except NoLibraryError as error:
        return Verdict.WARNING, f"{error}: CPUs run torch's operations instead, which is slower"
    return Verdict.OK, "compiled"


def _no_gpu() -> tuple[Verdict, str]:
    import torch

    return Verdict.WARNING, f"torch {torch.__version__} sees none: everything runs on the CPU"


def _gpu() -> tuple[Verdict, str]:
    import torch

    lines = []
    for index in range(torch.cuda.device_count()):
        gpu, capability = torch.cuda.get_device_properties(index), torch.cuda.get_device_capability(index)
        lines.append(f"{gpu.name} {'.'.join(map(str, capability))} {_gib(gpu.total_memory)}")
    x = torch.arange(1024, device="cuda", dtype=torch.float32)
    if (x @ x).item() != float(sum(i * i for i in range(1024))):
        return Verdict.FAILED, f"{'; '.join(lines)}: a sum of squares comes out wrong"
    return Verdict.OK, f"CUDA {torch.version.cuda}; {'; '.join(lines)}"


def _gpu_kernels() -> tuple[Verdict, str]:
    import torch

    from wingbeat.kernels.comparison import CASES, FP8_CAPABILITY, Shape, differences

    if shutil.which(os.environ.get("CC", "cc")) is None and shutil.which("gcc") is None:
        return Verdict.FAILED, "Triton needs a C compiler: install gcc, or serve with --kernels torch"
    device = torch.device("cuda", 0)
    found = differences(device, Shape(), torch.cuda.get_device_capability(device) < FP8_CAPABILITY)
    if found:
        return Verdict.WARNING, f"torch runs in the place of {'; '.join(map(str, found))}"
    return Verdict.OK, f"{len(CASES)} kernels compile and compute what torch does"


def _graphs() -> tuple[Verdict, str]:
    import torch

    from wingbeat.runtime.graphs.graph_device import CudaGraphDevice

    graphs, static = CudaGraphDevice(torch.device("cuda", 0)), torch.zeros(64, 64, device="cuda")

    def double() -> torch.Tensor:
        return (static @ torch.eye(64, device="cuda")) * 2

    graphs.warm_up(double)
    graph, out = graphs.capture(double, graphs.new_pool())
    static.copy_(torch.arange(64 * 64, device="cuda").view(64, 64) % 7)
    graphs.replay(graph)
    if not torch.equal(out, static * 2):
        return Verdict.FAILED, "a replay computes something else than what was captured: serve with --no-cuda-graphs"
    return Verdict.OK, "captured and replayed"
