"""Launch limits of a GPU, and the number of programs of a compiled kernel that fit on a multiprocessor."""

import functools
from typing import NamedTuple

import torch

_KIB = 1024
# Shared memory that CUDA reserves for each resident program ("CUDA C++ Programming Guide", compute capabilities 8.0 and
# later).
_RESERVED_BYTES = 1 * _KIB
_SHARED_UNIT_BYTES = 128
# A warp's registers come from one quarter of the multiprocessor's register file, in units of eight registers for each
# of its 32 lanes.
_REGISTER_UNIT = 8
_QUARTERS = 4
_TENSOR_COLUMNS = 512


class DeviceLimits(NamedTuple):
    """Launch limits of one GPU."""

    capability: int
    """Compute capability times ten: 8.0 is 80."""
    num_sms: int
    """Number of multiprocessors."""
    shared_bytes: int
    """Bytes of shared memory that a program can opt in to. The fields with prefix `sm_` are totals of a
    multiprocessor."""
    sm_shared_bytes: int
    sm_registers: int
    sm_threads: int

    @property
    def has_warpgroups(self) -> bool:
        """Whether Triton runs matrix products of 64 rows and more on groups of four warps (wgmma or tcgen05)."""
        return self.capability // 10 in (9, 10)

    def resident_programs(self, shared_bytes: int, registers: int, num_warps: int, tensor_columns: int = 0) -> int:
        """Number of programs of a compiled kernel that a multiprocessor holds at once.

        Args:
            shared_bytes: shared memory of a program, in bytes.
            registers: registers of a thread.
            num_warps: warps of a program.
            tensor_columns: columns of tensor memory of a program (capability 10.0).
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
"""Limits by GPU name, for use on machines without that GPU (CUDA C++ Programming Guide, compute capabilities)."""


@functools.cache
def device_limits(device_index: int) -> DeviceLimits:
    """Reads the limits of a GPU of this machine."""
    device = torch.cuda.get_device_properties(device_index)
    return DeviceLimits(
        device.major * 10 + device.minor,
        device.multi_processor_count,
        device.shared_memory_per_block_optin,
        device.shared_memory_per_multiprocessor,
        device.regs_per_multiprocessor,
        device.max_threads_per_multi_processor,
    )
