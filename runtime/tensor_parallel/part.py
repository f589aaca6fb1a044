"""A verifier over several processes; imports what runs it where there are several."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from wingbeat.runtime.pair import PairSettings
    from wingbeat.runtime.tensor_parallel.leader import Led

refusals = "wingbeat.runtime.tensor_parallel.group:REFUSED"


def open_backend(settings: "PairSettings", device: "torch.device") -> "Led | None":
    """Rank 0's part of a verifier that is spread over processes."""
    if settings.spread is None:
        return None
    from wingbeat.runtime.tensor_parallel.leader import lead

    return lead(settings.spread, settings.model, settings.dtype, device, settings.engine)
