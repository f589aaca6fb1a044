"""How much an image or a sound may ask of a router, and the error of one that asks for more."""

from dataclasses import dataclass

from wingbeat.runtime.media.media_input import IMAGE

MAX_IMAGES = 4
MAX_AUDIOS = 4
MAX_HELD_MEDIA_BYTES = 2**31
"""Of what is made of images and audio, over all requests of a router that have not ended."""


class MediaError(ValueError):
    """An image or a sound cannot be used; says what is wrong with it, for the one who sent it."""


@dataclass(frozen=True)
class MediaLimits:
    """Of one request."""

    allowed_domains: frozenset[str] = frozenset()
    """Hosts that media are fetched from; none fetches nothing."""
    max_images: int = MAX_IMAGES
    max_bytes: int = 16 * 2**20
    """Of an image or a sound as it is sent or fetched."""
    max_pixels: int = 25_000_000
    """Of an image, before anything of it is decoded."""
    timeout_s: float = 5.0
    """To fetch one, redirects included."""
    max_redirects: int = 3
    max_held_bytes: int = MAX_HELD_MEDIA_BYTES
    """Of what is made of media, over all requests of a router that have not ended."""
    max_audios: int = MAX_AUDIOS
    max_audio_s: float = 600.0
    """Of a sound; decoding ends there."""

    def most(self, kind: str) -> int:
        """Of a kind in one request."""
        return self.max_images if kind == IMAGE else self.max_audios
