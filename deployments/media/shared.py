"""Passes media from a replica to its engine's process in shared memory, so that the data need not be sent through the
link.

The memory is a memfd, which has no name in the file system. The engine opens the memfd through the replica's file
descriptor in /proc, and the kernel frees the memory when both processes have closed it.
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
    """Reference to the media of a request in shared memory."""

    path: str
    size: int
    media: tuple[MediaInput, ...]
    """Media inputs in which each array is replaced by a `_Place`, its position in the shared memory."""


class _Place(NamedTuple):
    """Position of an array in the shared memory: offset in bytes, dtype and shape."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


def share_spans(sent: WireRequest) -> tuple[WireRequest, int]:
    """Moves a request's media to shared memory; returns the request, and the file descriptor of the memory, which the
    caller must close.

    Raises:
        OSError: there is not enough memory.
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
        raise OSError(f"there is no memory for its media: {error}") from error
    shared = SharedMedia(f"/proc/{os.getpid()}/fd/{fd}", max(end, 1), tuple(media))
    return WireRequest(sent.number, replace(sent.request, spans=()), shared), fd


def attach_spans(sent: WireRequest) -> Request:
    """Restores, in the engine's process, a request that `share_spans` has made; arrays are mapped and not copied.

    Raises:
        OSError, ValueError: the memory was freed, because the request has ended.
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
