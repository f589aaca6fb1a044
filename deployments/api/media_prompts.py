"""The images or the audio of a chat request: refused by name, or read for the model."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.content_parts import MediaContent, unserved_part
from wingbeat.deployments.api.errors import ApiError, invalid
from wingbeat.deployments.fleet.interface import EngineOverloaded
from wingbeat.deployments.media.limits import MediaError, MediaLimits
from wingbeat.runtime.scheduling.media import AUDIO, IMAGE, SERVED, MediaInput
from wingbeat.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from wingbeat.deployments.media.reader import MediaReader
    from wingbeat.runtime.media.processor import ReadMedia


logger = logging.getLogger(__name__)

NEEDS = {
    IMAGE: "images need Pillow and aiohttp, which are in the extra wingbeat[images]",
    AUDIO: "audio needs soundfile, soxr and aiohttp, which are in the extra wingbeat[audio]",
}
_PARTS = {IMAGE: "'text' and 'image_url' are", AUDIO: "'text', 'input_audio' and 'audio_url' are"}


class MediaRefused(NamedTuple):
    """In the place of a `MediaReader`, for a model that could take media."""

    reasons: Mapping[str, str]
    """By kind."""


def media_reader(
    takes: Mapping[str, str], folder: Path, limits: MediaLimits, tokenizer: Tokenizer
) -> "MediaReader | MediaRefused | None":
    """What reads media for a model; nothing that it needs is imported for a model of text.

    Args:
        takes: as in `ModelInfo`.
        folder: the model's checkpoint.
    """
    if not takes:
        return None
    kind = next((kind for kind, said in takes.items() if said == SERVED), None)
    if kind is None:
        return MediaRefused(takes)
    from wingbeat.runtime.media.family import MediaNotServed
    from wingbeat.runtime.media.processor import load_processor

    try:
        from wingbeat.deployments.media.reader import MediaReader, decoder_of

        processor = load_processor(folder, tokenizer.hugging_face, kind)
        return MediaReader(processor, limits, decoder_of(processor, limits))
    except (ImportError, OSError, MediaNotServed) as error:
        reason = str(error) if isinstance(error, MediaNotServed) else NEEDS[kind]
        logger.warning("%s", reason)
        return MediaRefused({**takes, kind: reason})


async def read_media(reader: "MediaReader | MediaRefused | None", body: ChatBody) -> "list[ReadMedia]":
    """A request's media, in the order of their parts.

    Args:
        reader: the model's; None for one of text alone.

    Raises:
        ApiError: 400 naming the part that cannot be used, or the field that media do not go with.
    """
    parts = body.media
    if reader is None or isinstance(reader, MediaRefused):
        raise _unserved(parts[0], "only 'text' is" if reader is None else reader.reasons.get(parts[0].type))
    kind = reader.processor.kind
    if (other := next((part for part in parts if part.type != kind), None)) is not None:
        raise _unserved(other, f"only {_PARTS[kind]}")
    limit = reader.limits.most(kind)
    if len(parts) > limit:
        problem = f"is {kind} {limit + 1} of the request; this server takes {limit} (limit_mm_per_prompt)"
        raise invalid(parts[limit].path, problem)
    if body.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "cannot be used with images or audio, which would be cut")
    try:
        return await reader.read([part.source for part in parts])
    except MediaError as error:
        raise invalid(parts[getattr(error, "index", 0)].path, str(error)) from error


def expand(reader: "MediaReader | MediaRefused | None", text: str, media: "Sequence[ReadMedia]") -> str:
    """A conversation's text with its media's tokens in it.

    Raises:
        ApiError: the text has other marks than those of its media.
    """
    try:
        return reader.processor.expand(text, media)
    except ValueError as error:
        raise invalid("messages", str(error)) from error


def place(
    reader: "MediaReader | MediaRefused | None", token_ids: Sequence[int], media: "Sequence[ReadMedia]"
) -> tuple[MediaInput, ...]:
    """Where a prompt's media are; raises ApiError where its tokens are not those of its media."""
    try:
        return reader.processor.place(token_ids, media)
    except ValueError as error:
        raise invalid("messages", str(error)) from error


@contextmanager
def held(reader: "MediaReader | MediaRefused | None", media: tuple[MediaInput, ...]) -> Iterator[None]:
    """While it is entered, a request's media count among those that are held.

    Raises:
        EngineOverloaded: there is no room for them now.
    """
    num_bytes = sum(one.num_bytes for one in media)
    if reader.num_held_bytes and reader.num_held_bytes + num_bytes > reader.limits.max_held_bytes:
        raise EngineOverloaded("There is no room for more images or audio now. Retry shortly.")
    reader.num_held_bytes += num_bytes
    try:
        yield
    finally:
        reader.num_held_bytes -= num_bytes


def _unserved(part: MediaContent, reason: str | None) -> ApiError:
    return unserved_part(part.part_type, part.part_path, reason or "only 'text' is")
