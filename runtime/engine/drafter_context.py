"""Supplies context that a drafter lacks: from recordings of saved prefixes, or by replays within spare token budget."""

import torch
from torch import Tensor

from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.round.flight import RoundInFlight
from wingbeat.runtime.round.rows import Feature
from wingbeat.runtime.scheduling.plan import length_of
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


class RecordedContexts:
    """Taps of saved prefixes, for drafters that have not processed these prefixes.

    The verifier then need not recompute the taps.

    Args:
        taps_size: number of elements of taps per position; may be 0.
        dtype: dtype of the taps.
    """

    def __init__(self, block_manager: BlockManager, taps_size: int, dtype: torch.dtype) -> None:
        self.taps_size = taps_size
        self.dtype = dtype
        self._block_manager = block_manager
        self.recording: dict[str, list[Tensor]] = {}
        """Taps of the prompt chunks computed so far, by id of the request being recorded; empty if no request is
        recorded."""
        self._kept: dict[bytes, Tensor] = {}
        """Taps [num_tokens, taps_size] on the host, by hash of the prefix's last block."""

    def record(self, request_id: str) -> None:
        """Starts recording the taps of a request's prompt, no token of which may come from the prefix cache."""
        self.recording[request_id] = []

    def end_recording(self, request_id: str) -> Tensor:
        """Ends a recording and returns taps [num_tokens, taps_size] on the host."""
        return torch.cat([self._nothing(), *self.recording.pop(request_id, [])])

    def keep(self, block_hash: bytes, taps: Tensor) -> None:
        """Keeps the taps of a prefix, keyed by the hash of the prefix's last block."""
        self._kept[block_hash] = taps

    def forget(self, block_hash: bytes) -> None:
        """Drops the taps of a prefix; no error if there are none."""
        self._kept.pop(block_hash, None)

    def find(self, seq: Sequence) -> Tensor | None:
        """Returns the taps of the longest kept prefix among a sequence's computed blocks, else None."""
        if not self._kept:
            return None
        for index in reversed(range(seq.num_computed // self._block_manager.block_size)):
            found = self._kept.get(self._block_manager.block_hash(seq.blocks[index]))
            if found is not None:
                return found
        return None

    def launched(self, flight: RoundInFlight) -> None:
        """Copies to the host the taps of chunks whose requests are being recorded."""
        begin = 0
        for chunk in flight.plan.chunks:
            rows = slice(begin, begin + chunk.length)
            begin = rows.stop
            parts = self.recording.get(chunk.seq.request.request_id)
            if parts is None or chunk.replay:
                continue
            if chunk.start == 0:  # the request was preempted and restarts
                parts.clear()
            taps = flight.chunk_taps
            empty = self._nothing(chunk.length)
            parts.append(empty if taps is None else taps[rows].to("cpu", copy=True))

    def _nothing(self, length: int = 0) -> Tensor:
        return torch.zeros(length, self.taps_size, dtype=self.dtype)


def begin_following(
    seq: Sequence, blocks: BlockManager, incarnation: int, contexts: RecordedContexts, stateless: bool
) -> None:
    """Makes the drafter follow a sequence. Context that the drafter lacks is taken from recordings, or replayed later.

    Args:
        stateless: whether the drafter needs no context.
    """
    draft = seq.draft
    draft.followed, draft.may_be_followed = True, False
    for index, block in enumerate(seq.blocks):
        filled = blocks.draft_filled(block, incarnation)
        draft.length = min(index * blocks.block_size + filled, seq.num_computed)
        if filled < blocks.block_size:
            break
    # The drafter has not received the tokens of rounds in flight.
    draft.complete = stateless or (draft.length == seq.num_computed and not seq.in_flight)
    if not draft.complete:
        draft.recorded = contexts.find(seq)


def advance(seq: Sequence, draft_len: int, blocks: BlockManager, incarnation: int) -> None:
    """Records that the drafter's KV of a sequence reaches `draft_len`.

    The length is also recorded in the blocks, for other sequences that share the prefix.
    """
    size = blocks.block_size
    for index in range(seq.draft.length // size, -(-draft_len // size)):
        blocks.set_draft_filled(seq.blocks[index], incarnation, min(size, draft_len - index * size))
    seq.draft.length = draft_len


def with_replays(plan: SchedulerOutput, features: tuple[Feature, ...]) -> SchedulerOutput:
    """Adds chunks that replay context which the drafter lacks, for the oldest sequences first.

    The last chunk of a replay must end at the sequence's current length. The host does not have that length while a
    round is in flight, so a sequence that needs only the last chunk of its replay skips this round.

    Args:
        features: features of the engine; each feature may move the position at which a replay begins.
    """
    budget = plan.budget_left
    chunks: list[Chunk] = []
    held: list[Sequence] = []
    for seq in plan.decodes:
        draft = seq.draft
        if draft.complete or draft.is_recorded or not draft.followed or not budget:
            continue
        start: int | None = seq.draft.length
        for feature in features:
            start = None if start is None else feature.replay_start(seq, start)
        if start is None:
            continue
        seq.draft.length = start
        missing = seq.num_computed - start
        if missing <= budget and seq.in_flight:
            held.append(seq)
        else:
            length = length_of(seq, start, min(missing, budget))
            chunks += [Chunk(seq, start, length, replay=True)] if length else []
            budget -= length
    if not chunks and not held:
        return plan
    decodes = [seq for seq in plan.decodes if seq not in held] if held else plan.decodes
    return plan._replace(decodes=decodes, chunks=plan.chunks + chunks, budget_left=budget)
