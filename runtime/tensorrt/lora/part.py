"""LoRA adapters of a verifier that an engine runs; imports what serves them where there is room for some."""

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
    """Numbers and ranks of adapters."""
    yield "max_loras", config.max_loras, "max_loras", limits.max_loras
    yield "max_lora_rank", config.max_lora_rank if config.max_loras else 1, "max_lora_rank", limits.max_lora_rank


def graph_room(loaded: "LoadedModel", limits: "Limits") -> "GraphAdapters | None":
    """Room in the graph of a verifier that is to be exported; raises ValueError where it cannot have any."""
    if not limits.max_loras:
        return None
    from wingbeat.runtime.tensorrt.lora.engine_adapters import GraphAdapters

    return GraphAdapters.of_model(loaded, limits)


def graph_inputs(config: "BaseEngineConfig") -> "GraphAdapters | None":
    """Room in a graph that was exported."""
    if not config.lora_linears:
        return None
    from wingbeat.runtime.lora.adapter import LinearShape
    from wingbeat.runtime.tensorrt.lora.engine_adapters import GraphAdapters

    linears = {one.path: LinearShape(one.inputs, one.outputs) for one in config.lora_linears}
    return GraphAdapters(linears, config.limits.max_loras, config.limits.max_lora_rank)
