"""Images and sounds of a request as an engine receives them: the processor's arrays, and the tokens' positions."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray]
else:
    Arrays = dict[str, Any]  # numpy is not imported, so that command-line help works without it

IMAGE, AUDIO = "image", "audio"
"""Names of the kinds of media."""
ARE = {IMAGE: "images are", AUDIO: "audio is"}
"""For each kind of media, the words with which error messages begin."""
SERVED = "served"
"""Value of `LoadedModel.takes` for a supported kind of media."""
_WORD = 8


class MediaInput(NamedTuple):
    """An image or sound of a prompt, whose placeholder tokens are contiguous."""

    start: int
    """Position of the first placeholder token."""
    length: int
    """Number of placeholder tokens."""
    digest: bytes
    """Hash of the arrays, 16 bytes."""
    arrays: Arrays
    """Arrays by the encoder's input names: pixels and their grid, or a spectrogram and its mask."""
    grid: tuple[int, int] | None = None
    """Numbers of rows and columns of the tokens, if RoPE uses rows and columns; None if RoPE uses positions."""
    kind: str = IMAGE
    whole: bool = False
    """Whether the tokens attend to each other in both directions, so that no prompt chunk may end between them."""

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
        """Builds an input and computes the digest of its arrays."""
        import numpy as np

        held = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
        digest = blake2b(digest_size=2 * _WORD)
        for name, array in held.items():
            digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
            digest.update(array.data)
        return cls(start, length, digest.digest(), held, grid, kind, whole)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> "MediaInput":
        """Inverse of `as_fields`; raises ValueError, KeyError or TypeError for malformed fields."""
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
        # Arrays are compared by the field `digest` alone.
        mine = self._replace(arrays={})
        return isinstance(other, MediaInput) and tuple(mine) == tuple(other._replace(arrays={}))

    def __hash__(self) -> int:
        return hash((self.start, self.digest))

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def shift(self) -> int:
        """Offset, at most 0, that this medium adds to the RoPE positions of all later tokens."""
        return 0 if self.grid is None else max(self.grid) - self.length

    def ids(self) -> list[int]:
        """See `PromptSpan.ids`; two consecutive ids contain the whole digest."""
        words = [-1 - (int.from_bytes(self.digest[at : at + _WORD], "little") >> 1) for at in (0, _WORD)]
        return [words[index % 2] for index in range(self.length)]
