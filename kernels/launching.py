"""How every kernel of a GPU is launched: whether products and sums are fused is said, and it begins before the launch
ahead of it has ended, where the device lets it.

Programmatic dependent launch (CUDA C++ Programming Guide, from compute capability 9.0 on): a kernel's programs are put
on multiprocessors while the last ones of the launch ahead still run, and wait there for its memory.
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
    """Comes before a kernel's first look at memory, in every program: who reads what the launch ahead wrote has waited
    for it, and so for all that it waited for."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@cache
def _is_early(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def options(*, fused: bool) -> dict[str, bool]:
    """Options of a launch on the current device, and the constant that kernels hand to `wait_for_launch`.

    Args:
        fused: a product and a sum may be one instruction, which rounds once.
    """
    if torch.cuda.is_available():
        early = not knobs.runtime.interpret and _is_early(torch.cuda.current_device())
    else:
        early = compiled_capability() >= 90
    known = {"enable_fp_fusion": fused, "EARLY": early}
    return known | {"launch_pdl": True} if early else known


def compiled_capability() -> int:
    """Capability that kernels are compiled for on a machine without a GPU; 0 where they are interpreted."""
    if knobs.runtime.interpret:
        return 0
    try:
        return driver.active.get_current_target().arch
    except RuntimeError:  # there is no driver: nothing is compiled
        return 0
