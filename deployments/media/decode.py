"""Decodes images. If an image has too many pixels, it is refused as soon as its header has been read."""

import io

from PIL import Image, ImageOps

from wingbeat.deployments.media.limits import MediaError, MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Supported formats, read with Pillow; a GIF is read as its first frame."""


def decode_image(data: bytes, limits: MediaLimits) -> Image.Image:
    """Returns the image in RGB, rotated upright by its EXIF orientation.

    Raises:
        MediaError: the format is not supported, the file is damaged, or the image has too many pixels.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > limits.max_pixels:
            raise MediaError(f"has {width} x {height} pixels, this server takes at most {limits.max_pixels}")
        return ImageOps.exif_transpose(picture).convert("RGB")
    except MediaError:
        raise
    except Exception as error:
        # Any exception is caught, because Pillow's decoders may raise nearly any exception for a damaged file.
        raise MediaError(f"is not an image that can be decoded; {', '.join(FORMATS)} are supported") from error
