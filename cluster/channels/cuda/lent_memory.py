"""Tensors of one process that other processes map on the same GPU instead of holding copies.

The owner exports the allocations of its tensors once. Any number of borrowers may map these allocations, and may map
them again after a restart. The mappings of a process end with the process. CUDA maps all memory writable, so it is only
a convention that nobody writes to lent tensors. Lent memory must stay in place: its owner may free or move it only
after all borrowers have ended.

torch's allocator places tensors in larger allocations, so a tensor is lent as the handle of its allocation and an
offset. Memory of expandable segments or of the driver's pool (cudaMallocAsync) has no IPC handle and is not lent.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.cluster.channels.cuda.cuda_runtime import CudaRuntime
from wingbeat.kernels.cuda_driver import CudaError

SYNCHRONISED_S = 60.0
"""Longest wait in seconds for a device to finish the work enqueued before the loan."""


class LentTensor(NamedTuple):
    """Location of a lent tensor."""

    handle: bytes
    """IPC handle of the allocation."""
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Loan(NamedTuple):
    """Tensors that a process lends; sent pickled."""

    uuid: str
    """UUID of the lender's GPU."""
    tensors: Mapping[str, LentTensor | str]
    """By name, a lent tensor, or the reason why the tensor is not lent."""


def lend(tensors: Mapping[str, Tensor | str], device: torch.device, runtime: CudaRuntime | None = None) -> Loan:
    """Export tensors of the device. In the loan, a tensor that cannot be lent is replaced by the reason.

    Args:
        tensors: by name, a tensor that the caller keeps until its borrowers have ended, or the reason why there is no
            tensor to lend.
        runtime: CUDA runtime; None uses torch's.
    """
    runtime = runtime or CudaRuntime()
    lent = {name: one if isinstance(one, str) else _lend(one, device, runtime) for name, one in tensors.items()}
    # Wait, because streams of other processes are not ordered after this process's pending writes.
    if not runtime.drain(device, runtime.current_stream(device), SYNCHRONISED_S):
        lent = dict.fromkeys(lent, f"{device} has not finished its earlier work within {SYNCHRONISED_S:.0f} s")
    return Loan(runtime.uuid(device), lent)


def _lend(tensor: Tensor, device: torch.device, runtime: CudaRuntime) -> LentTensor | str:
    if not tensor.is_contiguous():
        return "it is not contiguous"
    try:
        base, _ = runtime.allocation_of(device, tensor.data_ptr())
        handle = runtime.export_memory(device, base)
    except CudaError as error:
        return f"its memory cannot be exported: {error}"
    return LentTensor(handle, tensor.data_ptr() - base, tuple(tensor.shape), tensor.dtype)


class Borrower:
    """A process's mappings of lent tensors, which stay until the process ends.

    Args:
        device: this process's device.
        runtime: CUDA runtime; None uses torch's.
    """

    def __init__(self, loan: Loan, device: torch.device, runtime: CudaRuntime | None = None) -> None:
        self._loan, self._device = loan, device
        self._runtime = runtime or CudaRuntime()
        self._mapped: dict[bytes, int] = {}
        """Addresses in this process, by handle, because several tensors may share an allocation."""

    @property
    def is_beside(self) -> bool:
        """Whether the lender is on the same GPU. Raises CudaError."""
        return self._runtime.find(self._loan.uuid) == self._device

    def tensor(self, name: str) -> Tensor:
        """The lender's tensor, for reading only.

        Raises:
            CudaError: the tensor is not lent or cannot be mapped; the message is the reason alone.
        """
        lent = self._loan.tensors.get(name, "the verifier has none of that name")
        if isinstance(lent, str):
            raise CudaError(lent)
        if lent.handle not in self._mapped:
            self._mapped[lent.handle] = self._runtime.open_memory(self._device, lent.handle)
        num_bytes = prod(lent.shape) * lent.dtype.itemsize
        raw = self._runtime.tensor(self._device, self._mapped[lent.handle], lent.offset_bytes + num_bytes)
        return raw[lent.offset_bytes :].view(lent.dtype).view(lent.shape)
