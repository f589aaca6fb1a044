"""By which three positions the tokens of a prompt with images are rotated (M-RoPE): those of time, row and column."""

import numpy as np

from wingbeat.runtime.media.media_input import MediaInput


def rotations(images: tuple[MediaInput, ...], begin: int, end: int) -> np.ndarray:
    """Of positions `begin` to `end` of a sequence: int64 [3, end - begin].

    A text token has one number three times; an image's have its row and column, counted from where it begins, and what
    comes behind goes on behind the larger of the two.

    Args:
        images: with their grids, in the order of their tokens.
    """
    found = np.tile(np.arange(begin, end), (3, 1))
    shift = 0
    for image in images:
        first, last = max(image.start, begin), min(image.end, end)
        if first < last:
            index, columns = np.arange(first, last) - image.start, image.grid[1]
            lies = np.stack([np.zeros_like(index), index // columns, index % columns])
            found[:, first - begin : last - begin] = image.start + shift + lies
        shift += image.shift
        found[:, max(image.end, begin) - begin :] = np.arange(max(image.end, begin), end) + shift
    return found
