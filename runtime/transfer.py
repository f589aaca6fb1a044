"""Numbers between host and device without waiting: uploads from, and downloads into, pinned memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of host numbers on `device`; enqueued behind the device's work, not waited for."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    # A copy from pageable memory would wait for everything enqueued before it.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy without waiting where that is safe: a host that reads `target` next must find it complete."""
    target.copy_(source, non_blocking=target.device.type != "cpu")


class Download:
    """A tensor on its way to the host: enqueued when made, waited for by `wait`."""

    def __init__(self, source: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = source
        if source.device.type != "cpu":
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[Any]:
        """The numbers, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
