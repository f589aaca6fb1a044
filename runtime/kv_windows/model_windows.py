"""The `ModelPart` of models with sliding windows; also determines the number of their layers' blocks."""

from dataclasses import replace

import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.kv.pool import KVCache, LayerAttention, PoolMemory, block_bytes, kv_dtype
from wingbeat.runtime.kv_windows.settings import WindowSizes
from wingbeat.runtime.kv_windows.window_blocks import WindowBlocks
from wingbeat.runtime.kv_windows.window_rows import WindowRows
from wingbeat.runtime.kv_windows.windowed_cache import WindowedCache, table_bytes
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.verifier.layers.model_part import ModelPart

MIB = 1 << 20


class ModelWindows(ModelPart):
    """The layers with sliding windows of a model.

    Args:
        layers: all layers of the model.
        dtype, device: dtype and device of the weights.
    """

    name = "windows"

    def __init__(self, layers: list[LayerAttention], dtype: torch.dtype, device: torch.device) -> None:
        self._layers, self._dtype, self._device = layers, dtype, device
        windowed = {index: layer for index, layer in enumerate(layers) if layer.sliding_window and layer.kv_size}
        self.windowed = frozenset(windowed)
        self.window = max((layer.sliding_window or 0 for layer in windowed.values()), default=0)

    def sizes(self, config: EngineConfig) -> WindowSizes:
        """Returns the numbers of blocks for an engine."""
        return WindowSizes.of(config, self.window)

    def limits(self, config: EngineConfig, name: str) -> EngineConfig:
        """See `ModelPart.limits`; decides, for a given number of KV blocks, whether layers keep windows alone."""
        sizes, given, num_blocks = self.sizes(config), config.num_window_blocks, config.num_kv_blocks
        if given and given < sizes.running:
            raise ValueError(
                f"num_window_blocks is {given}: {config.max_num_seqs} sequences with windows of {self.window} tokens "
                f"need {sizes.running}; raise it, lower max_num_seqs, or use 0"
            )
        if num_blocks is None:
            return config
        wanted = sizes.total if given is None else given
        return replace(config, num_window_blocks=wanted if wanted < num_blocks else 0)

    def budget(self, config: EngineConfig, budget: int) -> tuple[int, EngineConfig]:
        """See `ModelPart.budget`; decides whether more blocks fit if layers keep windows alone."""
        if config.num_window_blocks is None:
            wanted = self.sizes(config).total
            tried = replace(config, num_window_blocks=wanted)
            whole = block_bytes(self._layers, config.block_size, kv_dtype(config, self._dtype))
            left = budget - self.fixed_kv_bytes(tried)
            config = replace(config, num_window_blocks=wanted if left // self.block_bytes(tried, whole) > wanted else 0)
        return budget - self.fixed_kv_bytes(config), config

    def block_bytes(self, config: EngineConfig, num_bytes: int) -> int:
        """See `ModelPart.block_bytes`; a block also has an entry in each of the tables of `WindowedCache`."""
        if not config.num_window_blocks:
            return num_bytes
        return num_bytes - self._own_bytes(config) + table_bytes(config.block_size)

    def fixed_kv_bytes(self, config: EngineConfig) -> int:
        """See `ModelPart.fixed_kv_bytes`."""
        return self._num_places(config) * self._own_bytes(config)

    def memory_note(self, config: EngineConfig) -> str:
        """See `ModelPart.memory_note`."""
        own = f"{len(self.windowed)} layers with windows of {self.window} tokens keep"
        num_places, num_blocks = self._num_places(config), config.num_kv_blocks
        if not num_places:
            return f"{own} whole contexts, because {config.max_num_seqs} windows would take as much memory"
        saved = (num_blocks - num_places) * self._own_bytes(config) / MIB
        return f"{own} {num_places * config.block_size} tokens: {saved:.0f} MiB less"

    def make_cache(self, config: EngineConfig, memory: PoolMemory | None) -> KVCache | None:
        """See `ModelPart.make_cache`."""
        num_places, num_blocks = self._num_places(config), config.num_kv_blocks
        if not num_places or num_blocks is None:
            return None
        num_reached = -(-(self.window - 1) // config.block_size)
        blocks = WindowBlocks(num_blocks, num_places, num_reached, self.sizes(config).num_spare)
        return WindowedCache(self.windowed, blocks, self._layers, config, self._dtype, self._device, memory)

    def feature(
        self, slots: SlotState, config: EngineConfig, blocks: BlockManager, cache: KVCache
    ) -> WindowRows | None:
        """See `ModelPart.feature`; None if all layers keep whole contexts."""
        if not isinstance(cache, WindowedCache):
            return None
        return WindowRows(cache, cache.beside, config, self.window)

    def _num_places(self, config: EngineConfig) -> int:
        wanted, num_blocks = config.num_window_blocks or 0, config.num_kv_blocks
        return wanted if num_blocks is None else min(wanted, num_blocks)

    def _own_bytes(self, config: EngineConfig) -> int:
        own = [self._layers[layer] for layer in self.windowed]
        return block_bytes(own, config.block_size, kv_dtype(config, self._dtype))
