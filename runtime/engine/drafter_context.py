"""Supplies context that a drafter lacks: from recordings of saved prefixes, or by replays within spare token budget."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.round.flight import RoundInFlight
from wingbeat.runtime.round.rows import Feature
from wingbeat.runtime.scheduling.plan import length_of
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


class RecordedContexts(Protocol):
    """Taps of saved prefixes, for drafters that have not processed these prefixes."""

    recording: Mapping[str, object]
    """Requests that are being recorded, by id; `launched` is called only while there is one."""

    def find(self, seq: Sequence) -> Tensor | None:
        """Returns the taps of the longest kept prefix among a sequence's computed blocks, else None."""
        ...

    def launched(self, flight: RoundInFlight) -> None:
        """Called with each launched round, whose taps may be copied to the host."""
        ...


def begin_following(
    seq: Sequence, blocks: BlockManager, incarnation: int, contexts: RecordedContexts | None, stateless: bool
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
    if not draft.complete and contexts is not None:
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
