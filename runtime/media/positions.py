"""RoPE positions in prompts with images (M-RoPE): time, row and column of each token."""

import numpy as np

from wingbeat.runtime.media.media_input import MediaInput


def rotations(images: tuple[MediaInput, ...], begin: int, end: int) -> np.ndarray:
    """Returns the RoPE positions of tokens `begin` to `end` of a sequence: int64 [3, end - begin].

    A text token has the same number on all three axes. Let p be the RoPE position at which an image starts. A token of
    the image has p on the time axis, p plus the token's row on the row axis, and p plus the token's column on the
    column axis. The text after an image starts at p + max(rows, columns).

    Args:
        images: the images with their grids, in the order of their tokens.
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
