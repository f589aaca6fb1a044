"""Runtime part for rounded activations; imports the rounding code only when it is needed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.pair import PairSettings
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

EXACT, INT8 = "exact", "int8"
engine_settings = {"cpu_activations": (str, EXACT)}
"""Option for linear layers with packed weights on CPUs: whether their inputs are exact, or rounded to int8."""


def check_limits(config: "EngineConfig") -> None:
    """Raises ValueError if the value of cpu_activations is unknown."""
    if config.cpu_activations not in (EXACT, INT8):
        raise ValueError(f"cpu_activations is {config.cpu_activations!r}: must be {EXACT!r} or {INT8!r}")


def open_backend(settings: "PairSettings", device: "torch.device") -> None:
    """Raises ValueError if int8 activations are requested for a device other than a CPU, or for an engine directory.

    Never opens a backend.
    """
    if settings.engine.cpu_activations == INT8 and (settings.engine_dir is not None or device.type != "cpu"):
        what = f"device is {device.type}" if settings.engine_dir is None else "engine_dir is given"
        raise ValueError(f"cpu_activations is int8 and {what}: only the CPU's kernels round activations; use exact")


def extend_model(loaded: "LoadedModel", config: "EngineConfig") -> None:
    """Makes a loaded model round its activations from now on. The test at load has already run, with exact
    activations.
    """
    if config.cpu_activations == INT8:
        from wingbeat.runtime.cpu.activations.rounded import RoundedActivations

        loaded.add(RoundedActivations(loaded))
