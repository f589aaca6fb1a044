"""Formats of answers with tool calls, as xgrammar's structural tags, from which grammars are compiled."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

Format = dict[str, Any]


class PlacedSchema(dict[str, Any]):
    """JSON schema with its place in the request, for error messages."""

    def __init__(self, schema: dict[str, Any], place: str) -> None:
        super().__init__(schema)
        self.place = place


class Function(NamedTuple):
    """A function that the model may call."""

    name: str
    schema: dict[str, Any]
    """JSON schema of the arguments."""


def text(value: str) -> Format:
    """Format: exactly this text."""
    return {"type": "const_string", "value": value}


def in_order(*elements: Format) -> Format:
    """Format: the elements one after the other."""
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    """Format: one of the elements."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """Format: the content, or nothing."""
    return {"type": "optional", "content": content}


def json_of(schema: dict[str, Any], style: str = "json") -> Format:
    """Format: a value of a schema. References in the schema are resolved within it.

    Args:
        style: xgrammar's name of the notation; all but `json` write the arguments as text between tags.
    """
    form = {"type": "json_schema", "json_schema": schema, "style": style}
    return form | {"place": schema.place} if isinstance(schema, PlacedSchema) else form


def between(begin: str, content: Format, end: str) -> Format:
    """Format: the content between two marks."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def any_text_until(end: str, begin: str = "") -> Format:
    """Format: text up to a mark, and the mark."""
    return between(begin, {"type": "any_text"}, end)


def calls(tags: Sequence[Format], separator: str, several: bool) -> Format:
    """Format: one of the tags, or with `several` one or more with separators."""
    marks = {"separator": separator, "at_least_one": True, "stop_after_first": not several}
    return {"type": "tags_with_separator", "tags": list(tags), **marks}


def text_with_calls(tags: Sequence[Format], trigger: str, several: bool) -> Format:
    """Format: any text in which the trigger begins one of the tags."""
    marks = {"triggers": [trigger], "at_least_one": False, "stop_after_first": not several}
    return {"type": "triggered_tags", "tags": list(tags), **marks}


def objects(functions: Sequence[Function], begin: str = "", end: str = "", key: str = "arguments") -> list[Format]:
    """Formats, one per function: a JSON object with name and arguments, between two marks."""
    return [
        between(f'{begin}{{"name": {json.dumps(name)}, "{key}": ', json_of(schema), f"}}{end}")
        for name, schema in functions
    ]


def list_of_calls(functions: Sequence[Function], several: bool) -> Format:
    """Format: a JSON list of calls."""
    return in_order(text("["), calls(objects(functions), ", ", several), text("]"))
