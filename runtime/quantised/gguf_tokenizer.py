"""Writes the tokenizer in a GGUF file as Hugging Face files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wingbeat.runtime.hugging_face import load_files
from wingbeat.runtime.quantised.gguf_splits import PRE_TOKENIZERS
from wingbeat.runtime.tensor_files import GGUF_FILE, ModelCheckpointError

_CONTROL, _OWN = 3, 4
"""Numbers of token types: control tokens such as the end of a text, and user-defined tokens."""


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, name: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    Args:
        metadata: fields of the file.
        folder: folder to write to, which contains the GGUF file under the name `GGUF_FILE`.
        name: name of the file, for errors.

    Raises:
        ModelCheckpointError: the kind of tokenizer is not supported.
    """
    kind = _field(metadata, "model")
    if kind == "gpt2":
        _write_pairs(metadata, folder, name)
    elif kind == "llama":
        from transformers import AutoTokenizer

        load_files(AutoTokenizer, folder, gguf_file=GGUF_FILE).save_pretrained(folder)
    else:
        raise ModelCheckpointError(
            f"{name} has a tokenizer of the kind {kind!r}, which is not supported: gpt2 and llama are"
        )
    template = _field(metadata, "chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _field(metadata: Mapping[str, Any], name: str) -> Any:
    return metadata.get(f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}")


def _write_pairs(metadata: Mapping[str, Any], folder: Path, name: str) -> None:
    """Writes a byte-level BPE tokenizer."""
    for needed in ("tokens", "merges"):
        if not isinstance(_field(metadata, needed), list):
            raise ModelCheckpointError(f"{name} has no tokenizer.ggml.{needed}")
    pre = _field(metadata, "pre")
    if pre not in PRE_TOKENIZERS:
        raise ModelCheckpointError(
            f"{name} has tokenizer.ggml.pre = {pre!r}, which is not supported: {', '.join(PRE_TOKENIZERS)} are"
        )
    splits = PRE_TOKENIZERS[pre]
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
    begins = _field(metadata, "add_bos_token")
    first = _token(metadata, tokens, "bos") if (splits.begins if begins is None else begins) else None
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if splits.is_composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits.steps},
        "post_processor": None if first is None else _begun_by(first, tokens.index(first)),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": splits.keeps_words,
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
    """Post-processor that prepends a token to texts."""
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    special = {token: {"id": token, "ids": [number], "tokens": [token]}}
    pair = [first, text, second]
    return {"type": "TemplateProcessing", "single": [first, text], "pair": pair, "special_tokens": special}
