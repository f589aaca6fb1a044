"""How many characters one token can stand for: a bound that lets texts be refused unread; None where there is none.

A bound is only given where every character of a text ends up in some token, and no token takes more characters than
its own piece has. Each class of the `tokenizers` package is judged by its serialized form; an unknown one has no bound.
"""

import json
from typing import Any

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

_COMPOSED = 4
"""Canonical decomposition makes at most 4 characters of one (UAX 15), so composition makes at least 1 of 4."""
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Characters that become one, at most."""
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits"}
"""Pre-tokenizers that split a text and drop nothing of it."""
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))


def longest_token(backend: BackendTokenizer) -> int | None:
    """The most characters of a text that one token can stand for; None where nothing bounds them."""
    shrinking = _shrinking(_state(backend.normalizer))
    added = backend.get_added_tokens_decoder().values()
    # A token that strips takes any number of spaces with it.
    strips = any(token.lstrip or token.rstrip for token in added)
    if shrinking is None or strips or not _keeps_text(_state(backend.pre_tokenizer)) or not _knows_all(backend):
        return None
    pieces = [*backend.get_vocab(with_added_tokens=True), *(_as_found(token, backend) for token in added)]
    return shrinking * max(map(len, pieces))


def _state(component: Any) -> dict[str, Any] | None:
    """The serialized form of a part of a tokenizer."""
    return None if component is None else json.loads(component.__getstate__())


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters normalization can make one of, None where it can drop some."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        total = 1
        for factor in map(_shrinking, normalizer["normalizers"]):
            if factor is None:
                return None
            total *= factor
        return total
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return 1 if replaced and len(normalizer["content"]) >= len(replaced) else None
    return _NORMALIZERS.get(normalizer["type"])


def _keeps_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    match pre_tokenizer["type"]:
        case "Sequence":
            return all(map(_keeps_text, pre_tokenizer["pretokenizers"]))
        case "Split" | "Punctuation":
            return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in _KEEPS_ALL


def _knows_all(backend: BackendTokenizer) -> bool:
    """Whether no character is unknown: those may be dropped, or one token may stand for many."""
    vocab, model = backend.get_vocab(with_added_tokens=False), backend.model
    if isinstance(model, models.BPE):
        if _writes_bytes(_state(backend.normalizer), _state(backend.pre_tokenizer)):
            return all(letter in vocab for letter in pre_tokenizers.ByteLevel.alphabet())
        falls_back = model.byte_fallback
    else:
        falls_back = isinstance(model, models.Unigram) and _state(model)["byte_fallback"]
    return falls_back and all(piece in vocab for piece in _BYTES)


def _writes_bytes(*components: dict[str, Any] | None) -> bool:
    """Whether one of them spells a text as bytes, each by a letter of its own."""
    for component in components:
        if component is not None:
            nested = component.get("normalizers", component.get("pretokenizers", ()))
            if component["type"] == "ByteLevel" or _writes_bytes(*nested):
                return True
    return False


def _as_found(token: AddedToken, backend: BackendTokenizer) -> str:
    """The characters that an added token takes: its content is itself normalized where normalized text is searched."""
    if backend.normalizer is None or not token.normalized:
        return token.content
    return backend.normalizer.normalize_str(token.content)
