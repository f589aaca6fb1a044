"""Thread that writes recorded sequences to disk, within limits of memory and disk space.

A full or failing disk suspends the recording: the thread tries the disk periodically and resumes once a write succeeds.
All classes of exceptions are handled in this way, because the libraries that write files also raise other classes than
OSError, and an exception that ends the thread would end all recording.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from wingbeat.runtime.recordings.format import DTYPES, Record, RecordingSpec
from wingbeat.runtime.recordings.live import MIN_TOKENS, FinishedSequence
from wingbeat.runtime.recordings.stored_files import make_private, make_private_folder
from wingbeat.runtime.recordings.writer import RecordingFull, RecordingWriter

logger = logging.getLogger(__name__)
MEMORY_BYTES = 256 * 2**20
"""Maximum bytes of sequences that are being recorded or wait to be written; above this limit, sequences are dropped."""
SHARD_BYTES = 32 * 2**20
FLUSH_S = 300.0
"""Maximum seconds for which sequences wait for their shard to become full; then the shard is written as it is."""
RETRY_S = 10.0
"""Seconds between attempts to write to a disk that has failed."""
PROBE_FILE, PROBE_BYTES = "probe.tmp", 4096
_NICENESS = 10
_FORGET = "forget"


@dataclass
class RecordingStats:
    """Counts of the requests that were sampled for recording."""

    num_sequences: int = 0
    """Number of sequences written to shards."""
    num_tokens: int = 0
    num_dropped: int = 0
    """Number of sequences dropped because memory ran out, or the disk was full or failed."""
    stopped: str | None = None
    """Reason why recording is suspended; None if it is not suspended."""


class LiveWriter:
    """Writes finished sequences; all methods may be called from any thread.

    Args:
        folder: folder of this engine's recording; created at the first write.
        root: folder of all engines' recordings, whose shards together count against `max_bytes`.
    """

    def __init__(
        self,
        folder: Path,
        root: Path,
        spec: RecordingSpec,
        max_bytes: int,
        *,
        memory_bytes: int = MEMORY_BYTES,
        shard_bytes: int = SHARD_BYTES,
        flush_s: float = FLUSH_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self.stats = RecordingStats()
        self.spec = spec
        self._folder = folder
        self._root = root
        self._max_bytes = max_bytes
        self._memory_bytes = memory_bytes
        self._shard_bytes = shard_bytes
        self._flush_s, self._retry_s = flush_s, retry_s
        self._writer: RecordingWriter | None = None
        self._waiting = 0
        self._unwritten = 0
        """Bytes of taps of the last shard that could not be written."""
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._forgets = False
        """Whether the thread must still discard the recorded sequences."""
        self._queue: queue.SimpleQueue[FinishedSequence | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="wingbeat-recording", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether sequences can be written now; False while recording is suspended."""
        return self.stats.stopped is None

    def reserve(self, num_bytes: int) -> bool:
        """Reserves memory for rows that will be copied next.

        Returns False if no memory is left or recording is suspended.
        """
        with self._lock:
            if self.stats.stopped is not None or self._used_bytes + num_bytes > self._memory_bytes:
                return False
            self._used_bytes += num_bytes
            return True

    def give_back(self, num_bytes: int, dropped: bool) -> None:
        """Releases the memory of a sequence that is not passed to `put`. If `dropped`, the sequence is counted as
        dropped.
        """
        with self._lock:
            self._used_bytes -= num_bytes
            self.stats.num_dropped += dropped

    def put(self, sequence: FinishedSequence) -> None:
        """Queues a sequence together with its reserved memory."""
        self._queue.put(sequence)

    def forget(self) -> None:
        """Makes the thread discard all sequences that were received before this call and are not written yet."""
        self._queue.put(_FORGET)

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes waiting sequences and ends the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        if hasattr(os, "setpriority"):  # on Linux this sets the priority of the calling thread alone
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        due: float | None = None
        while True:
            try:
                wait_s = None if due is None else max(0.0, due - time.monotonic())
                sequence = self._queue.get(timeout=wait_s)
            except queue.Empty:
                self._flush() if self.is_open else self._retry()
                due = None if self.is_open else time.monotonic() + self._retry_s
                continue
            if sequence is None:
                self._flush()
                return
            if sequence == _FORGET:
                self._try_to_forget()
                continue
            self._add(sequence)
            if self._waiting >= self._shard_bytes:
                self._flush()
                due = None
            if due is None:
                due = time.monotonic() + (self._flush_s if self.is_open else self._retry_s)

    def _add(self, sequence: FinishedSequence) -> None:
        if self.stats.stopped is not None:
            self.give_back(sequence.num_bytes, dropped=True)
            return
        try:
            if self._writer is None:
                self._writer = self._opened()
            self._writer.add(record_of(sequence))
            self._waiting += sequence.num_bytes
        except Exception as error:
            self.give_back(sequence.num_bytes, dropped=True)
            if self._writer is None:
                self._stop(error, sequence.num_bytes)
            else:
                logger.warning("A sequence is not recorded: %s", error)

    def _try_to_forget(self) -> None:
        """Discards recorded sequences; if the disk fails, recording stays suspended until a later attempt succeeds."""
        self._forgets = True
        try:
            self._forget()
            self._forgets = False
        except Exception as error:  # any exception: the libraries that write files raise many classes
            self._stop(error, 0)

    def _forget(self) -> None:
        waiting, self._waiting, self._writer = self._waiting, 0, None
        self.give_back(waiting, dropped=False)

    def _opened(self) -> RecordingWriter:
        make_private_folder(self._folder)
        return RecordingWriter(self._folder, self.spec, self._max_bytes)

    def _flush(self) -> None:
        """Writes a shard of the waiting sequences; on failure drops them and suspends the recording."""
        writer, waiting = self._writer, self._waiting
        self._waiting = 0
        if writer is None or not waiting:
            return
        before = writer.index
        lost = writer.num_pending
        try:
            writer.flush(used_bytes=_bytes_below(self._root))
            make_private(self._folder)
            lost = 0
        except Exception as error:
            self._writer = None
            self._stop(error, waiting)
        with self._lock:
            self._used_bytes -= waiting
            self.stats.num_dropped += lost
            self.stats.num_sequences += writer.index.num_sequences - before.num_sequences
            self.stats.num_tokens += writer.index.num_tokens - before.num_tokens

    def _stop(self, error: Exception, num_bytes: int) -> None:
        reason = str(error) if isinstance(error, RecordingFull) else f"{type(error).__name__}: {error}"
        logger.warning("Live traffic is not recorded for now: %s", reason)
        self.stats.stopped, self._unwritten = reason, num_bytes

    def _retry(self) -> None:
        """Resumes the recording if a shard as large as the shard that failed can now be written to the disk."""
        try:
            self._try_disk(self._unwritten)
        except Exception as error:
            logger.debug("still not recorded: %s", error)
            return
        if self._forgets:
            self._try_to_forget()
        if self._forgets:
            return
        logger.warning("Live traffic is recorded again")
        self.stats.stopped = None

    def _try_disk(self, num_bytes: int) -> None:
        """Raises the exception that writing a shard with this many bytes of taps would raise."""
        writer = self._opened()
        num_tokens = -(-num_bytes // (self.spec.taps_size * DTYPES[self.spec.taps_dtype].itemsize))
        writer.check_room(num_tokens, -(-num_tokens // MIN_TOKENS), _bytes_below(self._root))
        write_probe(self._folder)
        self._writer = writer


def _bytes_below(root: Path) -> int:
    """Total bytes of the shards of all recordings in a folder, including shards that killed processes left half
    written.
    """
    total = 0
    for path in root.glob("*/shard-*"):
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed the file
            total += path.stat().st_size
    return total


def write_probe(folder: Path) -> None:
    """Raises OSError if no file can be written to a folder."""
    path = folder / PROBE_FILE
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def record_of(sequence: FinishedSequence) -> Record:
    """Record of a finished sequence; its loss mask excludes the prompt."""
    num_tokens = len(sequence.token_ids)
    learnt = torch.arange(num_tokens) + sequence.position >= len(sequence.prompt)
    return Record(
        token_ids=torch.tensor(sequence.token_ids, dtype=torch.int32),
        taps=torch.cat(sequence.taps)[:num_tokens],
        loss_mask=learnt,
        position=sequence.position,
        adapter=sequence.adapter,
    )
