"""Bytes that the pieces of a vocabulary stand for."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from wingbeat.runtime.tokenizer import BYTE_PIECE, SPACE, byte_of_letter

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer


def piece_reader(backend: "BackendTokenizer | None") -> Callable[[str], bytes]:
    """Returns a function from a vocabulary's pieces to the bytes they stand for.

    Args:
        backend: the tokenizer; None if the pieces are not byte-level letters (GPT-2's pieces are such letters).
    """
    letters: Mapping[str, int] = {}
    if backend is not None and '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"]):
        letters = byte_of_letter()

    def read(piece: str) -> bytes:
        if letters:
            known = all(letter in letters for letter in piece)
            return bytes(letters[letter] for letter in piece) if known else piece.encode()
        found = BYTE_PIECE.fullmatch(piece)
        return bytes.fromhex(found[1]) if found else piece.replace(SPACE, " ").encode()

    return read
