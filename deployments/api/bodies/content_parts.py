"""Parts of a message's content: text, and images and audio by their URL or as they are."""

from collections.abc import Callable
from typing import Any, Literal

from wingbeat.deployments.api.bodies.unserved_fields import Part, ignored_fields
from wingbeat.deployments.api.errors import ApiError, invalid, shown, unsupported
from wingbeat.deployments.media.source import AUDIO_FORMATS, MediaSource
from wingbeat.runtime.scheduling.media import AUDIO, IMAGE

_DETAILS = (None, "auto", "high", "original")
"""An image is read as large as the model takes it, whatever is asked for; low would be another picture."""
_TEXT_FIELDS = frozenset(("type", "text"))


class TextPart(Part):
    """Text among media."""

    type: Literal["text"]
    text: str


class MediaContent(Part):
    """An image or a sound."""

    type: Literal["image", "audio"]
    source: MediaSource
    path: str
    """Of the field that it came from, for errors."""
    part_path: str
    """Of the part."""
    part_type: str
    """The part's own `type`."""


def flat_parts(parts: list[Any], path: str) -> dict[str, Any]:
    """`content`, the text of all parts joined by newlines; and `parts`, where there are media.

    Args:
        parts: as a request has them, or read already.

    Raises:
        ApiError: 400 naming the part that is malformed or not served.
    """
    read = [
        part if isinstance(part, TextPart | MediaContent) else _part(part, f"{path}[{index}]")
        for index, part in enumerate(parts)
    ]
    fields: dict[str, Any] = {"content": "\n".join(part.text for part in read if isinstance(part, TextPart))}
    if any(isinstance(part, MediaContent) for part in read):
        fields["parts"] = read
    return fields


def _part(part: Any, path: str) -> TextPart | MediaContent:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(path, "must be an object with a 'type'")
    if (read := _MEDIA.get(part["type"])) is not None:
        return read(part, path)
    if part["type"] != "text":
        raise unserved_part(part["type"], path, f"only 'text', {', '.join(map(repr, _MEDIA))} are")
    ignored_fields().pass_over_unknown(part, _TEXT_FIELDS, path)
    if not isinstance(part.get("text"), str):
        raise invalid(f"{path}.text", "must be a string")
    return TextPart(type="text", text=part["text"])


def _image_url(part: dict[str, Any], path: str) -> MediaContent:
    given, where = _inner(part, "image_url", "url", path, ("detail",))
    check_detail(given, where)
    return MediaContent(type=IMAGE, source=MediaSource(given["url"]), path=where, part_path=path, part_type="image_url")


def _audio_url(part: dict[str, Any], path: str) -> MediaContent:
    given, where = _inner(part, "audio_url", "url", path)
    return MediaContent(type=AUDIO, source=MediaSource(given["url"]), path=where, part_path=path, part_type="audio_url")


def input_audio(part: dict[str, Any], path: str) -> MediaContent:
    """OpenAI's `input_audio`; raises ApiError, 400, for a part that is malformed."""
    given, where = _inner(part, "input_audio", "data", path, ("format",))
    if given.get("format") not in AUDIO_FORMATS:
        raise invalid(f"{where}.format", f"must be one of {', '.join(AUDIO_FORMATS)}")
    source = MediaSource(given["data"], is_base64=True, audio_format=given["format"])
    return MediaContent(type=AUDIO, source=source, path=f"{where}.data", part_path=path, part_type="input_audio")


_MEDIA: dict[str, Callable[[dict[str, Any], str], MediaContent]] = {
    "image_url": _image_url,
    "input_audio": input_audio,
    "audio_url": _audio_url,
}
"""By a part's type, what reads it."""


def _inner(
    part: dict[str, Any], name: str, needed: str, path: str, optional: tuple[str, ...] = ()
) -> tuple[dict[str, Any], str]:
    """The object under a part's name, and its path; fields that it may not have are passed over or refused."""
    ignored_fields().pass_over_unknown(part, frozenset(("type", name)), path)
    given, where = part.get(name), f"{path}.{name}"
    if not isinstance(given, dict) or not isinstance(given.get(needed), str):
        raise invalid(where, f"must be an object with a '{needed}'")
    ignored_fields().pass_over_unknown(given, frozenset((needed, *optional)), where)
    return given, where


def check_detail(given: dict[str, Any], path: str) -> None:
    """Raises ApiError, 400, for another picture than the one that is given."""
    if given.get("detail") not in _DETAILS:
        raise unsupported(f"{path}.detail")


def unserved_part(kind: str, path: str, served: str) -> ApiError:
    """400 for a part of a type that is not served."""
    message = f"Content parts of type '{shown(kind)}' are not supported; {served}."
    return ApiError(message, param=f"{path}.type", code="unsupported_value")
