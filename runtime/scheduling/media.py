"""Images and sounds of a request as an engine gets them: what the processor made of each, where its tokens are."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray]
else:
    Arrays = dict[str, Any]  # commands show their help without numpy

IMAGE, AUDIO = "image", "audio"
"""Kinds of media."""
ARE = {IMAGE: "images are", AUDIO: "audio is"}
"""By kind, how errors begin to speak of it."""
SERVED = "served"
"""What is said of a kind of media that a model takes, where nothing is in the way."""
_WORD = 8


class MediaInput(NamedTuple):
    """One image or sound of a prompt, whose tokens follow one another."""

    start: int
    """Position of its first placeholder token."""
    length: int
    """Placeholder tokens."""
    digest: bytes
    """16 bytes, of the arrays."""
    arrays: Arrays
    """By the name that the model's encoder has for it: pixels, and what says how they lie; or a spectrogram."""
    grid: tuple[int, int] | None = None
    """Its tokens' rows and columns, where the model rotates by them; None where it rotates by positions alone."""
    kind: str = IMAGE

    @classmethod
    def of(
        cls,
        start: int,
        length: int,
        arrays: "Mapping[str, np.ndarray]",
        grid: tuple[int, int] | None = None,
        kind: str = IMAGE,
    ) -> "MediaInput":
        """With the digest of its arrays."""
        import numpy as np

        held = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
        digest = blake2b(digest_size=2 * _WORD)
        for name, array in held.items():
            digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
            digest.update(array.data)
        return cls(start, length, digest.digest(), held, grid, kind)

    def __eq__(self, other: object) -> bool:
        # Arrays are compared by their digest.
        mine = self._replace(arrays={})
        return isinstance(other, MediaInput) and tuple(mine) == tuple(other._replace(arrays={}))

    def __hash__(self) -> int:
        return hash((self.start, self.digest))

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + self.length

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def shift(self) -> int:
        """By how much the text behind it is rotated as if it stood elsewhere: at most 0."""
        return 0 if self.grid is None else max(self.grid) - self.length


def position_delta(media: tuple[MediaInput, ...]) -> int:
    """By how much the text behind all of them is rotated as if it stood elsewhere."""
    return sum(one.shift for one in media)


def prefix_ids(token_ids: list[int], media: tuple[MediaInput, ...]) -> list[int]:
    """What a prompt's blocks are hashed by: its tokens, and in the place of placeholders the medium's own numbers.

    The numbers are below 0, where no token is. Two in a row have all of the digest.
    """
    ids = list(token_ids)
    for one in media:
        words = [-1 - (int.from_bytes(one.digest[at : at + _WORD], "little") >> 1) for at in (0, _WORD)]
        ids[one.start : one.end] = [words[index % 2] for index in range(one.length)]
    return ids
