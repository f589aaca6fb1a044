"""Records live traffic: the hidden states that rounds compute anyway, for a sampled share of the requests.

The engine's thread only copies rows; a separate thread writes finished sequences. If the writing thread falls behind,
sequences are dropped, because recording must neither delay a round nor exceed its memory limit.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.recordings.format import hashed_share
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.scheduling.sequence import Sequence

MIN_TOKENS = 8
"""Minimum length of a recorded sequence in tokens; shorter sequences are useless for training a drafter."""


class FinishedSequence(NamedTuple):
    """Finished sequence that waits to be written."""

    token_ids: list[int]
    """[num_tokens]: token of each row of the taps."""
    taps: list[Tensor]
    """Pieces [n, taps_size] of the taps, in order of position."""
    position: int
    """Position of the first row in the text."""
    prompt: list[int]
    """Tokens of the prompt, including tokens before `position`."""
    num_bytes: int
    adapter: str = ""
    """See `Record.adapter`."""
    request_id: str = ""


class Sink(Protocol):
    """Receiver of finished sequences, such as `wingbeat.runtime.recordings.live_writer.LiveWriter`."""

    @property
    def is_open(self) -> bool:
        """Whether sequences can be written now."""
        ...

    def reserve(self, num_bytes: int) -> bool:
        """Reserves memory for rows that will be copied next; returns False if no memory is left."""
        ...

    def give_back(self, num_bytes: int, dropped: bool) -> None:
        """Releases the memory of a sequence that is not passed to `put`. If `dropped`, the sequence is counted as
        dropped.
        """
        ...

    def put(self, sequence: FinishedSequence) -> None:
        """Hands over a sequence together with its reserved memory."""
        ...

    def forget(self) -> None:
        """Discards all sequences received so far, written or not."""
        ...


@dataclass
class _Growing:
    """Rows of a running sequence that were copied so far."""

    seq: Sequence
    position: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    taps: list[Tensor] = field(default_factory=list)


class _Copy:
    """Rows that are being copied to the host. The copy is enqueued on the device after the round that computed the
    rows.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype) -> None:
        self._event: torch.cuda.Event | None = None
        if rows.device.type == "cpu":
            self._host = rows.to(dtype, copy=True)
            return
        rows = rows.to(dtype)
        pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        self._host = pinned.copy_(rows, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> Tensor:
        """Waits for the copy, and returns a copy of the rows, which no later round overwrites."""
        if self._event is None:
            return self._host
        self._event.synchronize()
        return self._host.clone()


class _RoundCopy(NamedTuple):
    """Copies of one round's recorded rows."""

    flight: RoundInFlight
    decode_rows: list[int]
    decodes: _Copy | None
    """Rows of the decodes, [num_decode_rows, path, taps_size]."""
    chunks: list[tuple[int, _Copy]]
    """For each recorded chunk, its index and its rows [length, taps_size]."""


class LiveRecording(RoundObserver):
    """Observer of an engine's rounds that records a share of the requests; all calls come from the engine's thread.

    Args:
        share: share of the requests to record, 0..1; the request id alone determines whether a request is recorded.
        taps_size: number of leading columns of the rounds' taps that are recorded.
        dtype: data type of the recorded taps.
        min_tokens: minimum length; shorter sequences are not recorded.
    """

    def __init__(
        self, sink: Sink, share: float, taps_size: int, dtype: torch.dtype, min_tokens: int = MIN_TOKENS
    ) -> None:
        self._sink = sink
        self._share = share
        self._taps_size = taps_size
        self._dtype = dtype
        self._min_tokens = min_tokens
        self._requests: dict[str, _Growing | None] = {}
        """Running requests seen so far, by id; None for requests that are not recorded."""
        self._copies: deque[_RoundCopy] = deque()

    def launched(self, flight: RoundInFlight) -> None:
        """Enqueues copies of the round's recorded rows. The copies run after the round and before the next round, which
        overwrites the rows.
        """
        plan, paths = flight.plan, flight.decodes
        rows = [row for row, seq in enumerate(plan.decodes) if self._growing(seq) is not None]
        decodes = None
        if rows and paths.taps is not None:
            taps = paths.taps if len(rows) == len(plan.decodes) else paths.taps[upload(rows, paths.taps.device)]
            decodes = _Copy(taps[..., : self._taps_size], self._dtype)
        chunks, begin = [], 0
        for number, chunk in enumerate(plan.chunks):
            end = begin + chunk.length
            if not chunk.replay and flight.chunk_taps is not None and self._growing(chunk.seq) is not None:
                chunks.append((number, _Copy(flight.chunk_taps[begin:end, : self._taps_size], self._dtype)))
            begin = end
        self._copies.append(_RoundCopy(flight, rows if decodes is not None else [], decodes, chunks))

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Appends the recorded rows of the oldest round in flight. Called before the round's tokens are added to the
        sequences.
        """
        copy = self._copies.popleft()
        if copy.flight is not flight:
            raise RuntimeError("rounds were settled in another order than they were launched in")
        plan = flight.plan
        for number, rows in copy.chunks:
            chunk = plan.chunks[number]
            if flight.live[len(plan.decodes) + number]:
                self._append(chunk.seq, chunk.start, rows.wait())
        if copy.decodes is None:
            return
        taps = copy.decodes.wait()
        for index, row in enumerate(copy.decode_rows):
            seq = plan.decodes[row]
            if flight.live[row]:
                # The root of a decode is the sequence's last token, so the root's position is the first position that
                # the round computed.
                self._append(seq, len(seq.token_ids) - 1, taps[index, : len(result.token_ids[row])].clone())

    def abandoned(self) -> None:
        """Discards copies of rounds that will never be settled."""
        self._copies.clear()

    def ended(self, request_id: str) -> None:
        """Passes the rows of a finished or aborted request to the sink."""
        growing = self._requests.pop(request_id, None)
        if growing is None:
            return
        # The last round may have computed positions after the token that ended the text; their rows are dropped.
        num_tokens = min(growing.num_rows, len(growing.seq.token_ids) - growing.position)
        if num_tokens < self._min_tokens:
            self._sink.give_back(growing.num_bytes, dropped=False)
            return
        token_ids = growing.seq.token_ids[growing.position : growing.position + num_tokens]
        adapter = growing.seq.request.variant
        self._sink.put(
            FinishedSequence(
                token_ids,
                growing.taps,
                growing.position,
                growing.seq.token_ids[: growing.seq.num_prompt_tokens],
                growing.num_bytes,
                "" if adapter is None else f"{adapter.name}@{adapter.digest}",
                request_id,
            )
        )

    def renewed(self) -> None:
        """Discards all recorded rows, because the weights were replaced; running requests are no longer recorded."""
        for request_id, growing in self._requests.items():
            if growing is not None:
                self._sink.give_back(growing.num_bytes, dropped=True)
                self._requests[request_id] = None
        self._sink.forget()

    def _growing(self, seq: Sequence) -> _Growing | None:
        """The rows of a sequence that were copied so far; None for a sequence that is not recorded."""
        request_id = seq.request.request_id
        if request_id not in self._requests:
            wanted = self._sink.is_open and is_sampled(request_id, self._share) and may_be_kept(seq.request)
            self._requests[request_id] = _Growing(seq) if wanted else None
        return self._requests[request_id]

    def _append(self, seq: Sequence, position: int, rows: Tensor) -> None:
        """Appends rows of positions `position` and following.

        Rows that a preempted sequence computes again are skipped. If positions are missing between the recorded rows
        and the new rows (after a restart from the prefix cache), the new rows and all later rows are skipped. Positions
        may be missing before the first row.
        """
        growing = self._requests.get(seq.request.request_id)
        if growing is None:
            return
        if not growing.taps:
            growing.position = position
        known = growing.position + growing.num_rows - position
        if known < 0 or known >= len(rows):
            return
        rows = rows[known:]
        num_bytes = rows.numel() * rows.element_size()
        if not self._sink.reserve(num_bytes):
            self._sink.give_back(growing.num_bytes, dropped=True)
            self._requests[seq.request.request_id] = None
            return
        growing.taps.append(rows)
        growing.num_rows += len(rows)
        growing.num_bytes += num_bytes


def may_be_kept(request: Request) -> bool:
    """Whether a request's tokens may be stored.

    Three kinds of requests are not stored: those that opt out of learning; those with a cache salt, because their cache
    is private; and those with spans, because a recording contains only tokens, not the content of spans.
    """
    return request.params.learn and not request.params.cache_salt and not request.spans


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request belongs to the recorded share of the requests; the result depends on the request's id alone."""
    return hashed_share(request_id.encode()) < share
