"""Where an image or a sound of a request is, and its bytes where the request holds it; neither Pillow nor aiohttp."""

import base64
import binascii
import re
from typing import NamedTuple

from wingbeat.deployments.media.limits import MediaError, MediaLimits

AUDIO_FORMATS = ("wav", "mp3")
"""Formats that are decoded."""
_DATA_URL = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w=.+-]+)*;base64,", re.IGNORECASE)


class MediaSource(NamedTuple):
    """What a request says of one."""

    text: str
    """A URL of scheme http, https or data, or base64."""
    is_base64: bool = False
    audio_format: str | None = None
    """What it is said to be; None leaves that to its first bytes."""

    @property
    def is_here(self) -> bool:
        """Whether the request holds it."""
        return self.is_base64 or self.text[:5].lower() == "data:"


def bytes_of(source: MediaSource, limits: MediaLimits) -> bytes:
    """What a source holds that is in its request.

    Raises:
        MediaError: it is malformed, or holds too much.
    """
    begin = 0
    if not source.is_base64:
        head = _DATA_URL.match(source.text[:256])
        if head is None:
            raise MediaError("is no data URL in base64, such as data:image/png;base64,...")
        begin = head.end()
    if (len(source.text) - begin) * 3 // 4 > limits.max_bytes + 2:
        raise MediaError(f"has more than {limits.max_bytes} bytes")
    try:
        return base64.b64decode(source.text[begin:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("is not valid base64") from error
