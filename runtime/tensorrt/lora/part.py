"""Registers LoRA adapters for engine directories; imports their code only if adapters are used."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.tensorrt.engine_config import BaseEngineConfig
    from wingbeat.runtime.tensorrt.limits import Limits
    from wingbeat.runtime.tensorrt.lora.engine_adapters import GraphAdapters
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

graph_limits = "wingbeat.runtime.tensorrt.lora.engine_linear:LIMITS"
graph_fields = "wingbeat.runtime.tensorrt.lora.engine_linear:FIELDS"


def beyond_graph(config: "EngineConfig", limits: "Limits") -> Iterator[tuple[str, int, str, int]]:
    """Yields the requested number and rank of adapters with the engine's limits, as (setting, requested value, name of
    the limit, limit).
    """
    yield "max_loras", config.max_loras, "max_loras", limits.max_loras
    yield "max_lora_rank", config.max_lora_rank if config.max_loras else 1, "max_lora_rank", limits.max_lora_rank


def graph_room(loaded: "LoadedModel", limits: "Limits") -> "GraphAdapters | None":
    """Adapter inputs of a verifier to be exported; None if `limits` allows no adapters.

    Raises ValueError if no layer accepts adapters.
    """
    if not limits.max_loras:
        return None
    from wingbeat.runtime.tensorrt.lora.engine_adapters import GraphAdapters

    return GraphAdapters.of_model(loaded, limits)


def graph_inputs(config: "BaseEngineConfig") -> "GraphAdapters | None":
    """Adapter inputs of an exported graph; None if it has none."""
    if not config.lora_linears:
        return None
    from wingbeat.runtime.lora.adapter import LinearShape
    from wingbeat.runtime.tensorrt.lora.engine_adapters import GraphAdapters

    linears = {one.path: LinearShape(one.inputs, one.outputs) for one in config.lora_linears}
    return GraphAdapters(linears, config.limits.max_loras, config.limits.max_lora_rank)
