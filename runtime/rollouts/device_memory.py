"""Memory of an engine on a GPU that a sleep gives back: keys and values, and the weights."""

import gc
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from wingbeat.kernels.cuda_driver import CudaError
from wingbeat.kernels.foreign_memory import tensor_at
from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused
from wingbeat.runtime.rollouts.sleep_memory import KEEPS_WEIGHTS, KV, PART, TAGS, WAKE, WEIGHTS, SleepMemory
from wingbeat.runtime.rollouts.virtual_memory import Driver, Region, synchronize
from wingbeat.runtime.verifier.layers.division import Division
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.model_part import ModelPart

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 28
"""Bytes of weights that are moved together. While the weights move, this much memory is in use twice."""


class DeviceMemory(ModelPart, SleepMemory):
    """Memory of an engine on a GPU, at addresses that outlast a sleep, so that captured graphs do too."""

    name = PART

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self._device, self._driver = device, driver
        self._regions = {tag: Region(device, driver) for tag in TAGS}

    @property
    def mapped_bytes(self) -> int:
        """See `ModelPart.mapped_bytes`."""
        return sum(region.num_bytes for region in self._regions.values())

    def pool(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Returns zero tensors for keys and values, see `KVCache`. The memory of an earlier pool is freed."""
        self._regions[KV].close()
        self._regions[KV] = Region(self._device, self._driver)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
        made = zip(self._regions[KV].allocate(sizes), shapes, strict=True)
        return [one.zero_().view(dtype).view(shape) for one, shape in made]

    @torch.no_grad()
    def take_weights(self, weights: ServedWeights) -> None:
        """Moves the weights of a loaded verifier, of which no graph was captured yet.

        Raises:
            CudaError: the device has no virtual memory, or not enough memory; weights not yet moved stay in place.
        """
        users = _tensors_by_storage(self._device)
        group: list[int] = []
        size = 0
        for key, num_bytes in [(_key(one), one.untyped_storage().nbytes()) for one in weights.storages()]:
            group.append(key)
            size += num_bytes
            if size >= CHUNK_BYTES:
                self._take([users.pop(one) for one in group])
                group, size = [], 0
        self._take([users.pop(one) for one in group])

    def _take(self, groups: list[list[Tensor]]) -> None:
        """Moves storages; each is given as all tensors that use it."""
        if not groups:
            return
        sizes = [users[0].untyped_storage().nbytes() for users in groups]
        for users, place in zip(groups, self._regions[WEIGHTS].allocate(sizes), strict=True):
            _move(users, place)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise torch would keep the memory from which the weights have moved

    def prepare(self, change: str, what: int | str) -> None:
        """See `SleepMemory.prepare`; raises MemoryError or CudaError."""
        if change == WAKE:
            self._regions[str(what)].map()
            return
        synchronize(self._device)
        if what == KEEPS_WEIGHTS:
            self._regions[WEIGHTS].save()

    def cancel(self, change: str, what: int | str) -> None:
        """See `SleepMemory.cancel`."""
        if change == WAKE:
            if (region := self._regions[str(what)]).is_empty:
                region.unmap()
        elif what == KEEPS_WEIGHTS:
            self._regions[WEIGHTS].forget()

    def carry_out(self, change: str, what: int | str) -> None:
        """See `SleepMemory.carry_out`."""
        if change == WAKE:
            self._regions[str(what)].fill()
            return
        if what != KEEPS_WEIGHTS:
            self._regions[WEIGHTS].forget()
        for region in self._regions.values():
            region.unmap()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def move(loaded: LoadedModel, ranks: Division | None = None, driver: Driver | None = None) -> None:
    """Moves a loaded verifier's weights to memory that a sleep can give back, from which KV is allocated later too.

    If a device has no such memory, KV stays in torch's memory, and the log says why.

    Args:
        ranks: processes that move their shards at the same time; None for a whole model.
    """
    memory, problem = DeviceMemory(loaded.device, driver), None
    try:
        memory.take_weights(ServedWeights(loaded))
    except (WeightsRefused, CudaError) as error:
        problem = str(error)
    problem = problem if ranks is None else ranks.agree(problem)
    if problem is not None:
        logger.warning("/sleep will be refused: the weights cannot move to memory that can be given back: %s", problem)
        return
    loaded.add(memory)
    loaded.pool_memory = memory.pool


def _key(tensor: Tensor) -> int:
    """Identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def _tensors_by_storage(device: torch.device) -> dict[int, list[Tensor]]:
    """Returns all tensors of a device that this process's Python objects hold, by the storage's identity."""
    found: dict[int, list[Tensor]] = {}
    for one in gc.get_objects():
        # `isinstance` would call properties of lazy objects
        if issubclass(type(one), Tensor) and one.device == device and one.layout is torch.strided:
            found.setdefault(_key(one), []).append(one)
    return found


def _move(users: list[Tensor], place: Tensor) -> None:
    """Copies a storage to uint8 memory of its size, and makes its tensors use the copy.

    If anything but these tensors still uses the old storage, it would miss later updates; the tensors then keep the old
    storage.
    """
    first, old, size = users[0], users[0].untyped_storage(), len(place)
    place.copy_(first.as_strided((old.nbytes() // first.itemsize,), (1,), 0).view(torch.uint8))
    _use(users, lambda: tensor_at(place.data_ptr(), size, place.device))
    remaining = StorageWeakRef(old)
    del old
    if not remaining.expired():
        old = torch.UntypedStorage._new_with_weak_ptr(remaining.cdata)
        _use(users, lambda: torch.empty(0, dtype=torch.uint8, device=place.device).set_(old))
        logger.warning("a weight of %d bytes has unknown users: a sleep will not free it", size)


def _use(tensors: list[Tensor], memory: Callable[[], Tensor]) -> None:
    """Makes tensors use other memory.

    Args:
        memory: returns a new uint8 tensor of the size of the tensors' storage.
    """
    for one in tensors:
        # An inference tensor remains one, because both kinds of tensors count their versions in different ways.
        with torch.inference_mode(one.is_inference()):
            whole = memory()
            whole = whole[: len(whole) // one.itemsize * one.itemsize].view(one.dtype)
            one.data = whole.as_strided(one.shape, one.stride(), one.storage_offset())
