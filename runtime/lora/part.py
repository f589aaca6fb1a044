"""LoRA adapters; imports what serves them where there is room for some."""

from typing import TYPE_CHECKING

from wingbeat.runtime.lora.settings import check_limits, engine_settings

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

__all__ = ["check_limits", "engine_settings"]


def extend_model(loaded: "LoadedModel", config: "EngineConfig") -> None:
    """Make room for adapters on top of a model."""
    if config.max_loras:
        from wingbeat.runtime.lora.adapted import ModelAdapters

        room = config.max_loras, config.max_lora_rank
        loaded.add(ModelAdapters(loaded.model, loaded.decoder_layers, *room, loaded.inner_linears))
