"""The images of a chat request: refused by name, or read for the model."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.content_parts import ImagePart, unserved_part
from wingbeat.deployments.api.errors import ApiError, invalid
from wingbeat.deployments.fleet.interface import EngineOverloaded
from wingbeat.deployments.media.limits import MediaError, MediaLimits
from wingbeat.runtime.scheduling.media import SERVED, MediaInput
from wingbeat.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from wingbeat.deployments.media.reader import MediaReader
    from wingbeat.runtime.media.processor import ReadMedia


logger = logging.getLogger(__name__)

NEEDS_PILLOW = "images need Pillow and aiohttp, which are in the extra wingbeat[images]"


class MediaRefused(NamedTuple):
    """In the place of an `MediaReader`, for a model that could take images."""

    reason: str


def media_reader(
    images: str | None, folder: Path, limits: MediaLimits, tokenizer: Tokenizer
) -> "MediaReader | MediaRefused | None":
    """What reads images for a model; nothing that it needs is imported for a model of text.

    Args:
        images: as in `ModelInfo`.
        folder: the model's checkpoint.
    """
    if images is None:
        return None
    if images != SERVED:
        return MediaRefused(images)
    from wingbeat.runtime.media.families import MediaNotServed
    from wingbeat.runtime.media.processor import ImageProcessor

    try:
        from wingbeat.deployments.media.reader import MediaReader

        return MediaReader(ImageProcessor.load(folder, tokenizer.hugging_face), limits)
    except (ImportError, MediaNotServed) as error:
        reason = NEEDS_PILLOW if isinstance(error, ImportError) else str(error)
        logger.warning("%s", reason)
        return MediaRefused(reason)


async def read_media(reader: "MediaReader | MediaRefused | None", body: ChatBody) -> "list[ReadMedia]":
    """A request's images, in the order of their parts.

    Args:
        reader: the model's; None for one of text alone.

    Raises:
        ApiError: 400 naming the image that cannot be used, or the field that images do not go with.
    """
    parts = body.images
    if reader is None or isinstance(reader, MediaRefused):
        raise _unserved(parts[0], reader)
    limit = reader.limits.max_images
    if len(parts) > limit:
        problem = f"is image {limit + 1} of the request; this server takes {limit} (limit_mm_per_prompt)"
        raise invalid(parts[limit].path, problem)
    if body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "cannot be used with images, which would be cut")
    try:
        return await reader.read([part.url for part in parts])
    except MediaError as error:
        raise invalid(parts[getattr(error, "index", 0)].path, str(error)) from error


def expand(reader: "MediaReader | MediaRefused | None", text: str, images: "Sequence[ReadMedia]") -> str:
    """A conversation's text with its images' tokens in it.

    Raises:
        ApiError: the text has other marks than those of its images.
    """
    if not images:
        return text
    try:
        return reader.processor.expand(text, images)
    except ValueError as error:
        raise invalid("messages", str(error)) from error


def place(
    reader: "MediaReader | MediaRefused | None", token_ids: Sequence[int], images: "Sequence[ReadMedia]"
) -> tuple[MediaInput, ...]:
    """Where a prompt's images are; raises ApiError where its tokens are not those of its images."""
    if not images:
        return ()
    try:
        return reader.processor.place(token_ids, images)
    except ValueError as error:
        raise invalid("messages", str(error)) from error


@contextmanager
def held(reader: "MediaReader | MediaRefused | None", images: tuple[MediaInput, ...]) -> Iterator[None]:
    """While it is entered, a request's images count among those that are held.

    Raises:
        EngineOverloaded: there is no room for them now.
    """
    num_bytes = sum(image.num_bytes for image in images)
    if not num_bytes:
        yield
        return
    if reader.num_held_bytes and reader.num_held_bytes + num_bytes > reader.limits.max_held_bytes:
        raise EngineOverloaded("There is no room for more images now. Retry shortly.")
    reader.num_held_bytes += num_bytes
    try:
        yield
    finally:
        reader.num_held_bytes -= num_bytes


def _unserved(part: ImagePart, reader: MediaRefused | None) -> ApiError:
    path = part.path.removesuffix(".image_url")
    return unserved_part("image_url", path, "only 'text' is" if reader is None else reader.reason)
