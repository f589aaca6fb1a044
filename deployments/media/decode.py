"""From an image's bytes to its pixels. Of an image that is too large nothing but its header is read."""

import base64
import binascii
import io
import re

from PIL import Image, ImageOps

from wingbeat.deployments.media.limits import MediaError, MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Of which Pillow's reader is used; of a GIF the first picture counts."""
_DATA_URL = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w=.+-]+)*;base64,", re.IGNORECASE)


def data_url_bytes(url: str, limits: MediaLimits) -> bytes:
    """What a data URL holds.

    Raises:
        MediaError: it is malformed, or holds too much.
    """
    head = _DATA_URL.match(url[:256])
    if head is None:
        raise MediaError("is no data URL in base64, such as data:image/png;base64,...")
    if (len(url) - head.end()) * 3 // 4 > limits.max_bytes + 2:
        raise MediaError(f"has more than {limits.max_bytes} bytes")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("is not valid base64") from error


def decode_image(data: bytes, limits: MediaLimits) -> Image.Image:
    """An upright picture in RGB.

    Raises:
        MediaError: it is none of the formats, is damaged, or has too many pixels.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > limits.max_pixels:
            raise MediaError(f"has {width} x {height} pixels, this server takes {limits.max_pixels}")
        return ImageOps.exif_transpose(picture).convert("RGB")
    except MediaError:
        raise
    except Exception as error:
        # A damaged file makes Pillow's readers raise nearly anything.
        raise MediaError(f"is no image that can be decoded; {', '.join(FORMATS)} can") from error
