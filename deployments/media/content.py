"""Parses image and audio content parts of chat completions, the Responses API and the Messages API."""

from typing import Any, Literal

from wingbeat.deployments.api.bodies.content_parts import OtherPart, PartReader
from wingbeat.deployments.api.bodies.unserved_fields import ignored_fields
from wingbeat.deployments.api.errors import invalid, unsupported
from wingbeat.deployments.media.source import AUDIO_FORMATS, MediaSource
from wingbeat.runtime.media.media_input import AUDIO, IMAGE

_DETAILS = (None, "auto", "high", "original")
"""Accepted values of `detail`. Images are always read at the model's full resolution, so `low`, which requests a
reduced image, is refused.
"""
_SOURCES = {"base64": "data", "url": "url"}
"""For each type of source in the Messages API, the name of the field that contains the data."""


Kind = Literal["image", "audio"]


class MediaContent(OtherPart):
    """An image or audio part."""

    type: Kind
    source: MediaSource

    def as_template_input(self) -> dict[str, Any]:
        """See `OtherPart.as_template_input`; Qwen2-Audio's template expects the key `audio_url`."""
        return {"type": AUDIO, "audio_url": ""} if self.type == AUDIO else {"type": self.type}


def _url(part: dict[str, Any], path: str) -> MediaContent:
    is_image = part["type"] == "image_url"
    given, where = _inner(part, part["type"], "url", path, ("detail",) if is_image else ())
    if is_image:
        _check_detail(given, where)
    return _content(IMAGE if is_image else AUDIO, part, path, where, MediaSource(given["url"]))


def _input_audio(part: dict[str, Any], path: str) -> MediaContent:
    given, where = _inner(part, "input_audio", "data", path, ("format",))
    if given.get("format") not in AUDIO_FORMATS:
        raise invalid(f"{where}.format", f"must be one of {', '.join(AUDIO_FORMATS)}")
    return _content(AUDIO, part, path, f"{where}.data", MediaSource(given["data"], True, given["format"]))


def _input_image(part: dict[str, Any], path: str) -> MediaContent:
    _pass_over(part, path, "type", "image_url", "detail", "file_id")
    if part.get("file_id") is not None:
        raise unsupported(f"{path}.file_id", "no files are kept: give the image_url")
    _check_detail(part, path)
    return _content(IMAGE, part, path, f"{path}.image_url", MediaSource(_string(part, "image_url", path)))


def _image_block(block: dict[str, Any], block_path: str) -> MediaContent:
    """Parses an image of the Messages API, by URL or in base64; file ids are not supported."""
    _pass_over(block, block_path, "type", "source")
    source, path = block.get("source"), f"{block_path}.source"
    if not isinstance(source, dict) or (name := _SOURCES.get(str(source.get("type")))) is None:
        raise invalid(f"{path}.type", "must be 'base64' or 'url'")
    _pass_over(source, path, "type", "media_type", name)
    given = MediaSource(_string(source, name, path), is_base64=name == "data")
    return _content(IMAGE, block, block_path, f"{path}.{name}", given)


def content_parts(api: str) -> dict[str, PartReader]:
    """Returns the readers of an API's content parts, by the part's type."""
    return {
        "chat": {"image_url": _url, "input_image": _input_image, "input_audio": _input_audio, "audio_url": _url},
        "responses": {"input_image": _input_image, "input_audio": _input_audio},
        "messages": {"image": _image_block},
    }[api]


def _content(kind: Kind, part: dict[str, Any], part_path: str, path: str, source: MediaSource) -> MediaContent:
    return MediaContent(type=kind, source=source, path=path, part_path=part_path, part_type=part["type"])


def _inner(
    part: dict[str, Any], name: str, needed: str, path: str, optional: tuple[str, ...] = ()
) -> tuple[dict[str, Any], str]:
    """Returns the object that a part contains under the name of its type, and the path of the object.

    Unknown fields are ignored or refused, according to the setting `unknown_fields`.
    """
    _pass_over(part, path, "type", name)
    given, where = part.get(name), f"{path}.{name}"
    if not isinstance(given, dict) or not isinstance(given.get(needed), str):
        raise invalid(where, f"must be an object with a '{needed}'")
    _pass_over(given, where, needed, *optional)
    return given, where


def _pass_over(given: dict[str, Any], path: str, *known: str) -> None:
    ignored_fields().pass_over_unknown(given, frozenset(known), path)


def _string(given: dict[str, Any], name: str, path: str) -> str:
    if not isinstance(given.get(name), str):
        raise invalid(f"{path}.{name}", "must be a string")
    return given[name]


def _check_detail(given: dict[str, Any], path: str) -> None:
    """Raises ApiError, 400, if `detail` requests a reduced image."""
    if given.get("detail") not in _DETAILS:
        raise unsupported(f"{path}.detail")
