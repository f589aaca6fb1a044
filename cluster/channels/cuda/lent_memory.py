"""Tensors of one process that another one reads on the same GPU, in place of copies of its own.

Their owner exports the allocations they lie in, once. Whoever borrows maps them, one process after the other and as
often as one dies; the end of a process ends its mappings. Nobody writes: that is a convention, CUDA maps all memory for
writing. And what is lent stays where it is: a process that frees or moves it must have seen its borrowers end.

torch's allocator cuts tensors out of larger allocations, so a tensor is a handle and an offset. Memory that it maps by
itself (expandable segments) or takes from a pool of the driver's (cudaMallocAsync) has no handle, and is not lent.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.cluster.channels.cuda.cuda_runtime import CudaError, CudaRuntime

SYNCHRONISED_S = 60.0
"""For a device to do what it was given before."""


class LentTensor(NamedTuple):
    """Where a tensor lies."""

    handle: bytes
    """Of its allocation."""
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Loan(NamedTuple):
    """What a process lends; travels pickled."""

    uuid: str
    """Of its GPU."""
    tensors: Mapping[str, LentTensor | str]
    """By name; a reason where one is not lent."""


def lend(tensors: Mapping[str, Tensor | str], device: torch.device, runtime: CudaRuntime | None = None) -> Loan:
    """Export tensors of the device; what keeps one from being lent is its reason.

    Args:
        tensors: by name, each for as long as borrowers live; or the reason why there is none to lend.
        runtime: of CUDA; None takes torch's.
    """
    runtime = runtime or CudaRuntime()
    lent = {name: one if isinstance(one, str) else _lend(one, device, runtime) for name, one in tensors.items()}
    # Another process's streams know nothing of what this one's still have to write.
    if not runtime.drain(device, runtime.current_stream(device), SYNCHRONISED_S):
        lent = dict.fromkeys(lent, f"{device} is not done with it within {SYNCHRONISED_S:.0f} s")
    return Loan(runtime.uuid(device), lent)


def _lend(tensor: Tensor, device: torch.device, runtime: CudaRuntime) -> LentTensor | str:
    if not tensor.is_contiguous():
        return "its rows do not lie one after the other"
    try:
        base = runtime.allocation_of(device, tensor.data_ptr())
        handle = runtime.export_memory(device, base)
    except CudaError as error:
        return f"its memory cannot be exported: {error}"
    return LentTensor(handle, tensor.data_ptr() - base, tuple(tensor.shape), tensor.dtype)


class Borrower:
    """One process's hold on what another one lends; the mappings stay until this process ends.

    Args:
        device: of this process.
        runtime: of CUDA; None takes torch's.
    """

    def __init__(self, loan: Loan, device: torch.device, runtime: CudaRuntime | None = None) -> None:
        self._loan, self._device = loan, device
        self._runtime = runtime or CudaRuntime()
        self._mapped: dict[bytes, int] = {}
        """Addresses here, by handle: an allocation may hold several of the tensors."""

    @property
    def is_beside(self) -> bool:
        """Whether the lender is on the same GPU. Raises CudaError."""
        return self._runtime.find(self._loan.uuid) == self._device

    def tensor(self, name: str) -> Tensor:
        """The other process's tensor, to be read.

        Raises:
            CudaError: it is not lent, or cannot be mapped; the reason alone.
        """
        lent = self._loan.tensors.get(name, "the verifier has none of that name")
        if isinstance(lent, str):
            raise CudaError(lent)
        if lent.handle not in self._mapped:
            self._mapped[lent.handle] = self._runtime.open_memory(self._device, lent.handle)
        num_bytes = prod(lent.shape) * lent.dtype.itemsize
        raw = self._runtime.tensor(self._device, self._mapped[lent.handle], lent.offset_bytes + num_bytes)
        return raw[lent.offset_bytes :].view(lent.dtype).view(lent.shape)
