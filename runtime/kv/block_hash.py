"""What a block of tokens and all before it are known by."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT_HASH = bytes(16)
"""Parent hash of a sequence's first block."""


def hash_block(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """128-bit BLAKE2b of a full block and all before it; wide enough that equal hashes are taken as equal tokens."""
    return blake2b(parent_hash + array("q", token_ids).tobytes(), digest_size=16).digest()


def salted_root(salt: str, adapter: str = "") -> bytes:
    """Parent hash of the first block of sequences that share prefixes only with others of the same salt and adapter.

    Args:
        adapter: digest of its files; empty for none.
    """
    if not (salt or adapter):
        return ROOT_HASH
    salted = salt.encode("utf-8", "surrogatepass")
    return blake2b(salted, digest_size=16, key=adapter.encode(), person=b"salt").digest()
