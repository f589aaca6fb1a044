"""The CPU's own kernels, opened once for a process; where they are not to be had, torch's operations do their work."""

import logging
import os
from functools import cache

import torch

from wingbeat.kernels.cpu.library import NoLibraryError
from wingbeat.kernels.cpu.ops import CACHE_DTYPES, CpuKernels
from wingbeat.runtime.disk_cache import cache_dir

logger = logging.getLogger(__name__)

SWITCH = "WINGBEAT_CPU_KERNELS"
"""Environment variable, read when this is imported; 0 leaves the kernels out."""
_used = os.environ.get(SWITCH) != "0"


def cpu_kernels() -> CpuKernels | None:
    """The kernels; None where there is no C++ compiler, and while somebody watches torch's operations.

    Who records them, as a graph does, would not see ours.
    """
    if not _used or torch._C._len_torch_dispatch_stack():
        return None
    return _opened()


def use_kernels(wanted: bool) -> bool:
    """Whether kernels are used from now on, whatever the environment says; returns whether they were."""
    global _used
    _used, before = wanted, _used
    return before


@cache
def _opened() -> CpuKernels | None:
    try:
        return CpuKernels(cache_dir() / "kernels")
    except NoLibraryError as error:
        logger.warning("CPU kernels are left out, torch's operations run in their place: %s", error)
        return None


def reads_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention over a KV pool of this dtype reads blocks where they lie, by our kernel."""
    return device.type == "cpu" and dtype in CACHE_DTYPES and cpu_kernels() is not None
