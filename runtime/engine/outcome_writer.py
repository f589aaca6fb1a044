"""Writes the data of a round that the drafter receives. No other module writes an `Outcome` or the outcome's tables
that are indexed by slot.

An `Outcome` holds context (prompt chunks, replays, recorded prefixes, deferred pairs), accepted paths, and the
sequences for which trees are requested, with the grammar masks of the tokens after the roots.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from wingbeat.runtime.protocol.chunk_inputs import PlacedChunk, TellInputs
from wingbeat.runtime.protocol.messages import AcceptedPaths, Outcome, RoundHeader
from wingbeat.runtime.protocol.transfer import copy_all, copy_into, upload
from wingbeat.runtime.round.flight import RoundInFlight
from wingbeat.runtime.scheduling.plan import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.scheduling.sequence import Sequence

Advance = Callable[[Sequence, int], None]
"""Function that records that the drafter's KV of a sequence reaches a position."""


class OutcomeWriter:
    """Writes the outcome of one round.

    The caller adds any number of chunks, calls `decodes` at most once, and then calls `finish`.

    Args:
        outcome: buffers that were acquired and are not yet published.
        tell_inputs: writes the inputs of chunks with spans; None if the model takes no media.
    """

    def __init__(self, outcome: Outcome, tell_inputs: TellInputs | None = None) -> None:
        self.outcome = outcome
        self._tell_inputs = tell_inputs
        self.num_chunk_tokens = 0
        """Tokens of the chunks added so far."""
        self._num_decodes = 0
        self._chunk_slots: list[int] = []
        self._chunk_positions: list[int] = []
        self._chunk_lens: list[int] = []
        self._placed: list[PlacedChunk] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    @property
    def capacity(self) -> int:
        """Maximum number of chunk tokens in an outcome."""
        return self.outcome.chunk_taps.shape[0]

    def add_chunk(
        self, slot: int, position: int, length: int, spans: tuple[PromptSpan, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Adds a chunk and returns its buffers to fill: taps [length, taps_size] and next tokens int64 [length].

        Args:
            spans: media spans of the whole prompt.
        """
        rows = slice(self.num_chunk_tokens, self.num_chunk_tokens + length)
        self.num_chunk_tokens = rows.stop
        self._chunk_slots.append(slot)
        self._chunk_positions.append(position)
        self._chunk_lens.append(length)
        self._placed.append(PlacedChunk(position, length, spans))
        return self.outcome.chunk_taps[rows], self.outcome.chunk_next_token_ids[rows]

    def decodes(self, slots: list[int], paths: AcceptedPaths) -> None:
        """Writes the accepted paths of the sequences in `slots`; row i of `paths` belongs to slots[i]."""
        count, outcome = len(slots), self.outcome
        self._num_decodes = count
        if outcome.decode_slots.device == paths.slots.device:
            self.copy([(outcome.decode_slots[:count], paths.slots)])
        else:  # copying slots from the device would make the host wait
            write_numbers(outcome.decode_slots, slots)
        self.copy(
            [
                (outcome.decode_positions[:count], paths.positions),
                (outcome.decode_num_tokens[:count], paths.num_tokens),
                (outcome.decode_token_ids[:count], paths.token_ids),
            ]
        )
        if paths.taps is not None:
            self.copy([(outcome.decode_taps[:count, : paths.taps.shape[1]], paths.taps)])

    def copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Adds (target, source) pairs that `finish` copies. The tensors of a pair may not change before `finish`."""
        self._copies += copies

    def finish(
        self,
        proposal_slots: list[int],
        max_levels: int,
        max_len: int = 0,
        has_rule: int = 0,
        has_masks: int = 0,
        sampling_rules: int = 0,
    ) -> None:
        """Runs the queued copies, writes the slots for which trees are requested, and writes the header.

        The arguments are fields of `RoundHeader`.
        """
        outcome = self.outcome
        copy_all(self._copies)
        write_numbers(outcome.chunk_slots, self._chunk_slots)
        write_numbers(outcome.chunk_positions, self._chunk_positions)
        write_numbers(outcome.chunk_lens, self._chunk_lens)
        write_numbers(outcome.proposal_slots, proposal_slots)
        header = RoundHeader(
            num_decodes=self._num_decodes,
            num_chunks=len(self._chunk_slots),
            num_proposals=len(proposal_slots),
            max_levels=max_levels,
            max_len=max_len,
            has_rule=has_rule,
            has_masks=has_masks,
            sampling_rules=sampling_rules,
            has_inputs=0 if self._tell_inputs is None else self._tell_inputs(outcome, self._placed),
        )
        header.write(outcome.header)


def write_numbers(target: Tensor, values: list[int]) -> None:
    """Writes host numbers into the first rows of a channel's tensor."""
    if values and target.device.type == "cpu":
        target.numpy()[: len(values)] = values
    elif values:
        copy_into(target[: len(values)], upload(values, target.device))


def write_context(plan: SchedulerOutput, flight: RoundInFlight, writer: OutcomeWriter, advance: Advance) -> None:
    """Writes the prompt chunks that directly continue the drafter's context, then recorded rows of decodes.

    Other chunks are replayed later.

    Recorded rows of a saved prefix are written before the sequence's chunk, as many as fit into the outcome's buffers.
    """
    room = writer.capacity - sum(chunk.length for chunk in plan.chunks)
    begin = num_sampled = 0
    for chunk in plan.chunks:
        rows = slice(begin, begin + chunk.length)
        sampled = flight.sampled[num_sampled] if chunk.samples else None
        begin += chunk.length
        num_sampled += chunk.samples
        if chunk.seq.draft.followed:
            room -= _write_chunk(chunk, flight, rows, sampled, writer, room, advance)
    for seq in plan.decodes:
        if seq.draft.is_recorded and room > 0:
            room -= _write_recorded(seq, writer, room, advance)


def _write_chunk(
    chunk: Chunk,
    flight: RoundInFlight,
    rows: slice,
    sampled: object,
    writer: OutcomeWriter,
    room: int,
    advance: Advance,
) -> int:
    """Writes a chunk, preceded by the sequence's recorded taps; returns the number of recorded rows written."""
    seq, draft = chunk.seq, chunk.seq.draft
    if draft.is_recorded and draft.num_recorded - draft.length > room:
        return _write_recorded(seq, writer, room, advance)
    start = draft.length
    num_recorded = max(0, draft.num_recorded - start)
    if start + num_recorded != chunk.start:
        return _write_recorded(seq, writer, room, advance) if num_recorded else 0
    end = chunk.start + chunk.length
    taps, next_token_ids = writer.add_chunk(seq.slot, start, end - start, seq.request.spans)
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
    """Writes at most `room` recorded rows and returns the number written."""
    draft, start = seq.draft, seq.draft.length
    end = min(draft.num_recorded, start + room)
    if end <= start:
        return 0
    taps, next_token_ids = writer.add_chunk(seq.slot, start, end - start, seq.request.spans)
    copy_into(taps, draft.recorded[start:end])
    write_numbers(next_token_ids, seq.token_ids[start + 1 : end + 1])
    advance(seq, end)
    if end == draft.num_recorded:
        draft.recorded = None
        # While a second round is in flight, the host does not have the sequence's length.
        draft.complete = end == seq.num_computed and len(seq.in_flight) < 2
    return end - start


def write_root_masks(outcome: Outcome, asked: list[Sequence], flight: RoundInFlight) -> int:
    """Fills `Outcome.allowed_tokens` with the grammar mask of the first draft token of each sequence in `asked`.

    All tokens are allowed for a sequence without a mask, or whose root is not yet on the host.

    Args:
        asked: sequences for which a tree is requested, in the order of the proposals.

    Returns:
        `RoundHeader.has_masks`: 1, or 0 if the masks are not to be read.
    """
    rows, has_masks = outcome.allowed_tokens, False
    if not rows.shape[1] or all(seq.masker is None for seq in asked):
        return 0
    masks, tokens = rows.numpy(), {} if flight.result is None else flight.tokens_by_slot()
    for mask, seq in zip(masks, asked, strict=False):
        # The root is unknown while the sequence has two rounds in flight; without a round in flight, the sequence
        # already contains its root.
        known = [] if not seq.in_flight else tokens.get(seq.slot) if len(seq.in_flight) == 1 else None
        if seq.masker is not None and known is not None and seq.masker.ahead(known, mask):
            has_masks = True
        else:
            mask[:] = -1
    return int(has_masks)


def write_history(history: Tensor, plan: SchedulerOutput, flight: RoundInFlight, steps: Tensor | None) -> None:
    """Appends the tokens that the round emitted to the token history, for all sequences.

    Sequences that are still being replayed are included, so that the history has no gaps.

    Args:
        history: int64 [num_slots, max_model_len + 1].
        steps: 1, 2, .. on the device; None on the host, where numpy needs no such tensor.
    """
    if plan.decodes:
        # Columns past num_tokens are written too, without harm: the next round overwrites these columns before any
        # read.
        paths, device, last = flight.decodes, history.device, history.shape[1] - 1
        if steps is None:
            token_ids = paths.token_ids.numpy()
            columns = paths.positions.numpy()[:, None] + np.arange(1, token_ids.shape[1] + 1)
            history.numpy()[paths.slots.numpy()[:, None], np.minimum(columns, last)] = token_ids
        else:
            columns = paths.columns
            if columns is None:
                columns = (paths.positions[:, None] + steps[: paths.token_ids.shape[1]]).clamp_max_(last)
            history[paths.slots[:, None].to(device), columns.to(device)] = paths.token_ids.to(device)
    sampling = [chunk for chunk in plan.chunks if chunk.samples]
    if sampling:
        at = [[chunk.seq.slot for chunk in sampling], [chunk.start + chunk.length for chunk in sampling]]
        history[tuple(upload(at, history.device).unbind())] = flight.sampled.to(history.device)


def rows_of(paths: AcceptedPaths, index: Tensor | slice) -> AcceptedPaths:
    """Selects rows of the fields that drafters read; other fields, whose shapes may differ, stay unchanged."""
    told = {name: getattr(paths, name) for name in ("slots", "positions", "token_ids", "num_tokens", "taps")}
    return paths._replace(**{name: None if part is None else part[index] for name, part in told.items()})
