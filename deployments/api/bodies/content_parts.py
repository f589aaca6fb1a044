"""Content parts of messages: text, and other kinds such as images. The readers of other kinds come from optional parts
of the application.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, Literal

from wingbeat.deployments.api.bodies.unserved_fields import Part, ignored_fields
from wingbeat.deployments.api.errors import ApiError, invalid, shown
from wingbeat.deployments.parts import merged

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""For each type of text part that vLLM accepts in a chat too, the name of the field with the text."""


class TextPart(Part):
    """A text part."""

    type: Literal["text"]
    text: str

    def as_template_input(self) -> dict[str, Any]:
        """Returns the part's fields for a chat template."""
        return {"type": "text", "text": self.text}


class OtherPart(Part):
    """A part other than text, such as an image."""

    type: str
    """Kind of the prompt span that the part becomes, such as `image`."""
    path: str
    """Path of the field in the request that holds the part's data, for error messages."""
    part_path: str
    """Path of the part in the request."""
    part_type: str
    """Value of the part's field `type`."""

    def as_template_input(self) -> dict[str, Any]:
        """Returns the part's fields for a chat template."""
        return {"type": self.type}


PartReader = Callable[[dict[str, Any], str], OtherPart]
"""Function (part, path of the part) -> the parsed part; raises ApiError, 400, if the part is malformed."""


@cache
def part_readers(api: str) -> Mapping[str, PartReader]:
    """Returns readers of parts other than text, by the part's type.

    Args:
        api: form of the request: `chat`, `responses` or `messages`.
    """
    return merged("content_parts", api)


def flat_parts(parts: list[Any], path: str) -> dict[str, Any]:
    """Returns `content`, the joined text of all text parts (separated by newlines), and `parts` if some parts are not
    text.

    Args:
        parts: parts as sent in the request, or parts that are already parsed.

    Raises:
        ApiError: 400, naming the part that is malformed or not supported.
    """
    read = [
        part if isinstance(part, TextPart | OtherPart) else _part(part, f"{path}[{index}]")
        for index, part in enumerate(parts)
    ]
    fields: dict[str, Any] = {"content": "\n".join(part.text for part in read if isinstance(part, TextPart))}
    if any(isinstance(part, OtherPart) for part in read):
        fields["parts"] = read
    return fields


def _part(part: Any, path: str) -> TextPart | OtherPart:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(path, "must be an object with a 'type'")
    readers = part_readers("chat")
    if (read := readers.get(part["type"])) is not None:
        return read(part, path)
    if (name := _TEXTS.get(part["type"])) is None:
        raise unserved_part(part["type"], path, only_served(readers))
    ignored_fields().pass_over_unknown(part, frozenset(("type", name)), path)
    return TextPart(type="text", text=string_of(part, name, path))


def string_of(part: Mapping[str, Any], name: str, path: str) -> str:
    """Returns a field of the object at `path`; raises ApiError, 400, if the field is not a string."""
    if not isinstance(part.get(name), str):
        raise invalid(f"{path}.{name}", "must be a string")
    return part[name]


def only_served(kinds: Collection[str] = ()) -> str:
    """Returns the words of an error message that list the supported types: text, and some models' `kinds`."""
    return "only 'text' is" + (f", and if the model takes them {', '.join(map(repr, kinds))}" if kinds else "")


def unserved_part(kind: str, path: str, served: str) -> ApiError:
    """Returns a 400 for a part of an unsupported type."""
    message = f"Content parts of type '{shown(kind)}' are not supported; {served}."
    return ApiError(message, param=f"{path}.type", code="unsupported_value")
