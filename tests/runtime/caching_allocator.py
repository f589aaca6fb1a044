"""torch's caching allocator on CUDA as a model: what tensors of any device would have it reserve, and leave unused.

The rules are those of c10/cuda/CUDACachingAllocator.cpp for large tensors: an allocation of the device is as large as
the first tensor in it, a freed part of one serves whatever fits, and what is larger by more than 1 MiB is split.
"""

from dataclasses import dataclass, field

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.fake_gpu_tensor import memory

MIB = 1 << 20
GRANULE, SPLIT_ABOVE, SHARED, SHARED_BELOW = 2 * MIB, MIB, 20 * MIB, 10 * MIB


@dataclass
class Block:
    """A part of an allocation."""

    num_bytes: int
    used: bool = True


@dataclass
class CachingAllocator(TorchDispatchMode):
    """While entered, follows the tensors that operations return, and what becomes of their memory."""

    allocations: list[list[Block]] = field(default_factory=list)
    """A list per allocation: its blocks in the order of their addresses."""
    most_unused: int = 0
    """Largest number of bytes that were reserved and unused at one moment."""

    def __post_init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, Block]] = {}

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {memory(leaf) for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "untyped_storage")}
        self._look()
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if hasattr(tensor, "untyped_storage") and memory(tensor) not in {*given, *self._held}:
                self.allocate(tensor)
        return result

    def allocate(self, tensor) -> None:
        """Reserve memory for a tensor that exists already."""
        storage = tensor.untyped_storage()
        self._held[memory(tensor)] = (StorageWeakRef(storage), self._block(max(storage.nbytes(), 1)))
        self.most_unused = max(self.most_unused, self.unused)

    def empty_cache(self) -> None:
        """Give back the allocations of which nothing is used (`torch.cuda.empty_cache`)."""
        self._look()
        self.allocations = [parts for parts in self.allocations if any(part.used for part in parts)]

    @property
    def unused(self) -> int:
        """Bytes that are reserved and unused."""
        return sum(part.num_bytes for parts in self.allocations for part in parts if not part.used)

    def _look(self) -> None:
        """Free the blocks of tensors that no longer exist, and merge free neighbours."""
        for key in [key for key, (storage, _) in self._held.items() if storage.expired()]:
            self._held.pop(key)[1].used = False
        for parts in self.allocations:
            for index in range(len(parts) - 1, 0, -1):
                if not parts[index].used and not parts[index - 1].used:
                    parts[index - 1].num_bytes += parts.pop(index).num_bytes
        self.most_unused = max(self.most_unused, self.unused)

    def _block(self, num_bytes: int) -> Block:
        free = [
            (part.num_bytes, number, index)
            for number, parts in enumerate(self.allocations)
            for index, part in enumerate(parts)
            if not part.used and part.num_bytes >= num_bytes
        ]
        if free:
            _, number, index = min(free)
            parts = self.allocations[number]
        else:
            size = SHARED if num_bytes < SHARED_BELOW else -(-num_bytes // GRANULE) * GRANULE
            parts, index = [Block(size, used=False)], 0
            self.allocations.append(parts)
        block = parts[index]
        block.used = True
        if block.num_bytes - num_bytes > SPLIT_ABOVE:
            parts.insert(index + 1, Block(block.num_bytes - num_bytes, used=False))
            block.num_bytes = num_bytes
        return block
