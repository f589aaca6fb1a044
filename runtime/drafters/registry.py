"""Which drafter a name or a folder means; kinds are imported only when asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.draft_head import HeadConvention
from wingbeat.runtime.drafters.target import TargetDescription


@dataclass(frozen=True)
class DrafterOptions:
    """How a drafter's weights are held and run."""

    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"
    cuda_graphs: bool = True
    """On CUDA, capture the passes of kinds that have fixed shapes."""
    convention: HeadConvention | None = None
    """How to read an EAGLE head whose files leave that open; None takes the likeliest reading."""


Builder = Callable[[str, TargetDescription, SpeculationConfig, DrafterOptions], Drafter]
"""(what the user gave, verifier, shape of the trees, options) -> drafter."""


def _ngram(source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> Drafter:
    from wingbeat.runtime.drafters.ngram import NgramDrafter

    return NgramDrafter(speculation)


def _eagle(source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> Drafter:
    from wingbeat.runtime.drafters.checkpoint import load_eagle_head
    from wingbeat.runtime.drafters.eagle import EagleDrafter
    from wingbeat.runtime.graph_device import CudaGraphDevice

    head = load_eagle_head(
        source,
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        target_vocab_size=target.vocab_size,
        target_embedding=target.embedding(),
        dtype=options.dtype,
        device=options.device,
        convention=options.convention,
    )
    captured = options.cuda_graphs and head.draft_token_ids.is_cuda
    return EagleDrafter(head, speculation, CudaGraphDevice(head.draft_token_ids.device) if captured else None)


def _draft_model(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> Drafter:
    from wingbeat.runtime.drafters.draft_model import build_draft_model

    return build_draft_model(source, target, speculation, options)


KINDS: dict[str, Builder] = {"draft_model": _draft_model, "eagle": _eagle, "ngram": _ngram}
"""By name; what a user gives is resolved to one of them by `kind_of`."""


def kind_of(source: str | Path) -> str:
    """The kind that a name or a folder means.

    Raises:
        ValueError: it is neither.
    """
    if str(source) in KINDS and str(source) != "eagle":
        return str(source)
    if Path(source).is_dir():
        return "eagle"
    raise ValueError(f"drafter {str(source)!r} is neither 'ngram', 'none' nor a folder with an EAGLE head")


def load_drafter(
    source: str | Path,
    target: TargetDescription,
    speculation: SpeculationConfig,
    options: DrafterOptions = DrafterOptions(),
) -> Drafter | None:
    """Build the drafter that `source` means; None for "none".

    Raises:
        ValueError: the name is neither a known kind nor a folder, or the checkpoint cannot be used.
    """
    if str(source) == "none":
        return None
    return KINDS[kind_of(source)](str(source), target, speculation, options)
