"""Registers engine directories, which replace the weights of verifier and drafter; the code that reads them is imported
on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.drafters.base import Drafter
    from wingbeat.runtime.pair import PairSettings
    from wingbeat.runtime.verifier.backend import Backend
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def open_backend(
    settings: "PairSettings", device: "torch.device"
) -> "tuple[LoadedModel, EngineConfig, Backend] | None":
    """The verifier of an engine directory; None if no directory is set."""
    if settings.engine_dir is None:
        return None
    from wingbeat.runtime.tensorrt import backend

    return backend.open_backend(settings.engine_dir, settings.model, settings.engine, device)


def open_drafter(settings: "PairSettings", device: "torch.device") -> "Drafter | None":
    """The drafter of an engine directory; None for kinds of drafters that torch runs."""
    from wingbeat.runtime.tensorrt import open_drafter

    source, speculation = settings.drafter.source, settings.engine.speculation
    return open_drafter.open_drafter(settings.engine_dir, source, settings.model, speculation, device)
