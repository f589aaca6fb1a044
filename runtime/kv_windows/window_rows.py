"""Feature of rounds: holds the blocks that windows reach, and gives layers with windows their own addresses."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import IntegrityError
from wingbeat.runtime.kv_windows.window_blocks import WindowBlocks
from wingbeat.runtime.kv_windows.windowed_cache import WindowedCache
from wingbeat.runtime.round.rows import Elsewhere, KeepingFeature, Rows
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


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
