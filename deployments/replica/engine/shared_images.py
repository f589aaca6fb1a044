"""Images on their way from a replica to its engine's process: as memory that both map, and not through their link.

The memory has no name. The engine finds it among the replica's open files, and it goes when both have let go of it.
"""

import mmap
import os
from typing import NamedTuple

import numpy as np

from wingbeat.deployments.fleet.wire import IMAGES, WireRequest

_ALIGNMENT = 64


class _Place(NamedTuple):
    """Where an array lies in the memory."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class _Shared(NamedTuple):
    """In the place of a request's images."""

    path: str
    size: int
    images: tuple[tuple, ...]
    """As in a `WireRequest`, with a `_Place` for each array."""


def share_images(packed: WireRequest) -> tuple[WireRequest, int | None]:
    """The request with its images in memory of their own, and its file descriptor, which the caller closes.

    Raises:
        OSError: there is no room for them.
    """
    if not packed[IMAGES]:
        return packed, None
    fd, end, images = os.memfd_create("wingbeat-images"), 0, []
    try:
        for image in packed[IMAGES]:
            places = {}
            for name, given in image[3].items():
                array = np.ascontiguousarray(given)
                places[name] = tuple(_Place(end, array.dtype.str, array.shape))
                _write(fd, memoryview(array.reshape(-1).view(np.uint8)), end)
                end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
            images.append((*image[:3], places, *image[4:]))
        os.ftruncate(fd, max(end, 1))
    except BaseException:
        os.close(fd)
        raise
    shared = tuple(_Shared(f"/proc/{os.getpid()}/fd/{fd}", max(end, 1), tuple(images)))
    return (*packed[:IMAGES], shared, *packed[IMAGES + 1 :]), fd


def attach_images(packed: WireRequest) -> WireRequest:
    """The inverse, in the engine's process; nothing is copied.

    Raises:
        OSError, ValueError: the memory is gone, because the request is.
    """
    if not packed[IMAGES]:
        return packed
    path, size, images = packed[IMAGES]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    attached = []
    for image in images:
        arrays = {}
        for name, (offset, dtype, shape) in image[3].items():
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(memory, dtype, count, offset).reshape(shape)
        attached.append((*image[:3], arrays, *image[4:]))
    return (*packed[:IMAGES], tuple(attached), *packed[IMAGES + 1 :])


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
