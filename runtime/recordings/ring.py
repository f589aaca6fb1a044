"""Bounded store of served rounds on disk: new shards are added, older shards are thinned out, and expired shards are
removed.

Every shard is a recording of its own, in folder `train` or in folder `held`. The sequences of a fixed share of the
prompts are stored in `held`, and no head is trained on them. If space is needed, a shard outside the newest quarter is
drawn at random and removed, so that shards of all ages remain.
"""

import errno
import logging
import random
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from wingbeat.runtime.file_lock import locked
from wingbeat.runtime.recordings.format import HEADER_BYTES, RecordingError, RecordingSpec, hashed_share, read_index
from wingbeat.runtime.recordings.live import FinishedSequence
from wingbeat.runtime.recordings.live_writer import RETRY_S, LiveWriter, record_of, write_probe
from wingbeat.runtime.recordings.stored_files import digest_of, make_private, make_private_folder
from wingbeat.runtime.recordings.writer import RecordingWriter

logger = logging.getLogger(__name__)
TRAIN, HELD = "train", "held"
HELD_SHARE = 0.2
SHARD_BYTES, FLUSH_S = 4 * 2**20, 10.0
"""Bytes of a shard, and seconds that sequences wait for their shard. Both are small, so that sequences are soon
available for training. Shards are small also because space is freed by removing whole shards.
"""
NEWEST = 0.25
CHECKSUM_FILE, FORGOTTEN = "sha256", "forgotten"


class Kept(NamedTuple):
    """Size of a ring's content: bytes and number of shards."""

    num_bytes: int
    num_shards: int


class RoundRing:
    """A ring's folder; several processes may have an object for the same folder.

    Args:
        max_bytes: maximum total bytes of the files in the folder.
        expire_s: age in seconds at which a shard is removed even if no space is needed.
        clock: returns seconds since 1970.
    """

    def __init__(self, folder: Path, max_bytes: int, expire_s: float, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.max_bytes, self._expire_s, self._clock = folder, max_bytes, expire_s, clock
        self._random = random.Random(0)
        self._checked: set[str] = set()
        """Names of shards whose checksums were verified."""

    def new_folder(self, held: bool) -> Path:
        """Returns a folder for a new shard; the names of such folders increase with time."""
        return self.folder / (HELD if held else TRAIN) / f"{int(1e9 * self._clock()):020d}"

    @contextmanager
    def room_for(self, num_bytes: int) -> Iterator[bool]:
        """Locks the ring and frees space for `num_bytes` bytes. Yields False if `num_bytes` exceeds the size of the
        whole ring.
        """
        make_private_folder(self.folder)
        with locked(self.folder / "ring.lock"):
            self._expire()
            if num_bytes <= self.max_bytes:
                self._thin(self.max_bytes - num_bytes)
            yield num_bytes <= self.max_bytes

    def tidy(self) -> Kept:
        """Removes expired and damaged shards; returns the size of the remaining content."""
        with self.room_for(0):
            pass
        self._remove_damaged()
        sizes = [_size(path) for path in self._shards()]
        return Kept(sum(sizes), len(sizes))

    def forget(self) -> None:
        """Removes all shards, because the verifier's weights were replaced."""
        make_private_folder(self.folder)
        with locked(self.folder / "ring.lock"):
            for path in self._shards():
                shutil.rmtree(path, ignore_errors=True)
            (self.folder / FORGOTTEN).touch()

    @property
    def forgotten_at(self) -> int:
        """Time of the last `forget`, in nanoseconds since 1970; 0 if there was none."""
        file = self.folder / FORGOTTEN
        return file.stat().st_mtime_ns if file.exists() else 0

    def held_since(self, moment: int) -> list[tuple[int, Path]]:
        """Held-out shards newer than `moment`, as (time, folder), oldest first; times in nanoseconds since 1970."""
        found = ((_made_at(path), path) for path in (self.folder / HELD).glob("*"))
        return sorted((made_at, path) for made_at, path in found if made_at > moment)

    def _shards(self) -> list[Path]:
        """Folders of all shards, oldest first."""
        return sorted((path for part in (TRAIN, HELD) for path in (self.folder / part).glob("*")), key=_made_at)

    def _expire(self) -> None:
        oldest = 1e9 * (self._clock() - self._expire_s)
        for path in self._shards():
            # Writers hold the ring's lock while they write, so an incomplete shard can only come from a process that
            # was killed.
            if _made_at(path) < oldest or not _is_complete(path):
                shutil.rmtree(path, ignore_errors=True)

    def _remove_damaged(self) -> None:
        """Removes shards whose checksum differs, because a damaged shard could end all training runs that read it."""
        shards = self._shards()
        for path in shards:
            if path.name not in self._checked and _is_damaged(path):
                logger.error("%s is damaged and was removed", path)
                shutil.rmtree(path, ignore_errors=True)
        self._checked = {path.name for path in shards}

    def _thin(self, num_bytes: int) -> None:
        shards = self._shards()
        sizes = {path: _size(path) for path in shards}
        while shards and sum(sizes[path] for path in shards) > num_bytes:
            number = self._random.randrange(max(1, int(len(shards) * (1 - NEWEST))))
            shutil.rmtree(shards.pop(number), ignore_errors=True)


class RingWriter(LiveWriter):
    """Writes finished sequences into a ring; see `LiveWriter`."""

    def __init__(
        self,
        ring: RoundRing,
        spec: RecordingSpec,
        *,
        shard_bytes: int = SHARD_BYTES,
        flush_s: float = FLUSH_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._ring = ring
        self._pending: dict[bool, list[FinishedSequence]] = {False: [], True: []}
        # A shard is at most a tenth of the ring, so that the ring can contain shards of different times.
        shard_bytes = min(shard_bytes, max(ring.max_bytes // 10, 1))
        super().__init__(
            ring.folder, ring.folder, spec, ring.max_bytes, shard_bytes=shard_bytes, flush_s=flush_s, retry_s=retry_s
        )

    def _add(self, sequence: FinishedSequence) -> None:
        if self.stats.stopped is not None:
            self.give_back(sequence.num_bytes, dropped=True)
            return
        self._pending[is_held_out(sequence)].append(sequence)
        self._waiting += sequence.num_bytes

    def _flush(self) -> None:
        """Writes the waiting sequences as two shards: one for training, and one of held-out sequences."""
        waiting, self._waiting = self._waiting, 0
        for held, sequences in self._pending.items():
            if sequences:
                try:
                    self._write(held, sequences)
                except Exception as error:  # any exception: the libraries that write files raise many classes
                    self.stats.num_dropped += len(sequences)
                    self._stop(error, waiting)
        self._pending = {False: [], True: []}
        self.give_back(waiting, dropped=False)

    def _write(self, held: bool, sequences: list[FinishedSequence]) -> None:
        records = [record_of(sequence) for sequence in sequences]
        num_tokens = sum(len(record.token_ids) for record in records)
        # HEADER_BYTES is counted twice: for the shard's header and for the index.
        needed = num_tokens * self.spec.bytes_per_token + len(records) * 12 + 2 * HEADER_BYTES
        with self._ring.room_for(needed) as there_is:
            if not there_is:
                self.stats.num_dropped += len(records)
                return
            folder = self._ring.new_folder(held)
            make_private_folder(folder)
            try:
                writer = RecordingWriter(folder, self.spec, needed)
                for record in records:
                    writer.add(record)
                writer.flush()
                (folder / CHECKSUM_FILE).write_text(digest_of(folder, "*.*"))
                make_private(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        self.stats.num_sequences += len(records)
        self.stats.num_tokens += num_tokens

    def _forget(self) -> None:
        super()._forget()
        self._pending = {False: [], True: []}
        self._ring.forget()

    def _try_disk(self, num_bytes: int) -> None:
        with self._ring.room_for(num_bytes):
            free = shutil.disk_usage(self._ring.folder).free
            if num_bytes > free:
                raise OSError(errno.ENOSPC, f"the disk has {free} bytes free and the next shard needs {num_bytes}")
            write_probe(self._ring.folder)


def is_held_out(sequence: FinishedSequence) -> bool:
    """Whether a sequence is held out of training. The decision depends on the whole prompt, so sequences with equal
    prompts are on the same side.
    """
    return hashed_share(array("q", sequence.prompt).tobytes()) < HELD_SHARE


def _made_at(path: Path) -> int:
    return int(path.name) if path.name.isdigit() else 0


def _is_complete(path: Path) -> bool:
    if (path / CHECKSUM_FILE).is_file():
        return True
    try:
        return bool(read_index(path).shards)
    except RecordingError:
        return False


def _is_damaged(path: Path) -> bool:
    """Whether a shard's content does not match its checksum. False if there is no checksum, or if the shard was removed
    meanwhile.
    """
    try:
        return (path / CHECKSUM_FILE).read_bytes() != digest_of(path, "*.*").encode()
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _size(path: Path) -> int:
    total = 0
    for file in path.glob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # the file is being written, or was removed
            continue
    return total
