"""Bounds the characters that one token can represent, so that too long texts are refused without tokenizing.

A bound exists only if every character of a text ends up in some token, and no token takes more characters than its own
piece has. Each class of the `tokenizers` package is judged by its serialized form; unknown classes have no bound.
"""

import json
from typing import Any

from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

_COMPOSED = 4
"""Canonical decomposition maps one character to at most 4 (UAX 15), so composition maps at most 4 to one."""
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
"""Most characters that a normalizer combines into one."""
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits"}
"""Pre-tokenizers that split a text without dropping characters."""
_BYTES = tuple(f"<0x{value:02X}>" for value in range(256))


def longest_token(backend: BackendTokenizer) -> int | None:
    """Returns the most characters of a text that one token can represent; None without a bound."""
    shrinking = _shrinking(_state(backend.normalizer))
    added = backend.get_added_tokens_decoder().values()
    # A token that strips whitespace takes any number of spaces.
    strips = any(token.lstrip or token.rstrip for token in added)
    if shrinking is None or strips or not _keeps_text(_state(backend.pre_tokenizer)) or not _knows_all(backend):
        return None
    pieces = [*backend.get_vocab(with_added_tokens=True), *(_as_found(token, backend) for token in added)]
    return shrinking * max(map(len, pieces))


def _state(component: Any) -> dict[str, Any] | None:
    """Serialized form of a tokenizer component."""
    return None if component is None else json.loads(component.__getstate__())


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """Returns how many characters normalization can combine into one; None if it can drop characters."""
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
    """Whether no character is unknown: unknown characters may be dropped, or many may become one token."""
    vocab, model = backend.get_vocab(with_added_tokens=False), backend.model
    if isinstance(model, models.BPE):
        if _writes_bytes(_state(backend.normalizer), _state(backend.pre_tokenizer)):
            return all(letter in vocab for letter in pre_tokenizers.ByteLevel.alphabet())
        falls_back = model.byte_fallback
    else:
        falls_back = isinstance(model, models.Unigram) and _state(model)["byte_fallback"]
    return falls_back and all(piece in vocab for piece in _BYTES)


def _writes_bytes(*components: dict[str, Any] | None) -> bool:
    """Whether a component writes a text as bytes, each as its own letter."""
    for component in components:
        if component is not None:
            nested = component.get("normalizers", component.get("pretokenizers", ()))
            if component["type"] == "ByteLevel" or _writes_bytes(*nested):
                return True
    return False


def _as_found(token: AddedToken, backend: BackendTokenizer) -> str:
    """Returns the characters that an added token matches: normalized content if normalized text is searched."""
    if backend.normalizer is None or not token.normalized:
        return token.content
    return backend.normalizer.normalize_str(token.content)
