"""Messages of rank 0 to the others: all that it passes to the model, but keys and values, or a step of a graph."""

import io
import pickle
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.round.rows import Rows, Segment

_ALIGNED = 16
"""Bytes that each tensor's place is a multiple of."""


class PoolShape(NamedTuple):
    """The KV pool of a pass. A rank has one at a time, and makes another when the number changes."""

    number: int
    num_blocks: int
    block_size: int


class GraphOrder(NamedTuple):
    """A step of a graph, which every rank has its own of."""

    step: Literal["warm up", "run ended", "capture", "replay"]
    """After `warm up`, messages up to each `run ended` are what the graph is to hold, and are run as they come."""
    number: int
    """Number of the graph: of one stage at one bucket of rank 0's."""


class RoundMessage(NamedTuple):
    """A forward pass, or moves alone, or a step of a graph."""

    pool: PoolShape | None
    moves: tuple[tuple[Tensor, Tensor], ...]
    """Slots from which, and to which, keys and values have moved since the message before."""
    parts: tuple[tuple[str, Any], ...] = ()
    """Messages of the model's parts about the pass, by name: see `ModelPart.tell`."""
    observed: Tensor | None = None
    """int64 [num_seqs, length]: whole sequences, without keys and values."""
    rows: Rows | None = None
    """Without caches, what features add, and what is entered around a pass."""
    order: GraphOrder | None = None
    written: tuple[str, Tensor | None] | None = None
    """A weight's name and its numbers, of which each rank takes its part; an empty name behind the last one."""


class _Place(NamedTuple):
    """Where a tensor lies among the numbers."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


_KNOWN = {(kind.__module__, kind.__qualname__): kind for kind in (RoundMessage, PoolShape, GraphOrder, Rows, Segment)}
"""All that a message is made of beside numbers, tuples and dicts."""


class _Packer(pickle.Pickler):
    """Pickles everything but the tensors, which it lays side by side."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.parts: list[Tensor] = []
        self.size = 0

    def persistent_id(self, part: Any) -> tuple | None:
        if not isinstance(part, Tensor):
            return None
        place = _Place(self.size, str(part.dtype).removeprefix("torch."), tuple(part.shape))
        numbers = part.contiguous().view(-1).view(torch.uint8)
        self.parts += [numbers, numbers.new_zeros(-len(numbers) % _ALIGNED)]
        self.size += len(numbers) + len(self.parts[-1])
        return tuple(place)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, numbers: Tensor) -> None:
        super().__init__(file)
        self._numbers = numbers

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"a message of rank 0 has no place for {module}.{name}")
        return _KNOWN[module, name]

    def persistent_load(self, place: tuple) -> Tensor:
        place, dtype = _Place(*place), getattr(torch, place[1])
        size = dtype.itemsize
        for length in place.shape:
            size *= length
        return self._numbers[place.offset : place.offset + size].view(dtype).view(place.shape)


def pack(message: RoundMessage) -> tuple[bytes, Tensor]:
    """Its form, and the numbers of all its tensors: uint8 [n] on their device; on the host where there is none."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(message)
    return file.getvalue(), torch.cat(packer.parts) if packer.parts else torch.zeros(0, dtype=torch.uint8)


def unpack(form: bytes, numbers: Tensor) -> RoundMessage:
    """The way back.

    Raises:
        pickle.UnpicklingError: the form names what is no part of a message.
    """
    return _Unpacker(io.BytesIO(form), numbers).load()
