"""Runtime part: LoRA adapters; imports the implementation only if max_loras is above 0."""

import json
from typing import TYPE_CHECKING

from wingbeat.runtime.lora.adapter import CONFIG_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

check_limits = "wingbeat.runtime.lora.settings:check_limits"
engine_settings = "wingbeat.runtime.lora.settings:ENGINE_SETTINGS"
lean_rounds = "wingbeat.runtime.lora.settings:has_adapters"


def other_folder(folder: "Path") -> str | None:
    """Returns a description of a folder that holds an adapter instead of a model; None for other folders."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    try:
        fields = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        fields = None
    base = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    named = f" {base}" if isinstance(base, str) and base else ""
    return f"an {CONFIG_FILE}: give its base model{named} as the model and this folder as --lora-modules"


def extend_model(loaded: "LoadedModel", config: "EngineConfig") -> None:
    """Allocates memory for adapters on a model."""
    if config.max_loras:
        from wingbeat.runtime.lora.adapted import ModelAdapters

        room = config.max_loras, config.max_lora_rank
        loaded.add(ModelAdapters(loaded.model, loaded.decoder_layers, *room, loaded.inner_linears))
