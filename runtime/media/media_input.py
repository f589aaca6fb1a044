"""Images and sounds of a request as an engine gets them: what the processor made of each, where its tokens are."""

from base64 import b64decode, b64encode
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
    whole: bool = False
    """Whether its tokens attend to each other in both directions, so that no prompt chunk may end among them."""

    @classmethod
    def of(
        cls,
        start: int,
        length: int,
        arrays: "Mapping[str, np.ndarray]",
        grid: tuple[int, int] | None = None,
        kind: str = IMAGE,
        whole: bool = False,
    ) -> "MediaInput":
        """With the digest of its arrays."""
        import numpy as np

        held = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
        digest = blake2b(digest_size=2 * _WORD)
        for name, array in held.items():
            digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
            digest.update(array.data)
        return cls(start, length, digest.digest(), held, grid, kind, whole)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "MediaInput":
        """The inverse of `as_fields`; raises ValueError, KeyError or TypeError for other fields."""
        import numpy as np

        arrays = {
            name: np.frombuffer(b64decode(data, validate=True), np.dtype(dtype)).reshape(shape)
            for name, (dtype, shape, data) in fields["arrays"].items()
        }
        grid = None if fields["grid"] is None else tuple(fields["grid"])
        return cls.of(fields["start"], fields["length"], arrays, grid, fields["kind"], fields.get("whole", False))

    def as_fields(self) -> dict[str, Any]:
        """See `PromptSpan.as_fields`."""
        arrays = {
            name: [array.dtype.str, list(array.shape), b64encode(array.tobytes()).decode()]
            for name, array in self.arrays.items()
        }
        return {name: getattr(self, name) for name in ("start", "length", "grid", "kind", "whole")} | {"arrays": arrays}

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

    def ids(self) -> list[int]:
        """See `PromptSpan.ids`; two in a row have all of the digest."""
        words = [-1 - (int.from_bytes(self.digest[at : at + _WORD], "little") >> 1) for at in (0, _WORD)]
        return [words[index % 2] for index in range(self.length)]


def position_delta(media: tuple[MediaInput, ...]) -> int:
    """By how much the text behind all of them is rotated as if it stood elsewhere."""
    return sum(one.shift for one in media)
