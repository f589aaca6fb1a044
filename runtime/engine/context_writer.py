"""Copies the context a drafter is given in a round: pieces of prompts, replays, what was recorded of prefixes."""

from collections.abc import Callable

from wingbeat.runtime.engine.deferred_pairs import DeferredPairs
from wingbeat.runtime.engine.outcome_writer import OutcomeWriter, write_numbers
from wingbeat.runtime.protocol.transfer import copy_into
from wingbeat.runtime.scheduling.plan import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.round import RoundInFlight

Advance = Callable[[Sequence, int], None]
"""Notes that the drafter's KV of a sequence reaches a position."""


def write_context(
    plan: SchedulerOutput, flight: RoundInFlight, writer: OutcomeWriter, deferred: DeferredPairs, advance: Advance
) -> None:
    """Copy the chunks that continue the drafter's context, then what was kept back; others are replayed later.

    Where a saved prefix is recorded, its rows go before those of the sequence's chunk, as far as there is room.
    """
    room = writer.capacity - sum(chunk.length for chunk in plan.chunks)
    begin = num_sampled = 0
    for chunk in plan.chunks:
        rows = slice(begin, begin + chunk.length)
        sampled = flight.sampled[num_sampled] if chunk.samples else None
        begin += chunk.length
        num_sampled += chunk.samples
        if chunk.seq.request.params.speculation:
            room -= _write_chunk(chunk, flight, rows, sampled, writer, room, advance)
    for seq in plan.decodes:
        draft = seq.draft
        if draft.is_recorded and room > 0:
            room -= _write_recorded(seq, writer, room, advance)
        if not draft.num_deferred:
            continue
        if not writer.has_room(draft.num_deferred):  # prompts took the room: replayed later
            draft.num_deferred, draft.complete = 0, False
            continue
        end = draft.deferred_from + draft.num_deferred
        deferred.hand_over(seq, *writer.add_chunk(seq.slot, draft.deferred_from, draft.num_deferred))
        advance(seq, end)


def _write_chunk(
    chunk: Chunk,
    flight: RoundInFlight,
    rows: slice,
    sampled: object,
    writer: OutcomeWriter,
    room: int,
    advance: Advance,
) -> int:
    """One chunk, behind what is recorded before it; returns how many of the rows were recorded."""
    seq, draft = chunk.seq, chunk.seq.draft
    if draft.is_recorded and draft.num_recorded - draft.length > room:
        return _write_recorded(seq, writer, room, advance)
    start = draft.length
    num_recorded = max(0, draft.num_recorded - start)
    if start + num_recorded != chunk.start:
        return _write_recorded(seq, writer, room, advance) if num_recorded else 0
    end = chunk.start + chunk.length
    taps, next_token_ids = writer.add_chunk(seq.slot, start, end - start)
    if num_recorded:
        copy_into(taps[:num_recorded], draft.recorded[start:])
    if flight.chunk_taps is not None:
        copy_into(taps[num_recorded:], flight.chunk_taps[rows])
    write_numbers(next_token_ids, seq.token_ids[start + 1 : end + 1])
    if sampled is not None:
        copy_into(next_token_ids[-1], sampled)
    advance(seq, end)
    if chunk.replay or num_recorded:
        draft.complete = end == seq.num_computed
    draft.recorded = None
    return num_recorded


def _write_recorded(seq: Sequence, writer: OutcomeWriter, room: int, advance: Advance) -> int:
    """As much of what is recorded as there is room for; returns how many rows that is."""
    draft, start = seq.draft, seq.draft.length
    end = min(draft.num_recorded, start + room)
    if end <= start:
        return 0
    taps, next_token_ids = writer.add_chunk(seq.slot, start, end - start)
    copy_into(taps, draft.recorded[start:end])
    write_numbers(next_token_ids, seq.token_ids[start + 1 : end + 1])
    advance(seq, end)
    if end == draft.num_recorded:
        draft.recorded = None
        # With another round in flight nobody knows here how far the sequence is.
        draft.complete = end == seq.num_computed and len(seq.in_flight) < 2
    return end - start
