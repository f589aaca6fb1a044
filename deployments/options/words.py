"""Conversion of command line text to values: null words, JSON objects and lists."""

import json
from typing import Any, get_args

from pydantic import BaseModel, SecretStr

_NOTHING = ("", "none", "null")


def with_nothing_by_word(settings: type[BaseModel], values: Any) -> Any:
    """Replaces "none", "null" and "" by None for fields that may be None; a command line has no other way to write
    null.

    Keys are left alone, because a key may be the word "none", and so are fields with "none" among their literal values.
    """
    if not isinstance(values, dict):
        return values
    return {
        name: None if isinstance(value, str) and value.lower() in _NOTHING and _may_be_none(settings, name) else value
        for name, value in values.items()
    }


def _may_be_none(settings: type[BaseModel], name: str) -> bool:
    field = settings.model_fields.get(name)
    kinds = () if field is None else get_args(field.annotation)
    words = [word for kind in kinds for word in get_args(kind)]
    return type(None) in kinds and SecretStr not in words and "none" not in words


def object_of_json(text: Any, example: str) -> Any:
    """Parses a JSON object from command line text; a value that is not text is returned unchanged.

    Raises:
        ValueError: the text is not JSON.
    """
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"must be a JSON object such as {example}, got {text!r}") from error


def listed(text: Any) -> Any:
    """Splits command line text, a JSON list or items separated by commas; a value that is not text is returned
    unchanged.
    """
    if not isinstance(text, str):
        return text
    try:
        items = json.loads(text)
    except ValueError:
        # An address such as [::1] begins like a JSON list.
        items = None
    return items if isinstance(items, list) else [part.strip() for part in text.split(",")]
