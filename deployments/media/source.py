"""Sources of images and audio in requests, and decoding of inline data. Imports neither Pillow nor aiohttp."""

import base64
import binascii
import re
from typing import NamedTuple

from wingbeat.deployments.media.limits import MediaError, MediaLimits

AUDIO_FORMATS = ("wav", "mp3")
"""Supported audio formats."""
_DATA_URL = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w=.+-]+)*;base64,", re.IGNORECASE)


class MediaSource(NamedTuple):
    """Source of one image or audio file, as given in the request."""

    text: str
    """URL of scheme http, https or data, or base64 text."""
    is_base64: bool = False
    audio_format: str | None = None
    """Declared format; None detects the format from the first bytes."""

    @property
    def is_here(self) -> bool:
        """Whether the data is inline in the request."""
        return self.is_base64 or self.text[:5].lower() == "data:"


def bytes_of(source: MediaSource, limits: MediaLimits) -> bytes:
    """Returns the bytes of inline data.

    Raises:
        MediaError: the data is malformed or too large.
    """
    begin = 0
    if not source.is_base64:
        head = _DATA_URL.match(source.text[:256])
        if head is None:
            raise MediaError("is not a data URL in base64, such as data:image/png;base64,...")
        begin = head.end()
    if (len(source.text) - begin) * 3 // 4 > limits.max_bytes + 2:
        raise MediaError(f"has more than {limits.max_bytes} bytes")
    try:
        return base64.b64decode(source.text[begin:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("is not valid base64") from error
