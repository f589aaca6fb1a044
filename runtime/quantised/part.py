"""Quantised checkpoints of a verifier; imports what reads them where there is one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from wingbeat.runtime.quantised.checkpoints import Load, Loaded
    from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile


def folder_of(source: "Path") -> "Path | None":
    """The folder that stands for a GGUF file; None for other sources."""
    from wingbeat.runtime.quantised import gguf_folder

    return gguf_folder.folder_of(source)


def check_quantiser(config: "ConfigFile") -> None:
    """Refuse a quantisation that is not read here."""
    from wingbeat.runtime.quantised import checkpoints

    checkpoints.check_quantiser(config)


def load_dequantised(config: "ConfigFile", load: "Load") -> "Loaded":
    """A quantised checkpoint as a plain model, with transformers' report of what was loaded."""
    from wingbeat.runtime.quantised import checkpoints

    return checkpoints.load_dequantised(config, load)
