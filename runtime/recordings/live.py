"""Records live traffic: the hidden states that rounds compute anyway, for a sampled share of the requests.

The engine's thread only copies rows; a separate thread writes finished sequences. If that thread falls behind,
sequences are dropped: recording may use memory up to a limit, but never delays a round.
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
"""Shorter sequences are useless for training a drafter."""


class FinishedSequence(NamedTuple):
    """Finished sequence that waits to be written."""

    token_ids: list[int]
    """[num_tokens], one per row of the taps."""
    taps: list[Tensor]
    """[n, taps_size] pieces of the taps, in order of position."""
    position: int
    """Position of the first row."""
    prompt: list[int]
    """Tokens of the text before the answer, including those before `position`."""
    num_bytes: int
    adapter: str = ""
    """See `Record.adapter`."""
    request_id: str = ""


class Sink(Protocol):
    """Receiver of finished sequences, such as `wingbeat.runtime.recordings.live_writer.LiveWriter`."""

    @property
    def is_open(self) -> bool:
        """False while nothing can be written."""
        ...

    def reserve(self, num_bytes: int) -> bool:
        """Reserves memory for rows that are about to be copied; returns False if there is none left."""
        ...

    def give_back(self, num_bytes: int, dropped: bool) -> None:
        """Releases memory of a sequence that is not passed to `put`; `dropped` counts the sequence as lost."""
        ...

    def put(self, sequence: FinishedSequence) -> None:
        """Passes on a sequence together with its reserved memory."""
        ...

    def forget(self) -> None:
        """Discards all sequences received so far, written or not."""
        ...


@dataclass
class _Growing:
    """Rows copied of a running sequence so far."""

    seq: Sequence
    position: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    taps: list[Tensor] = field(default_factory=list)


class _Copy:
    """Rows on their way to the host, enqueued behind the round that computed them."""

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
        """Waits for the copy; returns the rows in memory that the caller may keep."""
        if self._event is None:
            return self._host
        self._event.synchronize()
        return self._host.clone()


class _RoundCopy(NamedTuple):
    """Rows copied of one round."""

    flight: RoundInFlight
    decode_rows: list[int]
    decodes: _Copy | None
    """[num_decode_rows, path, taps_size]"""
    chunks: list[tuple[int, _Copy]]
    """(index of the chunk, [length, taps_size])"""


class LiveRecording(RoundObserver):
    """Observer of an engine's rounds that records a share of the requests; all calls come from the engine's thread.

    Args:
        share: share of the requests to record, 0..1; selected by request id alone.
        taps_size: leading columns of the rounds' taps that are kept.
        dtype: data type of the kept taps.
        min_tokens: shorter sequences are not kept.
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
        """Enqueues copies of the round's recorded rows behind it, before the next round overwrites them."""
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
        """Appends the rows of the oldest round in flight, before its sequences take their tokens."""
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
                # A decode's root is the sequence's last token, whose position is the first one computed in the round.
                self._append(seq, len(seq.token_ids) - 1, taps[index, : len(result.token_ids[row])].clone())

    def abandoned(self) -> None:
        """Discards copies of rounds that will never be settled."""
        self._copies.clear()

    def ended(self, request_id: str) -> None:
        """Passes the rows of a finished or aborted request to the sink."""
        growing = self._requests.pop(request_id, None)
        if growing is None:
            return
        # The last round may have computed positions behind the token that ended the text.
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
        """Discards all recorded rows, which belong to replaced weights; running requests are not recorded any more."""
        for request_id, growing in self._requests.items():
            if growing is not None:
                self._sink.give_back(growing.num_bytes, dropped=True)
                self._requests[request_id] = None
        self._sink.forget()

    def _growing(self, seq: Sequence) -> _Growing | None:
        """Rows of a recorded sequence so far; None for a sequence that is not recorded."""
        request_id = seq.request.request_id
        if request_id not in self._requests:
            wanted = self._sink.is_open and is_sampled(request_id, self._share) and may_be_kept(seq.request)
            self._requests[request_id] = _Growing(seq) if wanted else None
        return self._requests[request_id]

    def _append(self, seq: Sequence, position: int, rows: Tensor) -> None:
        """Appends rows of positions `position` and following.

        Rows that a preempted sequence recomputes are skipped. Rows behind a gap, after a restart from the prefix cache,
        are skipped as well, so nothing further of the sequence is recorded; a gap before the first rows is allowed.
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

    Left out are requests that opt out of learning, requests with a cache salt, whose cache is private, and requests
    with spans, because a recording holds tokens without the spans' content.
    """
    return request.params.learn and not request.params.cache_salt and not request.spans


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request belongs to the recorded share, decided by its id alone."""
    return hashed_share(request_id.encode()) < share
