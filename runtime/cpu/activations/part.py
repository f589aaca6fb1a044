"""Rounded activations; imports what rounds them where it is asked for."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.pair import PairSettings
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

EXACT, INT8 = "exact", "int8"
engine_settings = {"cpu_activations": (str, EXACT)}
"""What linear layers with packed weights are given on CPUs, as they are or rounded to int8."""


def check_limits(config: "EngineConfig") -> None:
    """Raises ValueError for another word."""
    if config.cpu_activations not in (EXACT, INT8):
        raise ValueError(f"cpu_activations is {config.cpu_activations!r}: must be {EXACT!r} or {INT8!r}")


def open_backend(settings: "PairSettings", device: "torch.device") -> None:
    """Leave the verifier to torch; raises ValueError where rounded activations are asked of what rounds none."""
    if settings.engine.cpu_activations == INT8 and (settings.engine_dir is not None or device.type != "cpu"):
        what = f"device is {device.type}" if settings.engine_dir is None else "engine_dir is given"
        raise ValueError(f"cpu_activations is int8 and {what}: the CPU's kernels alone round them; use exact")


def extend_model(loaded: "LoadedModel", config: "EngineConfig") -> None:
    """Round the activations of a model that was tried with those that it has."""
    if config.cpu_activations == INT8:
        from wingbeat.runtime.cpu.activations.rounded import RoundedActivations

        loaded.add(RoundedActivations(loaded))
