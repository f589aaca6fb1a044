"""Taps of saved prefixes."""

import torch
from torch import Tensor

from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.round.flight import RoundInFlight
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
