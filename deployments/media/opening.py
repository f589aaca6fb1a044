"""Makes the reader of a model's images or audio, or states why there is no reader. Libraries are imported only if a
reader needs them.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.content_parts import only_served, unserved_part
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.media.settings import limits_of
from wingbeat.runtime.media.media_input import AUDIO, IMAGE, SERVED
from wingbeat.runtime.scheduling.prompt_spans import PromptSpan
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

if TYPE_CHECKING:
    from wingbeat.deployments.media.reader import MediaReader

logger = logging.getLogger(__name__)

NEEDS = {
    IMAGE: "images need Pillow and aiohttp, which are in the extra wingbeat[images]",
    AUDIO: "audio needs soundfile, soxr and aiohttp, which are in the extra wingbeat[audio]",
}


class MediaRefused(NamedTuple):
    """Replaces `MediaReader` for a multimodal model whose media cannot be read here."""

    reasons: Mapping[str, str]
    """For each kind of media, the reason why it cannot be read."""

    async def read(self, body: ChatBody) -> NoReturn:
        """Raises ApiError, 400, which names the part that cannot be used."""
        part = body.other_parts[0]
        raise unserved_part(part.part_type, part.part_path, self.reasons.get(part.type) or only_served())


def needs_torch(folder: Path) -> bool:
    """Returns whether a checkpoint has an encoder of images or audio. The preprocessing for such an encoder needs
    torch.
    """
    return any(ConfigFile.read(folder).fields.get(name) for name in ("vision_config", "audio_config"))


def prompt_details(spans: Sequence[PromptSpan]) -> dict[str, int]:
    """Returns a dict with `audio_tokens`, the number of prompt tokens that stand for audio; an empty dict if there are
    no such tokens.
    """
    num_tokens = sum(one.length for one in spans if one.kind == AUDIO)
    return {"audio_tokens": num_tokens} if num_tokens else {}


def prompt_reader(
    config: AppConfig, takes: Mapping[str, str], folder: Path, tokenizer: Tokenizer
) -> "MediaReader | MediaRefused | None":
    """Makes the reader of a model's media; returns None for a text-only model.

    Args:
        takes: kinds of media, as in `ModelInfo.takes`.
        folder: folder of the model's checkpoint.
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

        processor, limits = load_processor(folder, tokenizer.hugging_face, kind), limits_of(config)
        return MediaReader(processor, limits, decoder_of(processor, limits))
    except (ImportError, OSError, MediaNotServed) as error:
        reason = str(error) if isinstance(error, MediaNotServed) else NEEDS[kind]
        logger.warning("%s", reason)
        return MediaRefused({**takes, kind: reason})
