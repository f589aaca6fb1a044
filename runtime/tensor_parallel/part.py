"""Hooks for a verifier over several processes; the implementation is imported on first use."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from wingbeat.runtime.pair import PairSettings
    from wingbeat.runtime.tensor_parallel.leader import Led

refusals = "wingbeat.runtime.tensor_parallel.group:REFUSED"


def open_backend(settings: "PairSettings", device: "torch.device") -> "Led | None":
    """Loads rank 0's part of a verifier spread over processes; returns None if the settings name no ranks."""
    if settings.spread is None:
        return None
    from wingbeat.runtime.tensor_parallel.leader import lead

    return lead(settings.spread, settings.model, settings.dtype, device, settings.engine)
