"""Builds the drafter for a name or folder. The module of a kind of drafter is imported only if that kind is used."""

from pathlib import Path

from wingbeat.kernels.parts import load_function
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterOptions
from wingbeat.runtime.drafters.choice import ALLOWED, CHECKPOINT, EAGLE, KINDS, parse_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hub import checkpoint_folder


def kind_of(source: str | Path, model: Path | None = None) -> str:
    """Return the key of KINDS for a name, a folder or an import path; or "none".

    Args:
        source: the drafter setting.
        model: see `parse_drafter`; the model decides which kind `auto` means.

    Raises:
        ValueError: the source matches no kind; the message lists the allowed sources.
        CheckpointError: a folder's files cannot be read.
    """
    choice = parse_drafter(source, model)
    return _kind_of_folder(checkpoint_folder(choice.source)) if choice.kind == CHECKPOINT else choice.kind


def _kind_of_folder(folder: Path) -> str:
    """Determines the kind of a folder from tensor names, since configs of heads and of whole models can look alike."""
    from wingbeat.runtime.heads.files import read_config, read_shapes

    raw, shapes = read_config(folder), read_shapes(folder)
    kinds = [kind for kind in KINDS.values() if kind.folder is not None]
    # EAGLE's criterion is the widest, so EAGLE comes after all other kinds that have `claims`. The kind without
    # `claims` comes last.
    for kind in sorted(kinds, key=lambda kind: (kind.claims is None, kind is EAGLE)):
        if kind.claims is None or load_function(kind.claims)(raw, shapes):
            return kind.name
    raise ValueError(f"drafter is {str(folder)!r}: must be {ALLOWED}")


def check_fits(source: str | Path, target: TargetDescription) -> None:
    """Refuse a head that was made for another verifier; reads configs, tensor shapes and tokenizers, but no weights.

    Raises:
        ValueError: the head's files cannot be read, or a size or the vocabulary differs from the verifier's; the
            message is one line with both values.
    """
    kind = KINDS.get(kind_of(source, target.path))
    if kind is not None and kind.check is not None:
        load_function(kind.check)(source, target)
    elif kind is not None and kind.readings is not None:
        load_function(kind.readings)(source, target, 1)


def load_drafter(
    source: str | Path,
    target: TargetDescription,
    speculation: SpeculationConfig,
    options: DrafterOptions = DrafterOptions(),
) -> Drafter | None:
    """Build the drafter that `source` means, see `parse_drafter`; None for "none".

    Raises:
        ValueError: the source names no drafter, or the drafter cannot be built; the message is one line with the
            reason.
    """
    kind = kind_of(source, target.path)
    if options.fp8_weights and kind != "eagle":
        raise ValueError(f"drafter_weights is fp8 and drafter is {str(source)!r}: only EAGLE heads support FP8 weights")
    if kind == "none":
        return None
    return load_function(KINDS[kind].build)(
        str(parse_drafter(source, target.path).source), target, speculation, options
    )
