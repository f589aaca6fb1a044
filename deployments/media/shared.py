"""Media on their way from a replica to its engine's process: as memory that both map, and not through their link.

The memory has no name. The engine finds it among the replica's open files, and it goes when both have let go of it.
"""

import mmap
import os
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from wingbeat.deployments.fleet.wire import WireRequest
from wingbeat.runtime.media.media_input import MediaInput
from wingbeat.runtime.scheduling.request import Request

_ALIGNMENT = 64


class SharedMedia(NamedTuple):
    """Where the media of a request lie while it is on its way to its engine's process."""

    path: str
    size: int
    media: tuple[MediaInput, ...]
    """With the place of each array in the memory as the array."""


class _Place(NamedTuple):
    """Where an array lies in the memory."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


def share_spans(sent: WireRequest) -> tuple[WireRequest, int]:
    """A request that has media, with them in memory of their own, and its file descriptor, which the caller closes.

    Raises:
        OSError: there is no room for them.
    """
    given, media, end = cast("tuple[MediaInput, ...]", sent.request.spans), [], 0
    try:
        fd = os.memfd_create("wingbeat-media")
        try:
            for one in given:
                places = {}
                for name, held in one.arrays.items():
                    array = np.ascontiguousarray(held)
                    places[name] = _Place(end, array.dtype.str, array.shape)
                    _write(fd, array.reshape(-1).view(np.uint8).data, end)
                    end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
                media.append(one._replace(arrays=places))
            os.ftruncate(fd, max(end, 1))
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise OSError(f"its media find no room in memory: {error}") from error
    shared = SharedMedia(f"/proc/{os.getpid()}/fd/{fd}", max(end, 1), tuple(media))
    return WireRequest(sent.number, replace(sent.request, spans=()), shared), fd


def attach_spans(sent: WireRequest) -> Request:
    """The inverse, in the engine's process, of a request that has media; nothing is copied.

    Raises:
        OSError, ValueError: the memory is gone, because the request is.
    """
    fd = os.open(sent.shared.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, sent.shared.size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    attached = []
    for one in sent.shared.media:
        arrays = {}
        for name, place in one.arrays.items():
            count = int(np.prod(place.shape))
            arrays[name] = np.frombuffer(memory, place.dtype, count, place.offset).reshape(place.shape)
        attached.append(one._replace(arrays=arrays))
    return replace(sent.request, spans=tuple(attached))


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
