"""Memory of an engine that a sleep gives back: keys and values, and the weights."""

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from wingbeat.kernels.cuda_driver import CudaError
from wingbeat.kernels.foreign_memory import tensor_at
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.rollouts.host_pages import give_back
from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused
from wingbeat.runtime.rollouts.virtual_memory import Driver, Region
from wingbeat.runtime.verifier.backend import Backend
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.model_part import ModelPart
from wingbeat.runtime.verifier.model import VerifierModel

if TYPE_CHECKING:
    from wingbeat.runtime.engine.engine import Engine

logger = logging.getLogger(__name__)
KV, WEIGHTS = "kv_cache", "weights"
TAGS = (WEIGHTS, KV)
"""Kinds of memory that a sleep frees and that a wake-up can restore separately."""
CHUNK_BYTES = 1 << 28
"""Bytes of weights that are moved together. While the weights move, this much memory is in use twice."""


class SleepMemory(Protocol):
    """Memory of an engine that can be given back between two rounds."""

    problem: str | None
    """Reason why the memory cannot be given back; None if it can."""

    def free(self, level: int) -> set[str]:
        """Gives memory back; returns its kinds, from TAGS. At level 1 the contents of the weights are kept.

        Raises:
            MemoryError: the host has not enough memory for the weights; nothing was given back.
        """
        ...

    def restore(self, tag: str) -> None:
        """Takes memory of this kind again.

        Raises:
            CudaError: the device has not enough memory.
        """
        ...


class HostMemory:
    """Memory of an engine on a CPU. Its weights stay where they are at level 1."""

    problem = None

    def __init__(self, engine: "Engine", weights: ServedWeights) -> None:
        self._layers, self._weights = engine.cache.layers, weights

    def free(self, level: int) -> set[str]:
        """See `SleepMemory.free`."""
        give_back(tensor for pair in self._layers for tensor in pair)
        if level == 1:
            return {KV}
        give_back(self._weights.storages())
        return {KV, WEIGHTS}

    def restore(self, tag: str) -> None:
        """See `SleepMemory.restore`; pages of the host come back when they are written."""


class FixedMemory:
    """Memory of an engine that cannot be given back."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def free(self, level: int) -> set[str]:
        """See `SleepMemory.free`; never called."""
        raise RuntimeError(self.problem)

    def restore(self, tag: str) -> None:
        """See `SleepMemory.restore`."""


class DeviceMemory(ModelPart):
    """Memory of an engine on a GPU, at addresses that outlast a sleep, so that captured graphs do too."""

    name = "sleep"
    problem = None

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        self._device = device
        self._regions = {tag: Region(device, driver) for tag in TAGS}

    @property
    def mapped_bytes(self) -> int:
        """See `ModelPart.mapped_bytes`."""
        return sum(region.num_bytes for region in self._regions.values())

    def pool(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Returns zero tensors for keys and values, see `KVCache`."""
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

    def free(self, level: int) -> set[str]:
        """See `SleepMemory.free`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._regions[WEIGHTS].sleep(saves=level == 1)
        self._regions[KV].sleep(saves=False)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return set(TAGS)

    def restore(self, tag: str) -> None:
        """See `SleepMemory.restore`."""
        self._regions[tag].wake()


class SleepingBackend(Backend):
    """Runs the verifier by torch, over keys and values in memory that a sleep can give back."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def parts(
        self, loaded: LoadedModel, config: EngineConfig, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]
    ) -> tuple[VerifierModel, KVCache]:
        """See `Backend.parts`."""
        model = VerifierModel(loaded, tap_layers, kv_layers)
        return model, loaded.make_cache(config, self._memory.pool)


def memory_of(engine: "Engine", weights: ServedWeights) -> SleepMemory:
    """Returns the memory of an engine."""
    loaded = engine.loaded
    if not weights.are_whole:
        return FixedMemory("a sleep cannot free the memory of several ranks: pause the engine instead")
    if loaded.device.type == "cpu":
        return HostMemory(engine, weights)
    held = loaded.parts.get(DeviceMemory.name)
    if isinstance(held, DeviceMemory):
        return held
    return FixedMemory("a sleep cannot free this GPU's memory, as the log of the start says: pause the engine instead")


def open_sleeping(loaded: LoadedModel, driver: Driver | None = None) -> Backend:
    """Moves a loaded verifier's weights to memory that a sleep can give back; returns the backend for its engine.

    If the device has no such memory, the backend is torch's, and the log says why.
    """
    memory = DeviceMemory(loaded.device, driver)
    try:
        memory.take_weights(ServedWeights(loaded))
    except WeightsRefused:  # refused again, with this reason, when the engine is served
        return Backend()
    except CudaError as error:
        logger.warning("/sleep will be refused: the weights cannot move to memory that can be given back: %s", error)
        return Backend()
    loaded.add(memory)
    return SleepingBackend(memory)


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
