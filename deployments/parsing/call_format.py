"""Builds formats of answers with tool calls. A format is a structural tag of xgrammar, from which a grammar is
compiled.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

Format = dict[str, Any]


class PlacedSchema(dict[str, Any]):
    """JSON schema that also has its path in the request, for error messages."""

    def __init__(self, schema: dict[str, Any], place: str) -> None:
        super().__init__(schema)
        self.place = place


class Function(NamedTuple):
    """A function that the model may call."""

    name: str
    schema: dict[str, Any]
    """JSON schema of the arguments."""


def text(value: str) -> Format:
    """Returns the format of exactly the text `value`."""
    return {"type": "const_string", "value": value}


def in_order(*elements: Format) -> Format:
    """Returns the format of a text that consists of the elements, one after the other."""
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    """Returns the format of a text that is one of the elements."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """Returns the format of a text that is `content` or empty."""
    return {"type": "optional", "content": content}


def json_of(schema: dict[str, Any], style: str = "json") -> Format:
    """Returns the format of a value that matches a schema; references in the schema are resolved within the schema.

    Args:
        style: xgrammar's name of the notation. With any style except `json`, the model writes the arguments as text
            between tags.
    """
    form = {"type": "json_schema", "json_schema": schema, "style": style}
    return form | {"place": schema.place} if isinstance(schema, PlacedSchema) else form


def between(begin: str, content: Format, end: str) -> Format:
    """Returns the format of `content` between the marks `begin` and `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def any_text_until(end: str, begin: str = "") -> Format:
    """Returns the format of any text followed by the mark `end`."""
    return between(begin, {"type": "any_text"}, end)


def calls(tags: Sequence[Format], separator: str, several: bool) -> Format:
    """Returns the format of one of the tags; if `several`, of one or more of the tags, with separators between them."""
    marks = {"separator": separator, "at_least_one": True, "stop_after_first": not several}
    return {"type": "tags_with_separator", "tags": list(tags), **marks}


def text_with_calls(tags: Sequence[Format], trigger: str, several: bool) -> Format:
    """Returns the format of any text in which each trigger begins one of the tags."""
    marks = {"triggers": [trigger], "at_least_one": False, "stop_after_first": not several}
    return {"type": "triggered_tags", "tags": list(tags), **marks}


def objects(functions: Sequence[Function], begin: str = "", end: str = "", key: str = "arguments") -> list[Format]:
    """Returns one format for each function: a JSON object with the function's name and arguments, between the marks
    `begin` and `end`.
    """
    return [
        between(f'{begin}{{"name": {json.dumps(name)}, "{key}": ', json_of(schema), f"}}{end}")
        for name, schema in functions
    ]


def list_of_calls(functions: Sequence[Function], several: bool) -> Format:
    """Returns the format of a JSON list of calls."""
    return in_order(text("["), calls(objects(functions), ", ", several), text("]"))
