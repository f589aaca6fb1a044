"""Transfers between host and device that do not block: uploads from pinned memory and downloads into pinned memory."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(values: Sequence, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copies host numbers to a tensor on `device`.

    The copy is enqueued after the device's work, and the host does not wait.
    """
    made = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return made
    # The tensor is pinned, because a copy from pageable memory would wait for all work enqueued before; `torch.tensor`
    # itself does not pin memory.
    return made.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, values: Sequence) -> None:
    """Copies host numbers into a tensor, in one transfer for which the host does not wait."""
    made, on_host = torch.tensor(values, dtype=target.dtype), target.device.type == "cpu"
    target.copy_(made if on_host else made.pin_memory(), non_blocking=not on_host)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copies a tensor.

    The host waits for the copy only if the target is in host memory, because host code may read the target at once.
    """
    target.copy_(source, non_blocking=target.device.type != "cpu")


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copies (target, source) pairs without waiting.

    Contiguous pairs of equal shape and dtype on the same GPU are copied in a single launch.
    """
    if any(target.device.type != "cpu" for target, _ in pairs):
        Copies(pairs).run()
        return
    for target, source in pairs:
        target.copy_(source)


class Copies:
    """Copies between fixed (target, source) pairs that are run repeatedly; see `copy_all`."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        together: list[tuple[Tensor, Tensor]] = []
        self._apart: list[tuple[Tensor, Tensor]] = []
        for pair in pairs:
            (together if _alike(*pair) else self._apart).append(pair)
        if len(together) < 2:
            together, self._apart = [], pairs
        # Tensors are viewed as bytes, because a launch handles a single dtype.
        self._targets = [target.view(-1).view(torch.uint8) for target, _ in together]
        self._sources = [source.view(-1).view(torch.uint8) for _, source in together]

    def run(self) -> None:
        """Enqueues the copies."""
        for target, source in self._apart:
            copy_into(target, source)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def _alike(target: Tensor, source: Tensor) -> bool:
    same = target.is_cuda and (target.device, target.dtype, target.shape) == (source.device, source.dtype, source.shape)
    return same and target.is_contiguous() and source.is_contiguous() and target.numel() > 0


class Download:
    """Download of int64 tensors: creating the object enqueues a single copy, and `wait` completes it.

    Args:
        parts: tensors to download; each [num_rows, ...] if `packed` is given.
        packed: [num_rows, n]: the parts side by side, if the device has packed them.
        stays: whether the parts are not overwritten before they are used, so that CPU tensors need no copy.
    """

    def __init__(self, parts: list[Tensor], packed: Tensor | None = None, *, stays: bool = False) -> None:
        self._parts = parts if stays and packed is None and parts[0].device.type == "cpu" else None
        if self._parts is not None:
            return
        self._shapes = [part.shape for part in parts]
        self._event: torch.cuda.Event | None = None
        self._is_packed = packed is not None
        self._host = torch.cat([part.flatten() for part in parts]) if packed is None else packed
        if self._host.device.type == "cpu":
            # cloned because the next replay overwrites `packed`
            self._host = self._host if packed is None else packed.clone()
        else:
            pinned = torch.empty(self._host.shape, dtype=torch.int64, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[np.ndarray]:
        """Waits for the transfer and returns the parts as numpy arrays."""
        if self._parts is not None:
            return [part.numpy() for part in self._parts]
        if self._event is not None:
            self._event.synchronize()
        arrived, begin, parts = self._host.numpy(), 0, []
        if self._is_packed:
            widths = [shape[1:].numel() for shape in self._shapes]
            ends = np.cumsum(widths)
            columns = (arrived[:, end - width : end] for width, end in zip(widths, ends, strict=True))
            return [part.reshape(shape) for part, shape in zip(columns, self._shapes, strict=True)]
        for shape in self._shapes:
            end = begin + shape.numel()
            parts.append(arrived[begin:end].reshape(shape))
            begin = end
        return parts
