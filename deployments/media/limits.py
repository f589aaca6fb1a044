"""Limits of images and audio in a router, and the error for media that exceed them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from wingbeat.runtime.media.media_input import AUDIO, IMAGE

PER_REQUEST = {IMAGE: 4, AUDIO: 4}
"""Maximum number of images and of audio files of one request."""
MAX_HELD_MEDIA_BYTES = 2**31
"""Maximum bytes of decoded images and audio over all running requests of a router."""


class MediaError(ValueError):
    """An image or audio file cannot be used.

    The message is for the client; the name of the content part is put before it.
    """


@dataclass(frozen=True)
class MediaLimits:
    """Limits of one request's media, and of their memory in a router."""

    allowed_domains: frozenset[str] = frozenset()
    """Hosts from which media may be fetched; if the set is empty, no media is fetched."""
    per_request: Mapping[str, int] = field(default_factory=PER_REQUEST.copy)
    max_bytes: int = 16 * 2**20
    """Maximum bytes of an image or audio file as sent or fetched."""
    max_pixels: int = 25_000_000
    """Maximum pixels of an image, checked before decoding."""
    timeout_s: float = 5.0
    """Maximum seconds for fetching one file, redirects included."""
    max_redirects: int = 3
    max_held_bytes: int = MAX_HELD_MEDIA_BYTES
    """Maximum bytes of decoded media over all running requests of a router."""
    max_audio_s: float = 600.0
    """Maximum duration of an audio file in seconds. When a file exceeds the duration, decoding stops and the file is
    refused.
    """
