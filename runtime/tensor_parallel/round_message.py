"""Messages from rank 0 to the other ranks: inputs of a forward pass without the KV cache, or a step of a graph."""

import io
import pickle
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.round.rows import Rows, Segment

_ALIGNED = 16
"""Alignment in bytes of each tensor in the packed bytes."""


class PoolShape(NamedTuple):
    """KV pool of a pass.

    A rank has one pool at a time. If a message has another pool number than the message before, the rank allocates
    another pool.
    """

    number: int
    num_blocks: int
    block_size: int


class GraphOrder(NamedTuple):
    """Step of a graph. Each rank executes the step on its own graph."""

    step: Literal["warm up", "run ended", "capture", "replay"]
    """After `warm up`, each warm-up run is a series of messages that ends with `run ended`. The ranks execute these
    messages as they arrive, and the graph captures those of the last run.
    """
    number: int
    """Number of the graph. There is a graph for each stage of rank 0 and each bucket."""


class RoundMessage(NamedTuple):
    """Message with a pass, with moves only, with a step of a graph or of a change of memory, or with a weight."""

    pool: PoolShape | None
    moves: tuple[tuple[Tensor, Tensor], ...]
    """Moves of KV since the previous message, as pairs (source pool slots, destination pool slots)."""
    parts: tuple[tuple[str, Any], ...] = ()
    """Messages of the model's parts about the pass, by name of the part; see `ModelPart.tell`."""
    observed: Tensor | None = None
    """int64 [num_seqs, length]: token ids of a pass over whole sequences without a KV cache."""
    rows: Rows | None = None
    """Rows of the pass, without the features' caches, columns and context managers."""
    order: GraphOrder | None = None
    weight: tuple[str, str, Tensor | None] | None = None
    """Step, name and value of a whole weight, of which each rank changes its part; see `WeightShards.tell`."""
    memory: tuple[str, str, int | str] | None = None
    """Step of a change of memory that all ranks take; see the hook `change_memory`."""


class _Place(NamedTuple):
    """Location of a tensor in the packed bytes."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


_KNOWN = {(kind.__module__, kind.__qualname__): kind for kind in (RoundMessage, PoolShape, GraphOrder, Rows, Segment)}
"""Classes that a message may contain in addition to numbers, tuples and dicts."""


class _Packer(pickle.Pickler):
    """Pickles everything except tensors, and collects the tensors' bytes in one buffer."""

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
            raise pickle.UnpicklingError(f"a message of rank 0 must not contain {module}.{name}")
        return _KNOWN[module, name]

    def persistent_load(self, place: tuple) -> Tensor:
        place, dtype = _Place(*place), getattr(torch, place[1])
        size = dtype.itemsize
        for length in place.shape:
            size *= length
        return self._numbers[place.offset : place.offset + size].view(dtype).view(place.shape)


def pack(message: RoundMessage) -> tuple[bytes, Tensor]:
    """Splits a message into its pickled form and the bytes of its tensors.

    Returns:
        The pickled form, and the bytes uint8 [n] on the tensors' device, or on the host if there are no tensors.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(message)
    return file.getvalue(), torch.cat(packer.parts) if packer.parts else torch.zeros(0, dtype=torch.uint8)


def unpack(form: bytes, numbers: Tensor) -> RoundMessage:
    """Restores a packed message.

    Raises:
        pickle.UnpicklingError: the form names a class that messages do not contain.
    """
    return _Unpacker(io.BytesIO(form), numbers).load()
