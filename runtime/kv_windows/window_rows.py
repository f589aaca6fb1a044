"""Layers with sliding windows: the feature of rounds that holds the blocks which windows reach and gives these layers
their own addresses, and the `ModelPart` that determines the number of their blocks.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager, IntegrityError
from wingbeat.runtime.kv.pool import KVCache, LayerAttention, PoolMemory, block_bytes, kv_dtype
from wingbeat.runtime.kv_windows.settings import WindowSizes
from wingbeat.runtime.kv_windows.window_blocks import WindowBlocks
from wingbeat.runtime.kv_windows.windowed_cache import WindowedCache, table_bytes
from wingbeat.runtime.round.rows import Elsewhere, KeepingFeature, Rows
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.layers.model_part import ModelPart


@dataclass
class _Held:
    """Blocks whose places a running sequence, or a replay of the sequence, holds."""

    seq: Sequence
    first: int
    """Index of the first held block in the sequence's table."""
    end: int
    """Index after the last held block."""
    position: int
    """Position from which on the places are written or read next."""


class WindowRows(KeepingFeature):
    """Owner of the places of one engine's running sequences.

    Places of blocks that a window has passed are let go before each round. Rounds run in launch order, so a round in
    flight has read such a place before a later round writes to it.

    Args:
        window: largest window of the layers, in tokens.
    """

    stores_replays = True

    def __init__(self, cache: WindowedCache, blocks: WindowBlocks, config: EngineConfig, window: int) -> None:
        self.marks: dict[str, int] = {}
        self.kept_bytes = sum(
            part[0].nbytes * blocks.num_reached for pair in cache.of_windows.values() for part in pair
        )
        self.held_bytes = cache.table_bytes
        self._cache, self._blocks, self._window, self._size = cache, blocks, window, config.block_size
        self._num_nodes, self._registers = config.speculation.num_nodes, config.enable_prefix_caching
        self._by_slot: dict[int, _Held] = {}
        self._replays: dict[int, _Held] = {}

    def admit(self, seq: Sequence) -> None:
        """Holds the window before the first position that the sequence computes.

        Raises:
            IntegrityError: a block of the window has no place.
        """
        first, end = self._first(seq.num_computed), seq.num_computed // self._size
        if not self._blocks.has(seq.blocks[first:end]):
            raise IntegrityError(f"a window that ends at position {seq.num_computed} has lost blocks")
        self._blocks.hold(seq.blocks[first:end])
        self._by_slot[seq.slot] = _Held(seq, first, end, seq.num_computed)

    def leave(self, slot: int) -> None:
        """Lets go of the places of a slot whose sequence leaves."""
        for by_slot in (self._replays, self._by_slot):
            held = by_slot.pop(slot, None)
            if held is not None:
                self._blocks.let_go(held.seq.blocks[held.first : held.end], soon=False)

    def replay_start(self, seq: Sequence, wanted: int) -> int | None:
        """Returns the latest position, at most `wanted`, whose window the layers keep.

        Returns None if no window is left for a replay.
        """
        replay = self._replays.get(seq.slot)
        if replay is not None:
            if replay.position == wanted:
                return wanted
            self._end_replay(seq.slot)
        if len(self._replays) + self._blocks.num_pinned >= self._blocks.num_rows:
            return None
        start, size = wanted, self._size
        while not self._blocks.has(seq.blocks[self._first(start) : -(-start // size)]):
            start = (start - 1) // size * size
        first, end = self._first(start), -(-start // size)
        self._blocks.hold(seq.blocks[first:end])
        self._replays[seq.slot] = _Held(seq, first, end, start)
        return start

    def prepare(self, plan: SchedulerOutput) -> None:
        """Lets go of places that windows have passed, and gives places to the blocks that the round writes."""
        for slot in [slot for slot, held in self._replays.items() if held.seq.draft.complete]:
            self._end_replay(slot)
        for held in self._replays.values():
            self._blocks.filled(held.seq.blocks[held.first : held.position // self._size])
            self._pass(held, self._first(held.position))
        for held in self._by_slot.values():
            seq, first = held.seq, self._first(held.seq.num_computed)
            # A block without a place would not replace a cached block of the same prefix.
            self._pass(held, min(first, seq.num_hashed_blocks) if self._registers else first)
        for seq in plan.decodes:
            self._hold_until(self._by_slot[seq.slot], seq.max_len - 1 + self._num_nodes, self._blocks.hold)
        for chunk in plan.chunks:
            by_slot = self._replays if chunk.replay else self._by_slot
            hold = self._blocks.hold_for_replay if chunk.replay else self._blocks.hold
            self._hold_until(by_slot[chunk.seq.slot], chunk.start + chunk.length, hold)
        self._cache.write_places()

    def relocated(self, rows: Rows) -> Rows:
        """See `Feature.relocated`."""
        cache = self._cache
        segments = [segment._replace(block_tables=cache.places[segment.block_tables]) for segment in rows.segments]
        mapping = cache.slots[rows.slot_mapping]
        if rows.replayed is not None:
            mapping += cache.replay_slots[rows.replayed]
        own = rows._replace(slot_mapping=mapping, segments=segments)
        return rows._replace(elsewhere=Elsewhere(cache.windowed, own))

    def kept(self, blocks: SequenceOf[int]) -> dict[str, Tensor]:
        """See `KeepingFeature.kept`; returns keys and values of the last window."""
        reached = self._blocks.reached(blocks)
        if not self._blocks.has(reached):
            raise KeyError("layers with sliding windows no longer keep the end of the prefix")
        return {name: part[self._places(reached)].flatten(0, 1) for name, part in self._parts()}

    def kept_like(self, num_blocks: int) -> dict[str, Tensor]:
        """See `KeepingFeature.kept_like`."""
        num_positions = min(num_blocks, self._blocks.num_reached) * self._size
        return {name: part.new_empty(num_positions, *part.shape[2:], device="meta") for name, part in self._parts()}

    def put(self, blocks: SequenceOf[int], parts: dict[str, Tensor]) -> bool:
        """See `KeepingFeature.put`."""
        reached = self._blocks.reached(blocks)
        if not self._blocks.fill(reached):
            return False
        for name, part in self._parts():
            part[self._places(reached)] = parts[name].unflatten(0, (len(reached), self._size)).to(part.device)
        return True

    def _first(self, position: int) -> int:
        """Index of the first block that the window of a position reaches."""
        return max(position - self._window + 1, 0) // self._size

    def _pass(self, held: _Held, first: int) -> None:
        if first > held.first:
            self._blocks.let_go(held.seq.blocks[held.first : first], soon=True)
            held.first = first

    def _hold_until(self, held: _Held, num_positions: int, hold: Callable[[SequenceOf[int]], None]) -> None:
        blocks, held.position = held.seq.blocks, num_positions
        end = min(-(-num_positions // self._size), len(blocks))
        if end > held.end:
            hold(blocks[held.end : end])
            held.end = end

    def _end_replay(self, slot: int) -> None:
        held = self._replays.pop(slot)
        self._blocks.let_go(held.seq.blocks[held.first : held.end], soon=True)

    def _places(self, blocks: SequenceOf[int]) -> Tensor:
        places = [self._blocks.places[block_id] for block_id in blocks]
        return torch.tensor(places, device=self._cache.places.device)

    def _parts(self) -> list[tuple[str, Tensor]]:
        """Keys and values of the layers with windows by name; float8 as bytes, because torch does not index float8 on
        CPUs."""
        parts = []
        for layer, pair in self._cache.of_windows.items():
            for kind, part in zip(("keys", "values"), pair, strict=True):
                is_fp8 = part.dtype == torch.float8_e4m3fn
                parts.append((f"{layer}.{kind}", part.view(torch.uint8) if is_fp8 else part))
        return parts


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
