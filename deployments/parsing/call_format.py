"""What an answer with calls looks like, in the words of xgrammar's structural tags: what a grammar is made from."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

Format = dict[str, Any]


class PlacedSchema(dict[str, Any]):
    """A JSON schema, and where the request has the schema, for errors."""

    def __init__(self, schema: dict[str, Any], place: str) -> None:
        super().__init__(schema)
        self.place = place


class Function(NamedTuple):
    """What can be called."""

    name: str
    schema: dict[str, Any]
    """JSON schema of its arguments."""


def text(value: str) -> Format:
    """Exactly this."""
    return {"type": "const_string", "value": value}


def in_order(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    """One of them."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """It, or nothing."""
    return {"type": "optional", "content": content}


def json_of(schema: dict[str, Any], style: str = "json") -> Format:
    """A value of a schema, whose references are its own.

    Args:
        style: xgrammar's word for how it is written; all but json have an argument's text between marks.
    """
    form = {"type": "json_schema", "json_schema": schema, "style": style}
    return form | {"place": schema.place} if isinstance(schema, PlacedSchema) else form


def between(begin: str, content: Format, end: str) -> Format:
    """Something between two marks."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def any_text_until(end: str, begin: str = "") -> Format:
    """Text up to a mark, and the mark."""
    return between(begin, {"type": "any_text"}, end)


def calls(tags: Sequence[Format], separator: str, several: bool) -> Format:
    """At least one of the tags."""
    marks = {"separator": separator, "at_least_one": True, "stop_after_first": not several}
    return {"type": "tags_with_separator", "tags": list(tags), **marks}


def text_with_calls(tags: Sequence[Format], trigger: str, several: bool) -> Format:
    """Any text in which the trigger begins one of the tags."""
    marks = {"triggers": [trigger], "at_least_one": False, "stop_after_first": not several}
    return {"type": "triggered_tags", "tags": list(tags), **marks}


def objects(functions: Sequence[Function], begin: str = "", end: str = "", key: str = "arguments") -> list[Format]:
    """A tag for each function: an object with its name and arguments, between two marks."""
    return [
        between(f'{begin}{{"name": {json.dumps(name)}, "{key}": ', json_of(schema), f"}}{end}")
        for name, schema in functions
    ]


def list_of_calls(functions: Sequence[Function], several: bool) -> Format:
    """A JSON list of calls."""
    return in_order(text("["), calls(objects(functions), ", ", several), text("]"))
