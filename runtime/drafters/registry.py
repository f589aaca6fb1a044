"""Which drafter a name or a folder means; kinds are imported only when asked for."""

from importlib import import_module
from pathlib import Path

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterOptions
from wingbeat.runtime.drafters.choice import CHECKPOINT, parse_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.parts import hooks

KINDS = {
    "draft_model": "wingbeat.runtime.drafters.draft_model:build_draft_model",
    "eagle": "wingbeat.runtime.drafters.eagle:build_eagle",
    "mtp": "wingbeat.runtime.drafters.mtp:build_mtp",
    "one_pass": "wingbeat.runtime.drafters.one_pass:build_one_pass",
    "ngram": "wingbeat.runtime.drafters.ngram:build_ngram",
    "user": "wingbeat.runtime.drafters.user:load_user_drafter",
} | {name: path for drafters in hooks("text_drafters") for name, path in drafters().items()}
"""By name, the function (what the user gave, verifier, shape of the trees, options) -> drafter; what a user gives is
resolved to one of them by `kind_of`."""


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
    from wingbeat.runtime.heads.families import one_pass_family
    from wingbeat.runtime.heads.files import read_config, read_shapes
    from wingbeat.runtime.heads.layouts import holds_head

    raw, shapes = read_config(folder), read_shapes(folder)
    if one_pass_family(raw, shapes) is not None:
        return "one_pass"
    return "eagle" if holds_head(raw, shapes) else "draft_model"


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
    if options.fp8_weights and kind != "eagle":
        raise ValueError(f"drafter_weights is fp8 and drafter is {str(source)!r}: only EAGLE heads have such weights")
    if kind == "none":
        return None
    module, _, function = KINDS[kind].partition(":")
    build = getattr(import_module(module), function)
    return build(str(parse_drafter(source, target.path).source), target, speculation, options)
