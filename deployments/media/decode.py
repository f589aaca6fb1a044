"""From an image's bytes to its pixels. Of an image that is too large nothing but its header is read."""

import io

from PIL import Image, ImageOps

from wingbeat.deployments.media.limits import MediaError, MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Of which Pillow's reader is used; of a GIF the first picture counts."""


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
