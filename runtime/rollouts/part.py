"""Hooks of the runtime part that updates the weights of served verifiers, and frees their memory for a sleep."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.pair import PairSettings
    from wingbeat.runtime.verifier.backend import Backend
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

served_weights = "wingbeat.runtime.rollouts.served_weights:ServedWeights"
engine_settings = {"frees_memory": (bool, False)}
"""`frees_memory`: whether the engine's memory on a GPU must be able to be given back while the engine is idle."""


def open_backend(
    settings: "PairSettings", device: "torch.device"
) -> "tuple[LoadedModel, EngineConfig, Backend] | None":
    """Loads a verifier on a GPU into memory that can be given back; None if that is not requested."""
    if not settings.engine.frees_memory or device.type != "cuda":
        return None
    from wingbeat.runtime.pair import load_verifier
    from wingbeat.runtime.rollouts.sleep_memory import open_sleeping

    loaded = load_verifier(settings, device)
    return loaded, settings.engine, open_sleeping(loaded)
