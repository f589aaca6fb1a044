"""Measured readings of heads; imports what measures when it is asked."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.conventions.readings import ConventionChoice
    from wingbeat.runtime.heads.target import TargetDescription
    from wingbeat.runtime.tokenizer import Tokenizer
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def choose_convention(
    source: str | Path, target: "TargetDescription", loaded: "LoadedModel", tokenizer: "Tokenizer | None"
) -> "ConventionChoice | None":
    """The reading of a head that drafts best, where its files leave several; None where they leave one."""
    from wingbeat.runtime.conventions import readings

    return readings.choose_convention(source, target, loaded, tokenizer)
