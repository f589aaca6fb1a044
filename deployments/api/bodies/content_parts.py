"""Parts of a message's content: text, and images by their URL."""

from typing import Any, Literal

from wingbeat.deployments.api.bodies.unserved_fields import Part, ignored_fields
from wingbeat.deployments.api.errors import ApiError, invalid, shown, unsupported

_DETAILS = (None, "auto", "high")
"""An image is read as large as the model takes it, whatever is asked for; low would be another picture."""
_TEXT_FIELDS = frozenset(("type", "text"))
_IMAGE_FIELDS = frozenset(("type", "image_url"))
_URL_FIELDS = frozenset(("url", "detail"))


class TextPart(Part):
    """Text among images."""

    type: Literal["text"]
    text: str


class ImagePart(Part):
    """An image."""

    type: Literal["image"]
    url: str
    path: str
    """Of the field that it came from, for errors."""


def flat_parts(parts: list[Any], path: str) -> dict[str, Any]:
    """`content`, the text of all parts joined by newlines; and `parts`, where there are images.

    Raises:
        ApiError: 400 naming the part that is malformed or not served.
    """
    read = [_part(part, f"{path}[{index}]") for index, part in enumerate(parts)]
    fields: dict[str, Any] = {"content": "\n".join(part["text"] for part in read if part["type"] == "text")}
    if any(part["type"] == "image" for part in read):
        fields["parts"] = read
    return fields


def _part(part: Any, path: str) -> dict[str, Any]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(path, "must be an object with a 'type'")
    if part["type"] == "image_url":
        return {"type": "image", "url": _url(part, path), "path": f"{path}.image_url"}
    if part["type"] != "text":
        raise unserved_part(part["type"], path, "only 'text' and 'image_url' are")
    ignored_fields().pass_over_unknown(part, _TEXT_FIELDS, path)
    if not isinstance(part.get("text"), str):
        raise invalid(f"{path}.text", "must be a string")
    return {"type": "text", "text": part["text"]}


def _url(part: dict[str, Any], path: str) -> str:
    ignored_fields().pass_over_unknown(part, _IMAGE_FIELDS, path)
    image, where = part.get("image_url"), f"{path}.image_url"
    if not isinstance(image, dict) or not isinstance(image.get("url"), str):
        raise invalid(where, "must be an object with a 'url'")
    ignored_fields().pass_over_unknown(image, _URL_FIELDS, where)
    if image.get("detail") not in _DETAILS:
        raise unsupported(f"{where}.detail")
    return image["url"]


def unserved_part(kind: str, path: str, served: str) -> ApiError:
    """400 for a part of a type that is not served."""
    message = f"Content parts of type '{shown(kind)}' are not supported; {served}."
    return ApiError(message, param=f"{path}.type", code="unsupported_value")
