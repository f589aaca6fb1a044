"""The channel over POSIX shared memory: two processes of one machine, found by name.

A segment is a file of /dev/shm: one page of header (int64 words, then the spec as JSON), then the buffers. It is mapped
with `mmap` rather than `multiprocessing.shared_memory`, whose resource tracker in an attaching process unlinks the
owner's segment when that process ends, and cannot be told not to before Python 3.13. Both processes must share /dev/shm
and the pid namespace: the actors of one node do.
"""

import contextlib
import dataclasses
import fcntl
import json
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from wingbeat.cluster.channel import (
    NUM_WORDS,
    ChannelError,
    ChannelMemory,
    DrafterSide,
    VerifierSide,
    Word,
    buffer_bytes,
    carve,
    write_owner,
)
from wingbeat.cluster.doorbell import Bell, Doorbell, PeerProcess, process_start
from wingbeat.runtime.batch import ChannelSpec

SHM_DIR = Path("/dev/shm")
PREFIX = "wingbeat."
UNFINISHED = ".unfinished"
HEADER_BYTES = 4096
SPEC_START = 8 * NUM_WORDS
MAGIC = int.from_bytes(b"wingbeat", "little")
VERSION = 1
"""Of the header and of the layout that follows from a spec; raise it with any change to either."""


class ShmChannel:
    """A segment and its verifier's end, whose `close` unlinks it; so does its deletion, and the end of the process."""

    def __init__(self, name: str, path: Path, memory: ChannelMemory) -> None:
        self.name = name
        self.verifier_end = VerifierSide(memory, Doorbell(Bell(memory.words, Word.REPLIED)))
        self.verifier_end.on_close = weakref.finalize(self.verifier_end, _release, memory.words, path, os.getpid())

    @classmethod
    def create(cls, name: str, spec: ChannelSpec) -> "ShmChannel":
        """Make the segment `name`, after removing those of dead verifiers.

        Raises ChannelError if the name is not a plain file name, belongs to a live verifier, or /dev/shm is too full.
        """
        path = _path(name)
        remove_stale_segments()
        # Built under a private name, then linked: what can be found is complete, and only one process gets the name.
        draft = path.with_name(f"{path.name}.{os.getpid()}.{process_start(os.getpid())}{UNFINISHED}")
        try:
            mapping = _allocate(draft, HEADER_BYTES + buffer_bytes(spec))
            words = _write_header(mapping, spec)
            with _directory_lock():
                os.link(draft, path)
        except FileExistsError:
            raise ChannelError(f"channel {name!r} exists and its verifier is alive") from None
        finally:
            draft.unlink(missing_ok=True)
        return cls(name, path, _carve(mapping, words, spec))

    @staticmethod
    def attach(name: str, incarnation: int) -> DrafterSide:
        """Attach to the segment `name` as its drafter; an earlier incarnation is thereby closed.

        Raises ChannelError if there is no such channel, it was made by another version, its verifier is gone, or
        `incarnation` is not larger than the one attached.
        """
        mapping = _map(_path(name), name)
        words = _words(mapping)
        return DrafterSide(_carve(mapping, words, _read_spec(mapping, words, name)), incarnation)


def remove_stale_segments() -> int:
    """Unlink the segments whose verifier is dead; returns how many. Files that are not ours are left alone."""
    removed = 0
    with _directory_lock():
        for path in SHM_DIR.glob(f"{PREFIX}*"):
            owner = _owner(path)
            if owner is None or owner.alive():
                continue
            with contextlib.suppress(FileNotFoundError, PermissionError):  # gone meanwhile, or of another user
                path.unlink()
                removed += 1
    return removed


@contextlib.contextmanager
def _directory_lock() -> Iterator[None]:
    """Without it a name found stale could be another verifier's by the time it is unlinked."""
    fd = os.open(SHM_DIR, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _owner(path: Path) -> PeerProcess | None:
    """The process that made a segment, or None where that cannot be told."""
    if path.name.endswith(UNFINISHED):
        pid, start = path.name.removesuffix(UNFINISHED).split(".")[-2:]
        return PeerProcess(int(pid), int(start)) if pid.isdecimal() and start.isdecimal() else None
    try:
        with path.open("rb") as file:
            words = memoryview(file.read(SPEC_START).ljust(SPEC_START, b"\0")).cast("q")
    except OSError:
        return None
    if words[Word.MAGIC] != MAGIC:
        return None
    return PeerProcess(words[Word.VERIFIER_PID], words[Word.VERIFIER_START])


def _path(name: str) -> Path:
    if not name or "/" in name or "\0" in name or len(name) > 150:
        raise ChannelError(f"channel name {name!r} must be a file name of 1..150 characters")
    return SHM_DIR / f"{PREFIX}{name}"


def _allocate(path: Path, num_bytes: int) -> mmap.mmap:
    """A zeroed file of that size, mapped. Takes every page now: touching one that /dev/shm lacks would be a SIGBUS."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        return mmap.mmap(fd, num_bytes)
    except OSError as error:
        stats = os.statvfs(SHM_DIR)
        need, free = num_bytes / 2**20, stats.f_bavail * stats.f_frsize / 2**20
        hint = "in a container enlarge it with --shm-size"
        raise ChannelError(f"the channel needs {need:.1f} MiB of {SHM_DIR}, {free:.1f} MiB are free; {hint}") from error
    finally:
        os.close(fd)


def _map(path: Path, name: str) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ChannelError(f"no channel {name!r} on this machine ({path} does not exist)") from None
    except OSError as error:
        raise ChannelError(f"cannot open channel {name!r} ({path}): {error.strerror}") from None
    try:
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise ChannelError(f"{path} is not a channel: {size} bytes")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _words(mapping: mmap.mmap) -> memoryview:
    return memoryview(mapping)[:SPEC_START].cast("q")


def _carve(mapping: mmap.mmap, words: memoryview, spec: ChannelSpec) -> ChannelMemory:
    """Views over a mapping; the last of them to go unmaps it."""
    return carve(spec, words, torch.frombuffer(mapping, dtype=torch.uint8)[HEADER_BYTES:])


def _write_header(mapping: mmap.mmap, spec: ChannelSpec) -> memoryview:
    text = _spec_json(spec)
    mapping[SPEC_START : SPEC_START + len(text)] = text
    words = _words(mapping)
    write_owner(words)
    words[Word.SPEC_BYTES] = len(text)
    words[Word.VERSION] = VERSION
    words[Word.MAGIC] = MAGIC
    return words


def _read_spec(mapping: mmap.mmap, words: memoryview, name: str) -> ChannelSpec:
    if words[Word.MAGIC] != MAGIC:
        raise ChannelError(f"channel {name!r} has a foreign header: it was not made by wingbeat")
    if words[Word.VERSION] != VERSION:
        raise ChannelError(f"channel {name!r} has layout version {words[Word.VERSION]}, this is {VERSION}")
    text = mapping[SPEC_START : SPEC_START + words[Word.SPEC_BYTES]]
    try:
        spec = _parse_spec(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ChannelError(f"channel {name!r} has a damaged spec: {error}") from None
    if len(mapping) != HEADER_BYTES + buffer_bytes(spec):
        raise ChannelError(f"channel {name!r} is {len(mapping)} bytes, its spec asks for another size")
    return spec


def _spec_json(spec: ChannelSpec) -> bytes:
    return json.dumps(dataclasses.asdict(spec) | {"taps_dtype": str(spec.taps_dtype).removeprefix("torch.")}).encode()


def _parse_spec(text: bytes) -> ChannelSpec:
    """Inverse of `_spec_json`. Raises ValueError, TypeError or KeyError on anything else."""
    fields = dict(json.loads(text))
    dtype = getattr(torch, str(fields.pop("taps_dtype")), None)
    if not isinstance(dtype, torch.dtype) or not all(type(value) is int and value >= 0 for value in fields.values()):
        raise ValueError(f"unexpected fields {text[:200]!r}")
    return ChannelSpec(**fields, taps_dtype=dtype)


def _release(words: memoryview, path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the finalizer, not the segment
        words[Word.CLOSED] = 1
        with _directory_lock():
            path.unlink(missing_ok=True)
