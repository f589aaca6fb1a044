"""How words of a command line become values: one that says nothing, objects as JSON, and lists."""

import json
from typing import Any, get_args

from pydantic import BaseModel, SecretStr

_NOTHING = ("", "none", "null")


def with_nothing_by_word(settings: type[BaseModel], values: Any) -> Any:
    """The same values with None for "none", "null" and "", of fields that may be None; a key may read so, and stays,
    and so does a word of the field's own.

    The command line has no other way to say null.
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
    """An object as the command line has it; what is no text is returned as it is.

    Raises:
        ValueError: it is no JSON.
    """
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"must be a JSON object such as {example}, got {text!r}") from error


def listed(text: Any) -> Any:
    """Items of a list as the command line has it, in JSON or between commas; what is no text is returned as it is."""
    if not isinstance(text, str):
        return text
    try:
        items = json.loads(text)
    except ValueError:
        # An address such as [::1] begins as a list does.
        items = None
    return items if isinstance(items, list) else [part.strip() for part in text.split(",")]
