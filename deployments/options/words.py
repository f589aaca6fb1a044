"""Conversion of command line text to values: words that stand for None, JSON objects, and lists."""

import json
from typing import Any, get_args

from pydantic import BaseModel, SecretStr

_NOTHING = ("", "none", "null")


def with_nothing_by_word(settings: type[BaseModel], values: Any) -> Any:
    """Replaces "none", "null" and "" by None in fields that may be None, because there is no other way to write null on
    a command line.

    API keys are not replaced, because a key may be the word "none". Fields that have "none" among their literal values
    are not replaced either.
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
    """Returns the items of command line text, which is a JSON list or items separated by commas.

    A value that is not text is returned unchanged.
    """
    if not isinstance(text, str):
        return text
    try:
        items = json.loads(text)
    except ValueError:
        # A text that begins like a JSON list need not be one, because it may be an address such as [::1].
        items = None
    return items if isinstance(items, list) else [part.strip() for part in text.split(",")]
