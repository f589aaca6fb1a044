"""The media that a model supports, according to its configuration.

This module needs only a configuration, so that routers, which have no weights, can also use it.
"""

from typing import Any

from wingbeat.runtime.media.audio import AUDIOS
from wingbeat.runtime.media.family import MediaFamily, MediaNotServed
from wingbeat.runtime.media.images import IMAGES, TOWERS
from wingbeat.runtime.media.media_input import ARE, AUDIO, IMAGE

FAMILIES = {**IMAGES, **AUDIOS}
"""Families by model_type of the whole model."""
_TOWER = {IMAGE: "vision_config", AUDIO: "audio_config"}
_SERVED = {IMAGE: IMAGES, AUDIO: AUDIOS}


def kinds_of(config: Any) -> tuple[str, ...]:
    """Returns the kinds of media for which a configuration has an encoder."""
    return tuple(kind for kind, tower in _TOWER.items() if getattr(config, tower, None) is not None)


def family_of(config: Any, kind: str) -> MediaFamily:
    """Returns the family of a transformers configuration.

    Raises:
        MediaNotServed: this kind of media is not supported for the model; the message is one line with the reason.
    """
    refused, model_type = f"{ARE[kind]} not served", config.model_type
    if (family := FAMILIES.get(model_type)) is None or family.kind != kind:
        raise MediaNotServed(f"{refused} with model_type {model_type}, but with {', '.join(_SERVED[kind])}")
    if model_type == "llava" and (tower := config.vision_config.model_type) not in TOWERS:
        raise MediaNotServed(f"{refused} with llava's vision tower {tower}, but with {', '.join(TOWERS)}")
    token_id, vocab_size = family.token_id(config), config.get_text_config().vocab_size
    if not 0 <= token_id < vocab_size:
        raise MediaNotServed(f"{refused}: the placeholder {token_id} is outside of {vocab_size} tokens")
    return family
