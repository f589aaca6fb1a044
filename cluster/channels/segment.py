"""A file in /dev/shm that two processes of one machine map; it has a name and is removed when its creator ends.

The file begins with a header of one page: int64 words, then JSON with the kind of the channel, its spec, and details
that a drafter of this kind needs. The body follows. The file is mapped with `mmap` rather than
`multiprocessing.shared_memory`, because that module's resource tracker in an attaching process unlinks the segment when
the attaching process ends. Before Python 3.13 this cannot be disabled. Both processes must share /dev/shm and the pid
namespace. Actors on one node do.
"""

import dataclasses
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.cluster.channels.doorbell import process_start
from wingbeat.cluster.channels.header import MAGIC, ChannelError, Word, write_owner
from wingbeat.cluster.channels.segment_files import (
    JSON_START,
    SHM_DIR,
    UNFINISHED,
    directory_lock,
    remove_stale_segments,
    segment_path,
)
from wingbeat.runtime.protocol.messages import ChannelSpec

HEADER_BYTES = 4096
VERSION = 7
"""Version of the header and of the layout of fields; increase the version with any change to one of them."""

Details = dict[str, str]
"""Data beyond the spec that a drafter needs for a channel of some kind; JSON values by name."""


class SegmentHeader(NamedTuple):
    """The JSON of a segment's header."""

    kind: str
    spec: ChannelSpec
    details: Details


@dataclasses.dataclass(frozen=True)
class Segment:
    """A mapped segment, which is unmapped when the last tensor or view over it is gone."""

    path: Path
    header: SegmentHeader
    words: memoryview
    body: Tensor
    """uint8 [body bytes], aligned to a page"""

    @classmethod
    def create(cls, name: str, header: SegmentHeader, body_bytes: int) -> "Segment":
        """Create the segment `name`, zeroed, after removing segments of dead verifiers.

        Raises ChannelError if the name is not a plain file name or belongs to a live verifier, or if /dev/shm is too
        full.
        """
        path = segment_path(name)
        remove_stale_segments()
        # The file is written under a private name and then linked to the segment's name. So a segment that has its name
        # is complete, and only one process gets the name.
        draft = path.with_name(f"{path.name}.{os.getpid()}.{process_start(os.getpid())}{UNFINISHED}")
        try:
            mapping = _allocate(draft, HEADER_BYTES + body_bytes)
            words = _write_header(mapping, header)
            with directory_lock():
                os.link(draft, path)
        except FileExistsError:
            raise ChannelError(f"channel {name!r} exists and its verifier is alive") from None
        finally:
            draft.unlink(missing_ok=True)
        return cls(path, header, words, _body(mapping))

    @classmethod
    def attach(cls, name: str, kind: str, body_bytes: Callable[[ChannelSpec], int]) -> "Segment":
        """Map the segment `name` of a channel of this kind; `body_bytes` returns the size that a spec's body must have.

        Raises ChannelError if the channel does not exist, or has another kind, version or size.
        """
        path = segment_path(name)
        mapping = _map(path, name)
        words = memoryview(mapping)[:JSON_START].cast("q")
        header = _read_header(mapping, words, name)
        if header.kind != kind:
            raise ChannelError(f"channel {name!r} is of kind {header.kind!r}, this drafter attaches {kind!r}")
        if len(mapping) != HEADER_BYTES + body_bytes(header.spec):
            raise ChannelError(f"channel {name!r} is {len(mapping)} bytes, its spec requires another size")
        return cls(path, header, words, _body(mapping))


def kind_of(name: str) -> str:
    """The kind of the channel `name`. Raises ChannelError if the channel does not exist."""
    mapping = _map(segment_path(name), name)
    return _read_header(mapping, memoryview(mapping)[:JSON_START].cast("q"), name).kind


def _allocate(path: Path, num_bytes: int) -> mmap.mmap:
    """Create and map a zeroed file of `num_bytes`.

    All pages are allocated at once, because access to a page for which /dev/shm has no memory left would raise SIGBUS.
    """
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
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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


def _body(mapping: mmap.mmap) -> Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)[HEADER_BYTES:]


def _write_header(mapping: mmap.mmap, header: SegmentHeader) -> memoryview:
    text = _header_json(header)
    if JSON_START + len(text) > HEADER_BYTES:
        raise ValueError(f"the header's JSON is {len(text)} bytes, {HEADER_BYTES - JSON_START} fit")
    mapping[JSON_START : JSON_START + len(text)] = text
    words = memoryview(mapping)[:JSON_START].cast("q")
    write_owner(words)
    words[Word.HEADER_BYTES] = len(text)
    words[Word.VERSION] = VERSION
    words[Word.MAGIC] = MAGIC
    return words


def _read_header(mapping: mmap.mmap, words: memoryview, name: str) -> SegmentHeader:
    if words[Word.MAGIC] != MAGIC:
        raise ChannelError(f"channel {name!r} has a foreign header: it was not made by wingbeat")
    if words[Word.VERSION] != VERSION:
        raise ChannelError(f"channel {name!r} has layout version {words[Word.VERSION]}, this is {VERSION}")
    try:
        return _parse_header(mapping[JSON_START : JSON_START + words[Word.HEADER_BYTES]])
    except (ValueError, TypeError, KeyError) as error:
        raise ChannelError(f"channel {name!r} has a damaged header: {error}") from None


def _header_json(header: SegmentHeader) -> bytes:
    spec = dataclasses.asdict(header.spec) | {"taps_dtype": str(header.spec.taps_dtype).removeprefix("torch.")}
    return json.dumps({"kind": header.kind, "spec": spec, "details": header.details}).encode()


def _parse_header(text: bytes) -> SegmentHeader:
    """Inverse of `_header_json`. Raises ValueError, TypeError or KeyError on invalid text."""
    fields = dict(json.loads(text))
    spec = dict(fields["spec"])
    dtype = getattr(torch, str(spec.pop("taps_dtype")), None)
    if not isinstance(dtype, torch.dtype) or not all(
        type(value) in (int, bool) and value >= 0 for value in spec.values()
    ):
        raise ValueError(f"unexpected fields {text[:200]!r}")
    return SegmentHeader(str(fields["kind"]), ChannelSpec(**spec, taps_dtype=dtype), dict(fields["details"]))
