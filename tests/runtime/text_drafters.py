"""Drafters that continue earlier text, by their names."""

from importlib import import_module

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter, DrafterOptions
from wingbeat.runtime.drafters.registry import KINDS


def text_drafter(name: str, speculation: SpeculationConfig) -> Drafter:
    """One of `TEXT_DRAFTERS`, which need no verifier."""
    module, _, build = KINDS[name].partition(":")
    return getattr(import_module(module), build)(name, None, speculation, DrafterOptions())
