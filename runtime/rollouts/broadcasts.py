"""Tensors that a trainer broadcasts to all engines. The trainer is rank 0 of a process group of `torch.distributed`."""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from math import prod

import torch
from torch import Tensor, distributed

from wingbeat.runtime.rollouts.served_weights import WeightsRefused

PATIENCE_S = 60.0
"""Seconds to wait for a trainer to join, and for each announced tensor."""
_GROUPS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
_PREFIX = "wingbeat-weights"


class Broadcasts:
    """A member of the process group: the trainer or an engine.

    Args:
        backend: backend of `torch.distributed`, gloo or nccl.
        address: host of the trainer's store, through which the members find each other.
        port: port of the trainer's store.
        rank: rank of this member; 0 for the trainer.
        device: device on which tensors are received.

    Raises:
        WeightsRefused: another member does not join.
    """

    def __init__(
        self,
        backend: str,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._device, self._limit = device, timedelta(seconds=patience_s)
        if not hasattr(distributed, _GROUPS[backend]):
            raise WeightsRefused(f"backend {backend} is not in this installation of torch")
        try:
            store = distributed.TCPStore(address, port, None, rank == 0, self._limit, wait_for_workers=False)
            group = getattr(distributed, _GROUPS[backend])
            self._group = group(distributed.PrefixStore(_PREFIX, store), rank, world_size, self._limit)
        except (RuntimeError, ValueError) as error:
            raise WeightsRefused(
                f"the process group at {address}:{port} cannot be joined: {_one_line(error)}"
            ) from None

    def send(self, tensor: Tensor) -> None:
        """Broadcasts a tensor from rank 0; raises ConnectionError if an engine does not answer."""
        self._broadcast(tensor.contiguous())

    def receive(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Receives a tensor of this shape from rank 0; raises ConnectionError if rank 0 does not answer."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self._broadcast(tensor)
        return tensor

    def receive_all(
        self, announced: Iterable[tuple[str, list[int], torch.dtype]], packed_bytes: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Receives tensors of these names, shapes and dtypes from rank 0.

        Raises ConnectionError if rank 0 does not answer.

        Args:
            packed_bytes: size above which rank 0 sends a pack of tensors; as in vLLM, rank 0 concatenates tensors until
                they exceed this number of bytes. None if rank 0 sends each tensor by itself.
        """
        if packed_bytes is None:
            yield from ((name, self.receive(shape, dtype)) for name, shape, dtype in announced)
            return
        piece: list[tuple[str, list[int], torch.dtype]] = []
        size = 0
        for one in announced:
            piece.append(one)
            size += prod(one[1]) * one[2].itemsize
            if size > packed_bytes:
                yield from self._unpacked(piece, size)
                piece, size = [], 0
        if piece:
            yield from self._unpacked(piece, size)

    def _unpacked(self, piece: list[tuple[str, list[int], torch.dtype]], size: int) -> Iterator[tuple[str, Tensor]]:
        packed, begin = self.receive((size,), torch.uint8), 0
        for name, shape, dtype in piece:
            end = begin + prod(shape) * dtype.itemsize
            # The slice is cloned, because it may not be aligned for its dtype.
            yield name, packed[begin:end].clone().view(dtype).view(shape)
            begin = end

    def _broadcast(self, tensor: Tensor) -> None:
        try:
            self._group.broadcast(tensor, 0).wait(self._limit)
        except RuntimeError as error:
            raise ConnectionError(f"the other end of the broadcast is gone: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
