"""Limits of a GPU for a launch, and the programs of a compiled kernel that a multiprocessor holds by them."""

import functools
from typing import NamedTuple

import torch

_KIB = 1024
# CUDA's own, of each program on a multiprocessor ("CUDA C++ Programming Guide", compute capabilities, from 8.0 on).
_RESERVED_BYTES = 1 * _KIB
_SHARED_UNIT_BYTES = 128
# A warp's registers are dealt out of a quarter of the multiprocessor's, for eight registers of its 32 lanes at a time.
_REGISTER_UNIT = 8
_QUARTERS = 4
_TENSOR_COLUMNS = 512


class DeviceLimits(NamedTuple):
    """Limits of one GPU."""

    capability: int
    """Compute capability 8.0 as 80."""
    num_sms: int
    """Multiprocessors."""
    shared_bytes: int
    """Shared memory of a program, opted in to."""
    sm_shared_bytes: int
    sm_registers: int
    sm_threads: int

    @property
    def has_warpgroups(self) -> bool:
        """Whether Triton's products of 64 rows and more run on a group of four warps: wgmma, and tcgen05 after it."""
        return self.capability // 10 in (9, 10)

    def resident_programs(self, shared_bytes: int, registers: int, num_warps: int, tensor_columns: int = 0) -> int:
        """Programs of a compiled kernel that a multiprocessor holds at once.

        Args:
            shared_bytes: of a program.
            registers: of a thread.
            num_warps: of a program.
            tensor_columns: of the tensor memory that capability 10.0 has, of a program.
        """
        shared = -(-(shared_bytes + _RESERVED_BYTES) // _SHARED_UNIT_BYTES) * _SHARED_UNIT_BYTES
        of_warp = max(-(-registers // _REGISTER_UNIT), 1) * _REGISTER_UNIT * 32
        warps = min(self.sm_registers // _QUARTERS // of_warp * _QUARTERS, self.sm_threads // 32)
        columns = _TENSOR_COLUMNS // max(tensor_columns, 1)
        return max(min(self.sm_shared_bytes // shared, warps // num_warps, columns), 1)


def _limits(capability: int, num_sms: int, shared_kib: int, threads: int) -> DeviceLimits:
    return DeviceLimits(capability, num_sms, (shared_kib - 1) * _KIB, shared_kib * _KIB, 65536, threads)


KNOWN = {
    "A100": _limits(80, 108, 164, 2048),
    "A10": _limits(86, 72, 100, 1536),
    "L4": _limits(89, 58, 100, 1536),
    "RTX 4090": _limits(89, 128, 100, 1536),
    "H100": _limits(90, 132, 228, 2048),
    "B200": _limits(100, 148, 228, 2048),
    "RTX 5090": _limits(120, 170, 100, 1536),
}
"""By name, where there is none of them to ask (CUDA C++ Programming Guide, compute capabilities)."""


@functools.cache
def device_limits(device_index: int) -> DeviceLimits:
    """Limits of a GPU of this machine."""
    device = torch.cuda.get_device_properties(device_index)
    return DeviceLimits(
        device.major * 10 + device.minor,
        device.multi_processor_count,
        device.shared_memory_per_block_optin,
        device.shared_memory_per_multiprocessor,
        device.regs_per_multiprocessor,
        device.max_threads_per_multi_processor,
    )
