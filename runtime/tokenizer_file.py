"""Reads files of a checkpoint's tokenizer without transformers."""

import json
from pathlib import Path

from wingbeat.runtime.folder_kinds import VOCABULARIES

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def has_chat_template(folder: Path) -> bool:
    """Whether a checkpoint has a chat template, in its own file or in tokenizer_config.json."""
    if any((folder / name).exists() for name in _TEMPLATES):
        return True
    config = folder / SETTINGS
    return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))


def no_tokenizer(folder: Path) -> str:
    """Returns the error message for a folder without any vocabulary."""
    files = ", ".join(VOCABULARIES)
    return f"no tokenizer in {folder}: there is none of {files}; copy the files of the model's tokenizer there"
