"""Hooks for LoRA adapters of a divided verifier; the implementation is imported on first use."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.tensor_parallel.ranks import Ranks
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def extend_shard(loaded: "LoadedModel", ranks: "Ranks", config: "EngineConfig") -> None:
    """Allocates a rank's part of the adapters, for the rank's part of a model."""
    if config.max_loras:
        from wingbeat.runtime.tensor_parallel.lora.rank_adapters import RankAdapters

        loaded.add(RankAdapters(loaded, ranks, config.max_loras, config.max_lora_rank))
