"""The tokenizer that a GGUF file holds, as files of Hugging Face."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wingbeat.runtime.hugging_face import load_files
from wingbeat.runtime.tensor_files import GGUF_FILE, ModelCheckpointError

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = _BYTES | {"use_regex": True}
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _BYTES]


def _by_case(ending: str, numbers: str) -> list[dict[str, Any]]:
    """Words are split where lower case ends, too."""
    words = "".join(
        rf"[^\r\n\p{{L}}\p{{N}}]?{word}{ending}|" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
    )
    return _split(words + numbers + _MARKS.replace(r"[\r\n]*", r"[\r\n/]*", 1))


_LLAMA3, _QWEN2 = (_split(_CONTRACTIONS + numbers + _MARKS) for numbers in (r"\p{N}{1,3}", r"\p{N}"))
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _by_case(f"{_ENDINGS}?", r"\p{N}{1,3}"),
}
"""Splits of texts before pairs are merged, by `tokenizer.ggml.pre`."""
_NORMALISED = frozenset({"qwen2", "deepseek-r1-qwen"})
_CONTROL, _OWN = 3, 4
"""Types of tokens: such as ends of texts, and words that are added whole."""


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, name: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    Args:
        metadata: fields of the file.
        folder: where the file lies as `GGUF_FILE`.
        name: of the file, for errors.

    Raises:
        ModelCheckpointError: it is of a kind that is not read.
    """
    kind = _field(metadata, "model")
    if kind == "gpt2":
        _write_pairs(metadata, folder, name)
    elif kind == "llama":
        from transformers import AutoTokenizer

        load_files(AutoTokenizer, folder, gguf_file=GGUF_FILE).save_pretrained(folder)
    else:
        raise ModelCheckpointError(
            f"{name} has a tokenizer of the kind {kind!r}, which is not read: gpt2 and llama are"
        )
    template = _field(metadata, "chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _field(metadata: Mapping[str, Any], name: str) -> Any:
    return metadata.get(f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}")


def _write_pairs(metadata: Mapping[str, Any], folder: Path, name: str) -> None:
    """A byte-level BPE."""
    for needed in ("tokens", "merges"):
        if not isinstance(_field(metadata, needed), list):
            raise ModelCheckpointError(f"{name} has no tokenizer.ggml.{needed}")
    pre = _field(metadata, "pre")
    if pre not in PRE_TOKENIZERS:
        raise ModelCheckpointError(
            f"{name} splits texts as {pre!r} does, which is not read: {', '.join(PRE_TOKENIZERS)} are"
        )
    tokens, types = _field(metadata, "tokens"), _field(metadata, "token_type") or []
    merges = [merge.split(" ", 1) for merge in _field(metadata, "merges")]
    added = [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for number, kind in enumerate(types)
        if kind in (_CONTROL, _OWN)
    ]
    first = _token(metadata, tokens, "bos") if _field(metadata, "add_bos_token") else None
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre in _NORMALISED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None if first is None else _begun_by(first, tokens.index(first)),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre in ("llama-bpe", "smaug-bpe"),
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role in ("bos", "eos", "unk", "pad"):
        if (token := _token(metadata, tokens, {"unk": "unknown", "pad": "padding"}.get(role, role))) is not None:
            settings[f"{role}_token"] = token
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _token(metadata: Mapping[str, Any], tokens: list[str], role: str) -> str | None:
    number = _field(metadata, f"{role}_token_id")
    return None if number is None else tokens[number]


def _begun_by(token: str, number: int) -> dict[str, Any]:
    """Texts that begin by a token."""
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    pair = [first, text, second]
    return {"type": "TemplateProcessing", "single": [first, text], "pair": pair, "special_tokens": special}
