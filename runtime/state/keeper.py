"""The recurrent states of an engine's sequences: which row is whose, how far each one is, and which ones are kept.

A state cannot be taken back, so it goes on only by tokens that are decided. Prompt chunks and bare roots let it go on
in their own pass. A tree is verified from the state before its root, which stays as it is: its paths run as chains from
there. Once the accepted path is known, the mixers alone run over that path again, with the rows they were given in the
pass kept: nothing outside of them is computed twice. That happens when the round is settled, which is after the drafter
was told of it and while it drafts.

A drafter's replay needs states of long ago. It starts at zero or at a state that was kept, in a row of its own.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.round.rows import Decodes, Feature, Placed
from wingbeat.runtime.scheduling.scheduler import Chunk
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.state.mixer import Mixer, states_of
from wingbeat.runtime.state.pool import Saves, StatePool
from wingbeat.runtime.state.round_states import AcceptedStep, DecodePaths, Piece, RoundStates


class _Replay(NamedTuple):
    """A drafter's replay on its way."""

    seq: Sequence
    epoch: int
    length: int
    """Tokens in its state."""
    row: int
    """Of the saved states."""

    @property
    def goes_on(self) -> bool:
        """Whether more of it may come."""
        return self.seq.slot >= 0 and self.seq.epoch == self.epoch and not self.seq.draft.complete


class StateKeeper(RoundObserver, Feature):
    """Owner of the states of one engine. Rounds must be settled one by one.

    Args:
        mixers: of the model's layers, on their device.
        block_manager: its `states` say which are kept; rows of sequences come first in the pool.
    """

    kind = RoundStates

    def __init__(
        self, mixers: tuple[Mixer, ...], config: EngineConfig, block_manager: BlockManager, device: torch.device
    ) -> None:
        self.mixers = mixers
        self.config = config
        self.block_manager = block_manager
        self.saved = block_manager.states
        self.device = device
        self._first_saved = config.max_num_seqs
        self.pool = StatePool(states_of(mixers), self._first_saved + self.saved.num_rows, device)
        self.marks: dict[str, int] = {}
        """By request, another length of its prompt at which the state is kept: where a saved prefix ends."""
        self._lengths = [0] * config.max_num_seqs
        self._replays: dict[int, _Replay] = {}
        self._round: RoundStates | None = None
        self._rows: Tensor | None = None
        """int64 [num_decodes, num_nodes]: rows of the round's nodes; None where its states have gone on already."""

    def admit(self, seq: Sequence) -> None:
        """Let a slot's state be that of the sequence's cached tokens."""
        slot, length = seq.slot, seq.num_computed
        self._end_replay(slot)
        if length:
            block_hash = self.block_manager.block_hash(seq.blocks[length // self.config.block_size - 1])
            self.pool.copy_all(self._first_saved + self.saved.find(block_hash), slot)
        else:
            self.pool.clear(slot)
        self._lengths[slot] = length

    def kept(self, block_id: int) -> dict[str, Tensor]:
        """The state behind a cached block, by the names of its parts.

        Raises:
            KeyError: it is not kept.
        """
        return self.pool.row(self._first_saved + self.saved.find(self.block_manager.block_hash(block_id)))

    def put(self, block_id: int, parts: dict[str, Tensor]) -> bool:
        """Keep a state behind a live block that is not cached yet; False where there is no row for it."""
        row = self.saved.take(block_id)
        if row is not None:
            for name, part in self.pool.row(self._first_saved + row).items():
                part.copy_(parts[name])
        return row is not None

    def replay_start(self, seq: Sequence, wanted: int) -> int | None:
        """Position at or before `wanted` from which a replay can go on; None where there is no row for its state."""
        replay = self._replays.get(seq.slot)
        if replay is not None:
            if replay.epoch == seq.epoch and replay.length == wanted:
                return wanted
            self._end_replay(seq.slot)
        row = self.saved.lend()
        if row is None:
            return None
        blocks = seq.blocks[: wanted // self.config.block_size]
        while blocks and not self.saved.has(self.block_manager.block_hash(blocks[-1])):
            blocks.pop()
        if blocks:
            found = self.saved.find(self.block_manager.block_hash(blocks[-1]))
            self.pool.copy_all(self._first_saved + found, self._first_saved + row)
        else:
            self.pool.clear(self._first_saved + row)
        start = len(blocks) * self.config.block_size
        self._replays[seq.slot] = _Replay(seq, seq.epoch, start, row)
        return start

    def column(self, placed: Placed) -> RoundStates:
        """What a round's mixers are told; called once for each, before it runs."""
        plan, own = placed.plan, placed.decodes
        for slot in [slot for slot, replay in self._replays.items() if not replay.goes_on]:
            self._end_replay(slot)
        for seq in plan.decodes:
            self._check(seq, len(seq.token_ids) - 1)
        decodes = None
        if plan.decodes:
            decodes = self._roots(plan.decodes) if own.tree is None else self._paths(plan.decodes, own)
        start, pieces = 0 if own is None else own.num_rows, []
        for chunk in plan.chunks:
            pieces += self._pieces(chunk, start)
            start += chunk.length
        self._round = RoundStates(self.pool, decodes, pieces)
        return self._round

    @contextmanager
    def entered(self, column: RoundStates | None, inputs: dict[str, Any]) -> Iterator[None]:
        """See `Feature.entered`: outside of a round each mixer runs on its own."""
        for mixer in self.mixers:
            mixer.states = column
        try:
            yield
        finally:
            for mixer in self.mixers:
                mixer.states = None

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """States go on along the accepted paths."""
        seqs = [seq if live else None for seq, live in zip(flight.plan.decodes, flight.live, strict=False)]
        paths = [path[: len(ids)] for path, ids in zip(result.path_nodes.tolist(), result.token_ids, strict=True)]
        self.accept(seqs, paths)

    @torch.inference_mode()
    def accept(self, seqs: list[Sequence | None], paths: list[list[int]]) -> None:
        """Let the states of the latest round go on.

        Args:
            seqs: its decodes; None where one has left.
            paths: accepted nodes of each one's tree, the root first.
        """
        this, self._round = self._round, None
        ended = [(row, seq, path) for row, (seq, path) in enumerate(zip(seqs, paths, strict=True)) if seq is not None]
        if self._rows is not None:
            rows, self._rows = self._rows.tolist(), None
            this.accepted += self._steps([(seq, [rows[row][node] for node in path]) for row, seq, path in ended])
            for mixer in self.mixers:
                mixer.advance(this)
        for _, seq, path in ended:
            self._lengths[seq.slot] += len(path)

    def abandoned(self) -> None:
        """The round's sequences are admitted again."""
        self._round = self._rows = None

    def _check(self, seq: Sequence, length: int) -> None:
        if self._lengths[seq.slot] != length:
            raise RuntimeError(f"the state of slot {seq.slot} is behind {self._lengths[seq.slot]} tokens, not {length}")

    def _roots(self, seqs: list[Sequence]) -> DecodePaths:
        """Bare roots."""
        ends = [self._lengths[seq.slot] + 1 for seq in seqs]
        saved = [(seq.slot, self._row_of(seq, end)) for seq, end in zip(seqs, ends, strict=True) if self._keeps(end)]
        live = upload([seq.slot for seq in seqs], self.device)
        return DecodePaths(live, 1, len(seqs), stores=True, saves=self._saves(saved))

    def _paths(self, seqs: list[Sequence], decodes: Decodes) -> DecodePaths:
        """Trees as chains from their root's state."""
        live = upload([seq.slot for seq in seqs], self.device)
        tree, num_rows, num_nodes = decodes.tree, decodes.num_rows, decodes.token_ids.shape[1]
        nodes = torch.arange(num_nodes, device=self.device).expand(tree.token_ids.shape)
        self._rows = rows = decodes.rows_of(nodes)
        if self.config.speculation.draft_top_k == 1:
            if decodes.packing is None:
                return DecodePaths(live, num_nodes, num_rows, stores=False)
            places = torch.arange(rows.numel(), device=self.device).view_as(rows)
            return DecodePaths(live, num_nodes, num_rows, stores=False, rows=rows, back=decodes.packed(places))
        paths = tree_paths(tree.parents.tolist(), tree.num_valid.tolist())
        owners, nodes, places = (upload(part, self.device) for part in paths)
        own_rows = rows[owners[:, None], nodes]
        return DecodePaths(live[owners], nodes.shape[1], num_rows, False, own_rows, decodes.packed(places))

    def _pieces(self, chunk: Chunk, row: int) -> list[Piece]:
        """One chunk's rows from `row` on, cut where states are kept."""
        seq, position, end = chunk.seq, chunk.start, chunk.start + chunk.length
        if chunk.replay:
            replay = self._replays[seq.slot]
            if replay.length != position:
                raise RuntimeError(f"the replay of slot {seq.slot} is at {replay.length}, not at {position}")
            self._replays[seq.slot] = replay._replace(length=end)
            return [Piece(row, chunk.length, upload([self._first_saved + replay.row], self.device))]
        self._check(seq, position)
        self._lengths[seq.slot] = end
        live, pieces = upload([seq.slot], self.device), []
        while position < end:
            kept = self._next_end(seq, position, end)
            stop = end if kept is None else kept
            saved = [] if kept is None else [(seq.slot, self._row_of(seq, kept))]
            pieces.append(Piece(row, stop - position, live, self._saves(saved)))
            row, position = row + stop - position, stop
        return pieces

    def _next_end(self, seq: Sequence, position: int, end: int) -> int | None:
        """The first length of a prompt behind `position`, at most `end`, whose state is kept."""
        regular, mark = self.saved.next_end(position, end), self.marks.get(seq.request.request_id, 0)
        if self.saved.enabled and position < mark <= end:
            return mark if regular is None else min(mark, regular)
        return regular

    def _steps(self, paths: list[tuple[Sequence, list[int]]]) -> list[AcceptedStep]:
        """Accepted rows cut where states are kept; parts of equal length that come at the same turn go together."""
        parts: dict[tuple[int, int], list[tuple[int, list[int], int | None]]] = defaultdict(list)
        for seq, rows in paths:
            start, done = self._lengths[seq.slot], 0
            for turn in count():
                if done == len(rows):
                    break
                kept = self.saved.next_end(start + done, start + len(rows))
                end = len(rows) if kept is None else kept - start
                row = None if kept is None else self._row_of(seq, kept)
                parts[turn, end - done].append((seq.slot, rows[done:end], row))
                done = end
        steps = []
        for _, group in sorted(parts.items()):
            slots, rows, saved = zip(*group, strict=True)
            saves = self._saves([(slot, row) for slot, row in zip(slots, saved, strict=True) if row is not None])
            steps.append(AcceptedStep(upload(rows, self.device), upload(slots, self.device), saves))
        return steps

    def _keeps(self, length: int) -> bool:
        return self.saved.next_end(length - 1, length) is not None

    def _row_of(self, seq: Sequence, length: int) -> int | None:
        """Row of the saved states for the one behind a sequence's first `length` tokens."""
        return self.saved.take(seq.blocks[length // self.config.block_size - 1])

    def _saves(self, rows: list[tuple[int, int | None]]) -> Saves | None:
        """(slot, row of the saved states) as rows of the pool; None where there is nothing to save."""
        found = [(slot, self._first_saved + row) for slot, row in rows if row is not None]
        if not found:
            return None
        return Saves(*upload(list(zip(*found, strict=True)), self.device))

    def _end_replay(self, slot: int) -> None:
        replay = self._replays.pop(slot, None)
        if replay is not None:
            self.saved.give_back(replay.row)


class TreePaths(NamedTuple):
    """Paths from the roots of several trees to their leaves, tree by tree."""

    owners: list[int]
    """By path: its tree."""
    nodes: list[list[int]]
    """By path: its nodes, the root first; shorter paths repeat their last one."""
    places: list[list[int]]
    """By tree and node: where it occurs in the flattened `nodes`; 0 for padding."""


def tree_paths(parents: list[list[int]], num_valid: list[int]) -> TreePaths:
    """Take trees apart.

    Args:
        parents: [num_trees, num_nodes], each before its children.
        num_valid: nodes of each tree that are no padding.
    """
    owners: list[int] = []
    paths: list[list[int]] = []
    for tree, (above, num_nodes) in enumerate(zip(parents, num_valid, strict=True)):
        inner = set(above[1:num_nodes])
        for leaf in (node for node in range(num_nodes) if node not in inner):
            path = [leaf]
            while path[-1]:
                path.append(above[path[-1]])
            owners.append(tree)
            paths.append(path[::-1])
    length = max(map(len, paths))
    places = [[0] * len(above) for above in parents]
    for index, (tree, path) in enumerate(zip(owners, paths, strict=True)):
        for depth, node in enumerate(path):
            places[tree][node] = index * length + depth
    return TreePaths(owners, [path + path[-1:] * (length - len(path)) for path in paths], places)
