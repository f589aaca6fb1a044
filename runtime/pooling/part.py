"""Embeddings of prompts; imports what it adds where it is asked for."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.round.rows import Feature
    from wingbeat.runtime.round.slots import SlotState
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def features(loaded: "LoadedModel", slots: "SlotState") -> "tuple[Feature, ...]":
    """Pooling, which every model has."""
    from wingbeat.runtime.pooling.pooled_rows import PromptPooling

    return (PromptPooling(loaded.model, loaded.decoder_layers),)
