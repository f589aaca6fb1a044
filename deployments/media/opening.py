"""Reading of a model's images or audio, or why they are not read; nothing that it needs is imported for text."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.content_parts import only_served, unserved_part
from wingbeat.deployments.media.limits import MediaLimits
from wingbeat.runtime.media.media_input import AUDIO, IMAGE, SERVED
from wingbeat.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from wingbeat.deployments.media.reader import MediaReader

logger = logging.getLogger(__name__)

NEEDS = {
    IMAGE: "images need Pillow and aiohttp, which are in the extra wingbeat[images]",
    AUDIO: "audio needs soundfile, soxr and aiohttp, which are in the extra wingbeat[audio]",
}


class MediaRefused(NamedTuple):
    """In the place of a `MediaReader`, for a model that could take media."""

    reasons: Mapping[str, str]
    """By kind."""

    async def read(self, body: ChatBody) -> NoReturn:
        """Raises ApiError, 400 naming the part that cannot be used."""
        part = body.other_parts[0]
        raise unserved_part(part.part_type, part.part_path, self.reasons.get(part.type) or only_served())


def media_reader(
    takes: Mapping[str, str], folder: Path, limits: MediaLimits, tokenizer: Tokenizer
) -> "MediaReader | MediaRefused | None":
    """Reader of a model's media; None for a model of text.

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
