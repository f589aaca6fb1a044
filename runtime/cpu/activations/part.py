"""Rounded activations; imports what rounds them where it is asked for."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

EXACT, INT8 = "exact", "int8"


def engine_settings() -> dict[str, tuple[Any, Any]]:
    """`cpu_activations`: what linear layers with packed weights are given on CPUs, as they are or rounded to int8."""
    return {"cpu_activations": (str, EXACT)}


def check_limits(config: "EngineConfig") -> None:
    """Raises ValueError for another word."""
    if config.cpu_activations not in (EXACT, INT8):
        raise ValueError(f"cpu_activations is {config.cpu_activations!r}: must be {EXACT!r} or {INT8!r}")


def extend_model(loaded: "LoadedModel", config: "EngineConfig") -> None:
    """Round the activations of a model that was tried with those that it has."""
    if config.cpu_activations == INT8:
        from wingbeat.runtime.cpu.activations.rounded import RoundedActivations

        loaded.add(RoundedActivations(loaded))
