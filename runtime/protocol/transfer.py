"""Numbers between host and device without waiting: uploads from, and downloads into, pinned memory."""

from collections.abc import Sequence

import numpy as np
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
    """int64 tensors on their way to the host: enqueued as one copy when made, waited for by `wait`."""

    def __init__(self, parts: list[Tensor]) -> None:
        self._shapes = [part.shape for part in parts]
        self._event: torch.cuda.Event | None = None
        self._host = torch.cat([part.flatten() for part in parts])
        if self._host.device.type != "cpu":
            pinned = torch.empty(self._host.shape, dtype=torch.int64, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[np.ndarray]:
        """The numbers on the host, once they have arrived; as arrays, of which taking parts costs less."""
        if self._event is not None:
            self._event.synchronize()
        arrived, begin, parts = self._host.numpy(), 0, []
        for shape in self._shapes:
            end = begin + shape.numel()
            parts.append(arrived[begin:end].reshape(shape))
            begin = end
        return parts
