"""Quantised checkpoints of a verifier; imports what reads them where there is one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.quantised.checkpoints import Load, Loaded
    from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile


def check_quantiser(config: "ConfigFile") -> None:
    """Refuse a quantisation that is not read here."""
    from wingbeat.runtime.quantised import checkpoints

    checkpoints.check_quantiser(config)


def load_dequantised(config: "ConfigFile", load: "Load") -> "Loaded":
    """A quantised checkpoint as a plain model, with transformers' report of what was loaded."""
    from wingbeat.runtime.quantised import checkpoints

    return checkpoints.load_dequantised(config, load)
