"""Recordings of live traffic: the hidden states that rounds compute anyway, of a sampled share of the requests.

The engine's thread copies rows and nothing else; finished sequences are written by a thread of their own. Where that
falls behind, sequences are dropped: recording may cost memory up to a bound, and never a round.
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
"""Shorter sequences teach a drafter nothing."""


class FinishedSequence(NamedTuple):
    """A sequence on its way to the disk."""

    token_ids: list[int]
    """[num_tokens], one per row of the taps."""
    taps: list[Tensor]
    """[n, taps_size] pieces of what its positions yielded, in order."""
    position: int
    """Of its first row."""
    prompt: list[int]
    """Tokens of the text before the answer, the part before `position` included."""
    num_bytes: int
    adapter: str = ""
    """As in `Record`."""
    request_id: str = ""


class Sink(Protocol):
    """Where finished sequences go; `wingbeat.runtime.recordings.live_writer.LiveWriter`."""

    @property
    def is_open(self) -> bool:
        """False while nothing can be written."""
        ...

    def reserve(self, num_bytes: int) -> bool:
        """Take memory for rows that are about to be copied; False where there is none left."""
        ...

    def give_back(self, num_bytes: int, dropped: bool) -> None:
        """Return memory of a sequence that is not put; `dropped` counts it as lost."""
        ...

    def put(self, sequence: FinishedSequence) -> None:
        """Hand over a sequence with its memory."""
        ...

    def forget(self) -> None:
        """Drop what was handed over so far, written or not."""
        ...


@dataclass
class _Growing:
    """What was copied of a sequence so far."""

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
        """The rows, in memory that may be kept."""
        if self._event is None:
            return self._host
        self._event.synchronize()
        return self._host.clone()


class _RoundCopy(NamedTuple):
    """What was copied of one round."""

    flight: RoundInFlight
    decode_rows: list[int]
    decodes: _Copy | None
    """[num_decode_rows, path, taps_size]"""
    chunks: list[tuple[int, _Copy]]
    """(number of the chunk, [length, taps_size])"""


class LiveRecording(RoundObserver):
    """Watches an engine's rounds; all calls come from the engine's thread.

    Args:
        share: of the requests to record, 0..1; which ones follows from their ids alone.
        taps_size: leading columns of the rounds' taps that are kept.
        dtype: they are kept in.
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
        """Those seen and not ended; None for the ones that are not recorded."""
        self._copies: deque[_RoundCopy] = deque()

    def launched(self, flight: RoundInFlight) -> None:
        """A round was enqueued: enqueue copies of its sampled rows behind it, before the next one overwrites them."""
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
        """The oldest launched round is decided, and its sequences have not taken its tokens yet."""
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
                # A decode's root is the last token it has, and that one's position is the first not computed.
                self._append(seq, len(seq.token_ids) - 1, taps[index, : len(result.token_ids[row])].clone())

    def abandoned(self) -> None:
        """The rounds launched and not settled never will be."""
        self._copies.clear()

    def ended(self, request_id: str) -> None:
        """A request has finished or was aborted: what it has is complete."""
        growing = self._requests.pop(request_id, None)
        if growing is None:
            return
        # The last round may have computed positions past the token that ended the text.
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
        """What was recorded is of weights that are gone: it goes too, and what runs by both is not recorded."""
        for request_id, growing in self._requests.items():
            if growing is not None:
                self._sink.give_back(growing.num_bytes, dropped=True)
                self._requests[request_id] = None
        self._sink.forget()

    def _growing(self, seq: Sequence) -> _Growing | None:
        """What there is of a sequence that is recorded; None for one that is not."""
        request_id = seq.request.request_id
        if request_id not in self._requests:
            wanted = self._sink.is_open and is_sampled(request_id, self._share) and may_be_kept(seq.request)
            self._requests[request_id] = _Growing(seq) if wanted else None
        return self._requests[request_id]

    def _append(self, seq: Sequence, position: int, rows: Tensor) -> None:
        """Take the rows of positions `position` and following.

        What a preempted sequence computes again is there already. Rows that do not continue what is there (their
        beginning came from the prefix cache) end what can be recorded of the sequence, save at its start.
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
    """Whether a request's tokens may be stored: not those of one that opts out, nor of one whose cache is its own.

    A recording holds tokens, which do not tell what a span stood for.
    """
    return request.params.learn and not request.params.cache_salt and not request.spans


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request is among a share of all, decided by its id: independent of everything else."""
    return hashed_share(request_id.encode()) < share
