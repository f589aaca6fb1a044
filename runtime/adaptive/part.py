"""Registers adaptive speculation; imports its code only in engines and drafters that use it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.round.runner import ModelRunner
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

pruner = "wingbeat.runtime.adaptive.pruning:DevicePruner"
growth_rule = "wingbeat.runtime.adaptive.growth_rule:growth_rule"
bin_edges = "wingbeat.runtime.adaptive.acceptance:bin_edges"


def speculation(loaded: "LoadedModel", runner: "ModelRunner", config: "EngineConfig") -> Any:
    """Returns the object that decides how much an engine speculates; None if the engine's trees are fixed."""
    if not config.speculation.adaptive:
        return None
    from wingbeat.runtime.adaptive.measured import MeasuredSpeculation

    return MeasuredSpeculation(loaded, runner, config)
