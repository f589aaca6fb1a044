"""Launch options that all GPU kernels share: fusion of multiply and add, and programmatic dependent launch.

Programmatic dependent launch (CUDA C++ Programming Guide, compute capability 9.0 and later): programs of a kernel are
placed on multiprocessors while the last programs of the previous launch still run. The placed programs wait until the
memory that the previous launch wrote is visible.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

_LEAST_CAPABILITY = (9, 0)


@triton.jit
def wait_for_launch(EARLY: tl.constexpr):
    """Waits for the previous launch. Every program must call this function before its first memory access.

    The wait is transitive: a program that waited for the previous launch has also waited for all launches before it.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@cache
def _is_early(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def options(*, fused: bool) -> dict[str, bool]:
    """Launch options for the current device, with the constant EARLY that kernels pass to `wait_for_launch`.

    Args:
        fused: whether the compiler may turn a multiply and an add into one instruction, which rounds once instead of
            twice.
    """
    if torch.cuda.is_available():
        early = not knobs.runtime.interpret and _is_early(torch.cuda.current_device())
    else:
        early = compiled_capability() >= 90
    known = {"enable_fp_fusion": fused, "EARLY": early}
    return known | {"launch_pdl": True} if early else known


def compiled_capability() -> int:
    """Compute capability that kernels are compiled for on a machine without a GPU, times ten.

    0 if kernels are interpreted.
    """
    if knobs.runtime.interpret:
        return 0
    try:
        return driver.active.get_current_target().arch
    except RuntimeError:  # without a driver nothing is compiled
        return 0
