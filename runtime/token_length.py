"""Bounds the number of characters that a token can represent, so that too long texts are refused without tokenizing.

A bound exists only if every character of a text ends up in some token, and if no token represents more characters than
its vocabulary entry has. Each class of the `tokenizers` package is judged by its serialized form; unknown classes have
no bound.
"""

import json
from typing import Any

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

_COMPOSED = 4
"""Canonical decomposition maps a character to at most 4 characters (UAX 15), so composition maps at most 4 characters
to a single character."""
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Maximum number of characters that a normalizer combines into a single character, by normalizer."""
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits"}
"""Pre-tokenizers that split a text without dropping characters."""
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))


def longest_token(backend: BackendTokenizer) -> int | None:
    """Returns the maximum number of a text's characters that a token can represent; None if there is no bound."""
    shrinking = _shrinking(_state(backend.normalizer))
    added = backend.get_added_tokens_decoder().values()
    # A token that strips whitespace can represent any number of spaces.
    strips = any(token.lstrip or token.rstrip for token in added)
    if shrinking is None or strips or not _keeps_text(_state(backend.pre_tokenizer)) or not _knows_all(backend):
        return None
    pieces = [*backend.get_vocab(with_added_tokens=True), *(_as_found(token, backend) for token in added)]
    return shrinking * max(map(len, pieces))


def _state(component: Any) -> dict[str, Any] | None:
    """Returns the serialized form of a tokenizer component."""
    return None if component is None else json.loads(component.__getstate__())


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """Returns how many characters the normalizer can combine into one; None if the normalizer can drop characters."""
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
    """Whether the vocabulary can represent every character.

    Unknown characters might be dropped, or many might become a single token.
    """
    vocab, model = backend.get_vocab(with_added_tokens=False), backend.model
    if isinstance(model, models.BPE):
        if _writes_bytes(_state(backend.normalizer), _state(backend.pre_tokenizer)):
            return all(letter in vocab for letter in pre_tokenizers.ByteLevel.alphabet())
        falls_back = model.byte_fallback
    else:
        falls_back = isinstance(model, models.Unigram) and _state(model)["byte_fallback"]
    return falls_back and all(piece in vocab for piece in _BYTES)


def _writes_bytes(*components: dict[str, Any] | None) -> bool:
    """Whether a component converts a text to bytes and writes each byte as a letter."""
    for component in components:
        if component is not None:
            nested = component.get("normalizers", component.get("pretokenizers", ()))
            if component["type"] == "ByteLevel" or _writes_bytes(*nested):
                return True
    return False


def _as_found(token: AddedToken, backend: BackendTokenizer) -> str:
    """Returns the characters that an added token matches; normalized, if the token is searched in normalized text."""
    if backend.normalizer is None or not token.normalized:
        return token.content
    return backend.normalizer.normalize_str(token.content)
