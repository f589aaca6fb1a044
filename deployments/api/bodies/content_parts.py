"""Parts of a message's content: text, and what parts of the application read beside it."""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, Literal

from wingbeat.deployments.api.bodies.unserved_fields import Part, ignored_fields
from wingbeat.deployments.api.errors import ApiError, invalid, shown
from wingbeat.deployments.parts import merged

_TEXT_FIELDS = frozenset(("type", "text"))


class TextPart(Part):
    """Text among other parts."""

    type: Literal["text"]
    text: str

    def as_template_input(self) -> dict[str, Any]:
        """The fields that a chat template reads."""
        return {"type": "text", "text": self.text}


class OtherPart(Part):
    """A part that is no text."""

    type: str
    """Kind of span that it becomes in a prompt."""
    path: str
    """Of the field that it came from, for errors."""
    part_path: str
    """Of the part."""
    part_type: str
    """The part's own `type`."""

    def as_template_input(self) -> dict[str, Any]:
        """The fields that a chat template reads."""
        return {"type": self.type}


PartReader = Callable[[dict[str, Any], str], OtherPart]
"""(part, its path) -> the part read; raises ApiError, 400, for one that is malformed."""


@cache
def part_readers(api: str) -> Mapping[str, PartReader]:
    """Readers of parts that are no text, by a part's type.

    Args:
        api: `chat`, `responses` or `messages`.
    """
    return merged("content_parts", api)


def flat_parts(parts: list[Any], path: str) -> dict[str, Any]:
    """`content`, the text of all parts joined by newlines; and `parts`, where some are no text.

    Args:
        parts: as a request has them, or read already.

    Raises:
        ApiError: 400 naming the part that is malformed or not served.
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
    if part["type"] != "text":
        raise unserved_part(part["type"], path, only_served(readers))
    ignored_fields().pass_over_unknown(part, _TEXT_FIELDS, path)
    if not isinstance(part.get("text"), str):
        raise invalid(f"{path}.text", "must be a string")
    return TextPart(type="text", text=part["text"])


def only_served(kinds: Collection[str] = ()) -> str:
    """Types of parts that are served, as errors name them: text, and these."""
    return f"only {', '.join(map(repr, ('text', *kinds)))} {'are' if kinds else 'is'}"


def unserved_part(kind: str, path: str, served: str) -> ApiError:
    """400 for a part of a type that is not served."""
    message = f"Content parts of type '{shown(kind)}' are not supported; {served}."
    return ApiError(message, param=f"{path}.type", code="unsupported_value")
