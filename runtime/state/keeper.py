"""Manages the recurrent states of an engine's sequences: the pool row of each slot, and states saved for prefixes.

A state cannot be rolled back, so a state advances only by decided tokens. Prompt chunks advance states in their own
pass. A tree is verified from the state before its root; that state stays unchanged, and the mixers' inputs for the
tree's nodes are kept. Once the accepted path is known, the states advance along that path on the device, in the graph
that chooses the tokens, so that the next round can be launched before the host has this round's result.

States at some lengths are saved for other requests. The pool rows for such states are assigned before the round, for
every length that the round may reach, and stored in per-slot columns. If a block is released before it is full, the row
assigned to the block becomes free again.

In a replay, the verifier recomputes context for a drafter that lacks this context. A replay starts from the zero state
or from a saved state, in a row of its own.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import KeepingFeature, Placed
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.state.mixer import Mixer, states_of
from wingbeat.runtime.state.pool import StatePool
from wingbeat.runtime.state.round_states import AcceptedStates, DecodeStates, KeptRows, Piece, RoundStates

_ROUNDS_AHEAD = 3
"""Number of rounds whose tokens the host may not know when rows are assigned: two rounds in flight, and the next
round.
"""


class _Replay(NamedTuple):
    """A drafter's replay in progress."""

    seq: Sequence
    length: int
    """Number of tokens that the replay's state covers."""
    row: int
    """Index of the state's row among the rows of saved states."""


class StateKeeper(KeepingFeature):
    """Owner of the states of one engine. Pool rows: one per slot, one spare row, then saved states.

    Args:
        mixers: mixers of the model's layers, on their device.
        block_manager: the block manager, whose attribute `beside` is the `SavedStates` object that tracks the saved
            rows.
    """

    kind = RoundStates
    captures = False

    def __init__(
        self, mixers: tuple[Mixer, ...], config: EngineConfig, block_manager: BlockManager, device: torch.device
    ) -> None:
        self.mixers = mixers
        self.config = config
        self.block_manager = block_manager
        self.saved = block_manager.beside
        self.device = device
        self._spare = config.max_num_seqs
        self._first_saved = self._spare + 1
        self.pool = StatePool(states_of(mixers), self._first_saved + self.saved.num_rows, device)
        self.held_bytes = self.pool.num_rows * self.pool.row_bytes
        self.kept_bytes = self.pool.row_bytes
        self.marks: dict[str, int] = {}
        self._replays: dict[int, _Replay] = {}
        self._kept = KeptRows()
        self._longest = config.speculation.max_path
        self._chains = config.speculation.draft_top_k == 1
        self._window = max((part.shape[-1] for part in self.pool.stacks if not part.recurrent), default=1)
        self._on_host = False
        ends = 1 + _ROUNDS_AHEAD * self._longest // self.saved.interval
        self._targets = torch.full((self._first_saved, ends), self._spare, device=device)
        """int64 [num_slots + 1, n]: pool rows for the states at the interval ends that each slot may reach; the n
        columns are used cyclically.
        """
        self._reserved: dict[int, tuple[int, int]] = {}
        """By number of a row for saved states: the index in `_targets` of the entry that refers to this row."""
        self._reach = [0] * config.max_num_seqs
        """By slot, the length up to which rows are assigned."""

    def admit(self, seq: Sequence) -> None:
        """Sets the state of a sequence's slot to the state after the sequence's cached tokens."""
        slot, length = seq.slot, seq.num_computed
        if length:
            block_hash = self.block_manager.block_hash(seq.blocks[length // self.config.block_size - 1])
            self.pool.copy_all(self._first_saved + self.saved.find(block_hash), slot)
        else:
            self.pool.clear(slot)
        self._reach[slot] = length

    def leave(self, slot: int) -> None:
        """Ends the replay of a slot whose sequence leaves."""
        self._end_replay(slot)

    def kept(self, blocks: SequenceOf[int]) -> dict[str, Tensor]:
        """See `KeepingFeature.kept`; returns the saved state."""
        return self.pool.row(self._first_saved + self.saved.find(self.block_manager.block_hash(blocks[-1])))

    def put(self, blocks: SequenceOf[int], parts: dict[str, Tensor]) -> bool:
        """See `KeepingFeature.put`."""
        row = self.saved.allocate_row(blocks[-1])
        if row is not None:
            for name, part in self.pool.row(self._first_saved + row).items():
                part.copy_(parts[name])
        return row is not None

    def kept_like(self, num_blocks: int) -> dict[str, Tensor]:
        """See `KeepingFeature.kept_like`."""
        return self.pool.row(0)

    def replay_start(self, seq: Sequence, wanted: int) -> int | None:
        """Returns a position at or before `wanted` from which a replay can start.

        Returns None if no row is free for the replay's state.
        """
        replay = self._replays.get(seq.slot)
        if replay is not None:
            if replay.length == wanted:
                return wanted
            self._end_replay(seq.slot)
        row = self.saved.lend()
        if row is None:
            return None
        blocks = seq.blocks[: wanted // self.config.block_size]
        del blocks[self.saved.num_usable(blocks, [self.block_manager.block_hash(block_id) for block_id in blocks]) :]
        if blocks:
            found = self.saved.find(self.block_manager.block_hash(blocks[-1]))
            self.pool.copy_all(self._first_saved + found, self._first_saved + row)
        else:
            self.pool.clear(self._first_saved + row)
        start = len(blocks) * self.config.block_size
        self._replays[seq.slot] = _Replay(seq, start, row)
        return start

    def reserve(self, num_rows: int) -> None:
        """See `Feature.reserve`."""
        self._kept.capacity = num_rows

    def prepare(self, plan: SchedulerOutput) -> None:
        """Assigns pool rows to states that this round's decodes may save, and frees the rows of completed replays."""
        for slot in [slot for slot, replay in self._replays.items() if replay.seq.draft.complete]:
            self._end_replay(slot)
        for seq in plan.decodes:
            position, size = max(self._reach[seq.slot], seq.num_computed), len(seq.blocks) * self.config.block_size
            while (end := self.saved.next_end(position, min(seq.max_len - 1 + self._longest, size))) is not None:
                place, row = (seq.slot, end // self.saved.interval % self._targets.shape[1]), self._saved_row(seq, end)
                self._targets[place].fill_(self._spare if row is None else self._first_saved + row)
                if row is not None:
                    self._reserved[row] = place
                self._reach[seq.slot] = position = end

    def column(self, placed: Placed) -> RoundStates:
        """Returns the states of the round's decodes and prompt chunks, for the mixers."""
        plan, own, pieces = placed.plan, placed.decodes, []
        start = 0 if own is None else own.num_rows
        for chunk in () if plan is None else plan.chunks:
            pieces += self._pieces(chunk, start)
            start += chunk.length
        self._on_host = placed.on_host
        decodes = None if own is None else DecodeStates(own, self._longest, self._window, self._chains)
        return RoundStates(self.pool, self._kept, decodes, pieces)

    @contextmanager
    def entered(self, column: RoundStates | None, inputs: dict[str, Any]) -> Iterator[None]:
        """See `Feature.entered`; outside of a round, each mixer runs transformers' code."""
        for mixer in self.mixers:
            mixer.states = column
        try:
            yield
        finally:
            for mixer in self.mixers:
                mixer.states = None

    @torch.inference_mode()
    def took(self, accepted: AcceptedPaths) -> None:
        """Advances states along the accepted paths."""
        num_nodes = 1 if accepted.tree_parents is None else accepted.tree_parents.shape[1]
        saves = tuple(self._saves(accepted)) if self.saved.enabled else ()
        own = AcceptedStates(accepted.slots, num_nodes, accepted.nodes, accepted.num_tokens, saves, self._spare)
        path = own.path()
        for mixer in self.mixers:
            mixer.advance(self.pool, self._kept, own, path)

    def _saves(self, accepted: AcceptedPaths) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields `AcceptedStates.saves`: one entry for each interval end that a path may pass."""
        interval, before = self.saved.interval, accepted.positions
        targets = self._targets[accepted.slots]
        for end in range(1 + (accepted.nodes.shape[1] - 1) // interval):
            number = before // interval + 1 + end
            num_tokens = number * interval - before
            row = targets.gather(1, (number % targets.shape[1])[:, None])[:, 0]
            rows = torch.where(num_tokens <= accepted.num_tokens, row, self._spare)
            # On the host, reading the tensor needs no wait, and few rounds pass an interval end, so most rounds yield
            # nothing.
            if not self._on_host or bool((rows != self._spare).any()):
                yield num_tokens.clamp(max=accepted.nodes.shape[1]), rows

    def _pieces(self, chunk: Chunk, row: int) -> list[Piece]:
        """Splits a chunk's rows, the first of which is `row`, at the lengths at which states are saved."""
        seq, position, end = chunk.seq, chunk.start, chunk.start + chunk.length
        if chunk.replay:
            replay = self._replays[seq.slot]
            if replay.length != position:
                raise RuntimeError(f"the replay of slot {seq.slot} is at {replay.length}, not at {position}")
            self._replays[seq.slot] = replay._replace(length=end)
            return [Piece(row, chunk.length, upload([self._first_saved + replay.row], self.device))]
        live, pieces = upload([seq.slot], self.device), []
        while position < end:
            kept = self._next_end(seq, position, end)
            stop, save = end if kept is None else kept, None
            if kept is not None and (saved := self._saved_row(seq, kept)) is not None:
                save = upload([self._first_saved + saved], self.device)
            pieces.append(Piece(row, stop - position, live, save))
            row, position = row + stop - position, stop
        return pieces

    def _next_end(self, seq: Sequence, position: int, end: int) -> int | None:
        """Returns the first prompt length in (position, end] at which the state is saved; None if there is none."""
        regular, mark = self.saved.next_end(position, end), self.marks.get(seq.request.request_id, 0)
        if self.saved.enabled and position < mark <= end:
            return mark if regular is None else min(mark, regular)
        return regular

    def _saved_row(self, seq: Sequence, length: int) -> int | None:
        """Returns the row in which to save the state after a sequence's first `length` tokens.

        Cancels other writes to that row.
        """
        row = self.saved.allocate_row(seq.blocks[length // self.config.block_size - 1])
        if (place := self._reserved.pop(row, None)) is not None:
            current = self._targets[place]
            current.copy_(torch.where(current == self._first_saved + row, self._spare, current))
        return row

    def _end_replay(self, slot: int) -> None:
        replay = self._replays.pop(slot, None)
        if replay is not None:
            self.saved.give_back(replay.row)
