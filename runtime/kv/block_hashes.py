"""What a block of tokens and all before it are known by, and which hashes a prefix cache has gained and lost."""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

ROOT_HASH = bytes(16)
"""Parent hash of a sequence's first block."""


def hash_block(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """128-bit BLAKE2b of a full block and all before it; wide enough that equal hashes are taken as equal tokens."""
    return blake2b(parent_hash + array("q", token_ids).tobytes(), digest_size=16).digest()


def salted_root(salt: str, variant: str = "") -> bytes:
    """Parent hash of the first block of sequences that share prefixes only with others of the same salt and variant.

    Args:
        variant: digest of its files; empty for none.
    """
    if not (salt or variant):
        return ROOT_HASH
    salted = salt.encode("utf-8", "surrogatepass")
    return blake2b(salted, digest_size=16, key=variant.encode(), person=b"salt").digest()


HASH_BYTES = 8
"""Of each block hash that is told: two prefixes taken for one cost a detour, never a token."""


class CacheChanges(NamedTuple):
    """Hashes of `HASH_BYTES` each, one behind the other; to be applied in the order of the fields."""

    cleared: bool = False
    """Everything before was forgotten."""
    dropped: bytes = b""
    cached: bytes = b""


class CacheLog:
    """Changes that cancel out are not told, so that its size is bounded by the cache's."""

    def __init__(self) -> None:
        self._cleared = False
        self._dropped: dict[bytes, None] = {}
        self._cached: dict[bytes, None] = {}

    def cached(self, block_hash: bytes) -> None:
        """A prefix can be found from now on."""
        self._cached[block_hash[:HASH_BYTES]] = None

    def dropped(self, block_hash: bytes) -> None:
        """A prefix cannot be found any more."""
        short = block_hash[:HASH_BYTES]
        if short in self._cached:
            del self._cached[short]
        else:
            self._dropped[short] = None

    def cleared(self) -> None:
        """No prefix can be found any more."""
        self._cleared = True
        self._dropped.clear()
        self._cached.clear()

    def add(self, changes: CacheChanges) -> None:
        """Changes that come after those that are here."""
        if changes.cleared:
            self.cleared()
        for block_hash in split_hashes(changes.dropped):
            self.dropped(block_hash)
        for block_hash in split_hashes(changes.cached):
            self.cached(block_hash)

    def take(self) -> CacheChanges | None:
        """What changed since the last call; None where nothing did."""
        if not (self._cleared or self._dropped or self._cached):
            return None
        changes = CacheChanges(self._cleared, b"".join(self._dropped), b"".join(self._cached))
        self._cleared = False
        self._dropped.clear()
        self._cached.clear()
        return changes


def split_hashes(joined: bytes) -> Iterable[bytes]:
    """The hashes of one field of `CacheChanges`."""
    return (joined[begin : begin + HASH_BYTES] for begin in range(0, len(joined), HASH_BYTES))
