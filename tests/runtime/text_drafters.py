"""Drafters that continue earlier text, by their names."""

from wingbeat.kernels.parts import load_function
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterOptions
from wingbeat.runtime.drafters.choice import KINDS


def text_drafter(name: str, speculation: SpeculationConfig) -> Drafter:
    """A drafter of `TEXT_DRAFTERS`, which need no verifier."""
    return load_function(KINDS[name].build)(name, None, speculation, DrafterOptions())
