"""How much an image or a sound may ask of a router, and the error of one that asks for more."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from wingbeat.runtime.media.media_input import AUDIO, IMAGE

PER_REQUEST = {IMAGE: 4, AUDIO: 4}
"""Most media of one request, by kind."""
MAX_HELD_MEDIA_BYTES = 2**31
"""Bytes made of images and audio, over all requests of a router that have not ended."""


class MediaError(ValueError):
    """An image or a sound cannot be used; says what is wrong with it, for the one who sent it."""


@dataclass(frozen=True)
class MediaLimits:
    """Of one request."""

    allowed_domains: frozenset[str] = frozenset()
    """Hosts that media are fetched from; none fetches nothing."""
    per_request: Mapping[str, int] = field(default_factory=PER_REQUEST.copy)
    max_bytes: int = 16 * 2**20
    """Of an image or a sound as it is sent or fetched."""
    max_pixels: int = 25_000_000
    """Of an image, before anything of it is decoded."""
    timeout_s: float = 5.0
    """To fetch one, redirects included."""
    max_redirects: int = 3
    max_held_bytes: int = MAX_HELD_MEDIA_BYTES
    """Of what is made of media, over all requests of a router that have not ended."""
    max_audio_s: float = 600.0
    """Of a sound; decoding ends there."""
