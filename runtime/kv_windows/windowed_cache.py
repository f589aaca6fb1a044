"""The KV pool of a model in which layers with sliding windows have fewer blocks than the other layers."""

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import move_kv, pool_table
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache, LayerAttention, PoolMemory
from wingbeat.runtime.kv_windows.window_blocks import NO_PLACE, WindowBlocks
from wingbeat.runtime.protocol.transfer import upload


def table_bytes(block_size: int) -> int:
    """Returns the bytes of a block's entries in the device's tables."""
    return (1 + 2 * block_size) * torch.int64.itemsize


class WindowedCache(KVCache):
    """KV cache whose block ids lead, in some layers, to other blocks.

    Args:
        windowed: the layers with sliding windows.
        blocks: their bookkeeping.
        layers, config, dtype, device, memory: see `KVCache`.
    """

    def __init__(
        self,
        windowed: frozenset[int],
        blocks: WindowBlocks,
        layers: list[LayerAttention],
        config: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
        memory: PoolMemory | None,
    ) -> None:
        super().__init__(layers, config, dtype, device, memory, dict.fromkeys(windowed, blocks.num_places))
        self.windowed, self.beside = windowed, blocks
        self.of_windows = {layer: self.tensors[layer] for layer in sorted(windowed)}
        """Keys and values, by layer, of the layers with windows."""
        self._stored = [held for held in self.prefix_layers.values() if held[0].numel()]
        self.table = pool_table(self._stored)
        self._own_table = pool_table(list(self.of_windows.values()))
        self.places = torch.zeros(self.num_blocks, dtype=torch.int64, device=device)
        """int64 [num_blocks]: place of each block; captured graphs read this memory, and `slots`."""
        self.slots = torch.zeros(self.num_blocks * self.block_size, dtype=torch.int64, device=device)
        """int64 [num_blocks * block_size]: address in layers with windows, by address in the other layers."""
        self.replay_slots = torch.zeros_like(self.slots)
        """As `slots`, for rows of replays: 0 for blocks that keep their contents."""
        self._offsets = torch.arange(self.block_size, device=device)

    @property
    def prefix_layers(self) -> dict[int, tuple[Tensor, ...]]:
        """See `KVCache.prefix_layers`."""
        return {layer: held for layer, held in enumerate(self.tensors) if layer not in self.windowed}

    @property
    def table_bytes(self) -> int:
        """Bytes of the device's tables."""
        return self.num_blocks * table_bytes(self.block_size)

    def own_pools(self) -> None:
        """Returns None, because addresses differ by layer."""

    def move(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """See `KVCache.move`."""
        super().move(from_slots, to_slots)
        move_kv(list(self.of_windows.values()), self.slots[from_slots], self.slots[to_slots], self._own_table)

    def write_places(self) -> None:
        """Brings the device's tables up to date with the bookkeeping; called before a round is enqueued."""
        changed, self.beside.changed = self.beside.changed, {}
        if changed:
            hollow = [place if block_id in self.beside.hollow else NO_PLACE for block_id, place in changed.items()]
            ids, places, hollow = upload([list(changed), list(changed.values()), hollow], self.places.device)
            self.places[ids] = places
            for slots, written in ((self.slots, places), (self.replay_slots, hollow)):
                slots.view(-1, self.block_size)[ids] = written[:, None] * self.block_size + self._offsets
