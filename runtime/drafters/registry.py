"""Which drafter a name or a folder means; kinds are imported only when asked for."""

from collections.abc import Callable
from pathlib import Path

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterOptions
from wingbeat.runtime.drafters.choice import CHECKPOINT, parse_drafter
from wingbeat.runtime.heads.target import TargetDescription

Builder = Callable[[str, TargetDescription, SpeculationConfig, DrafterOptions], Drafter]
"""(what the user gave, verifier, shape of the trees, options) -> drafter."""


def _ngram(source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> Drafter:
    from wingbeat.runtime.drafters.ngram import NgramDrafter

    return NgramDrafter(speculation)


def _eagle(source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> Drafter:
    from wingbeat.runtime.drafters.eagle import EagleDrafter
    from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
    from wingbeat.runtime.heads.load import load_eagle_head

    head = load_eagle_head(
        source,
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        target_vocab_size=target.vocab_size,
        target_embedding=target.embedding,
        target_lm_head=target.lm_head,
        dtype=options.dtype,
        device=options.device,
    )
    captured = options.cuda_graphs and head.draft_token_ids.is_cuda
    return EagleDrafter(head, speculation, CudaGraphDevice(head.draft_token_ids.device) if captured else None)


def _draft_model(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> Drafter:
    from wingbeat.runtime.drafters.draft_model import build_draft_model

    return build_draft_model(source, target, speculation, options)


def _suffix(source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> Drafter:
    from wingbeat.runtime.drafters.suffix import SuffixDrafter

    return SuffixDrafter(speculation)


def _user(source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> Drafter:
    from wingbeat.runtime.drafters.user import load_user_drafter

    return load_user_drafter(source, target, speculation, options)


def _mtp(source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> Drafter:
    from wingbeat.runtime.drafters.mtp import build_mtp

    return build_mtp(source, target, speculation, options)


KINDS: dict[str, Builder] = {
    "draft_model": _draft_model,
    "eagle": _eagle,
    "mtp": _mtp,
    "ngram": _ngram,
    "suffix": _suffix,
    "user": _user,
}
"""By name; what a user gives is resolved to one of them by `kind_of`."""


def kind_of(source: str | Path, model: Path | None = None) -> str:
    """The key of KINDS that a name, a folder or an import path means, or "none".

    Args:
        model: as for `parse_drafter`; what `auto` means depends on it.

    Raises:
        ValueError: it is nothing of the kind; says what is allowed.
        CheckpointError: a folder's files cannot be read.
    """
    choice = parse_drafter(source, model)
    return _kind_of_folder(Path(choice.source)) if choice.kind == CHECKPOINT else choice.kind


def _kind_of_folder(folder: Path) -> str:
    """Heads and whole models are told apart by the names of their tensors; their configs can look alike."""
    from wingbeat.runtime.heads.files import read_config, read_shapes
    from wingbeat.runtime.heads.layouts import holds_head

    return "eagle" if holds_head(read_config(folder), read_shapes(folder)) else "draft_model"


def load_drafter(
    source: str | Path,
    target: TargetDescription,
    speculation: SpeculationConfig,
    options: DrafterOptions = DrafterOptions(),
) -> Drafter | None:
    """Build the drafter that `source` means, see `parse_drafter`; None for "none".

    Raises:
        ValueError: it names no drafter, or the drafter cannot be built; one line that says why.
    """
    kind = kind_of(source, target.path)
    if kind == "none":
        return None
    return KINDS[kind](str(parse_drafter(source, target.path).source), target, speculation, options)
