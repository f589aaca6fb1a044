"""Memory of an engine that a sleep gives back: keys and values, and the weights. All ranks change together."""

import ctypes
import mmap
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from wingbeat.kernels.cuda_driver import CudaError
from wingbeat.runtime.rollouts.served_weights import ServedWeights
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier_errors import BackendLost


def give_back(tensors: Iterable[Tensor]) -> int:
    """Gives the memory of host tensors' pages back to the system; returns the number of bytes.

    The tensors keep their addresses and read as zeros afterwards.
    """
    madvise, total = ctypes.CDLL(None, use_errno=True).madvise, 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (storage.data_ptr() + storage.nbytes() - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed: memory is not returned to the system")
            total += size
    return total


KV, WEIGHTS = "kv_cache", "weights"
TAGS = (WEIGHTS, KV)
"""Kinds of memory that a sleep frees and that a wake-up can restore separately."""
SLEEP, WAKE = "sleep", "wake"
"""Changes of memory: to a level of sleep, and the wake-up of a tag."""
KEEPS_WEIGHTS = 1
"""Level of sleep that keeps the contents of the weights."""
PART = "sleep"
"""Key in `LoadedModel.parts` of memory on a GPU that can be given back."""


class SleepMemory:
    """Memory of an engine that can be given back between two rounds.

    A change has two steps, so that all ranks of an engine can change or none: `prepare` may fail, and afterwards the
    change is either carried out or cancelled.
    """

    problem: str | None = None
    """Reason why the memory cannot be given back; None if it can."""

    def free(self, level: int) -> None:
        """Gives memory back. At level 1 the contents of the weights are kept.

        Raises:
            MemoryError: the host has not enough memory for the weights; nothing was given back.
            BackendLost: a rank is gone or has failed.
        """
        self._change(SLEEP, level)

    def restore(self, tag: str) -> None:
        """Takes memory of this kind again.

        Raises:
            CudaError: the device has not enough memory; nothing was taken.
            BackendLost: a rank is gone or has failed.
        """
        self._change(WAKE, tag)

    def freed(self, level: int) -> set[str]:
        """Returns the kinds of memory, from TAGS, that a sleep of this level gives back."""
        return set(TAGS)

    def prepare(self, change: str, what: int | str) -> None:
        """Takes the memory that a change needs; if this method raises, nothing was taken."""

    def cancel(self, change: str, what: int | str) -> None:
        """Gives back what `prepare` has taken."""

    def carry_out(self, change: str, what: int | str) -> None:
        """Makes a prepared change; never called if there is a `problem`."""
        raise RuntimeError(self.problem)

    def _change(self, change: str, what: int | str) -> None:
        self.prepare(change, what)
        self.carry_out(change, what)


class HostMemory(SleepMemory):
    """Memory of an engine on a CPU. Its weights stay where they are at level 1."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], weights: ServedWeights) -> None:
        self._layers, self._weights = layers, weights

    def freed(self, level: int) -> set[str]:
        """See `SleepMemory.freed`."""
        return {KV} if level == KEEPS_WEIGHTS else set(TAGS)

    def carry_out(self, change: str, what: int | str) -> None:
        """See `SleepMemory.carry_out`; pages of the host come back when they are written."""
        if change == SLEEP:
            give_back(tensor for pair in self._layers for tensor in pair)
            if what != KEEPS_WEIGHTS:
                give_back(self._weights.storages())


class FixedMemory(SleepMemory):
    """Memory of an engine that cannot be given back."""

    def __init__(self, problem: str) -> None:
        self.problem = problem


class RankMemory(SleepMemory):
    """Memory of an engine over several ranks, which all change or none.

    Args:
        own: memory of rank 0.
        together: see `WeightShards.change_memory`.
    """

    def __init__(
        self, own: SleepMemory, together: Callable[[tuple[str, str, int | str], Callable[[], object]], str | None]
    ) -> None:
        self.problem = own.problem
        self._own, self._together = own, together

    def freed(self, level: int) -> set[str]:
        """See `SleepMemory.freed`."""
        return self._own.freed(level)

    def _change(self, change: str, what: int | str) -> None:
        problem = self._step("prepare", change, what)
        if problem is None:
            problem = self._step("carry_out", change, what)
            if problem is not None:
                raise BackendLost(f"ranks hold different memory after a failed {change}: {problem}")
            return
        if (worse := self._step("cancel", change, what)) is not None:
            raise BackendLost(f"ranks hold different memory after a failed {change}: {worse}")
        raise (MemoryError if change == SLEEP else CudaError)(problem)

    def _step(self, step: str, change: str, what: int | str) -> str | None:
        return self._together((step, change, what), lambda: take_step(self._own, step, change, what))


def take_step(memory: SleepMemory, step: str, change: str, what: int | str) -> None:
    """Calls a method of `SleepMemory` by its name: `prepare`, `cancel` or `carry_out`."""
    {"prepare": memory.prepare, "cancel": memory.cancel, "carry_out": memory.carry_out}[step](change, what)


def own_memory(loaded: LoadedModel, layers: Sequence[tuple[Tensor, Tensor]]) -> SleepMemory:
    """Returns the memory of this process, which holds a verifier or one rank's shard, and these layers' KV."""
    held = loaded.parts.get(PART)
    if isinstance(held, SleepMemory):
        return held
    if loaded.device.type == "cpu":
        return HostMemory(layers, ServedWeights(loaded))
    return FixedMemory("a sleep cannot free this GPU's memory, as the log of the start says: pause the engine instead")


def memory_of(loaded: LoadedModel, layers: Sequence[tuple[Tensor, Tensor]]) -> SleepMemory:
    """Returns the memory of an engine whose KV these layers hold."""
    own, shards = own_memory(loaded, layers), loaded.shards
    return own if shards is None or shards.change_memory is None else RankMemory(own, shards.change_memory)
