"""Setting of engines that continue earlier text beside their drafter; loads no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig

ENGINE_SETTINGS = {"suffix_beside": (bool, False)}
"""Whether a tree may continue earlier text in the place of the drafter's, whichever is expected to bring more."""


def check_limits(config: "EngineConfig") -> None:
    """Raises ValueError where rounds overlap."""
    if config.suffix_beside and config.overlap:
        raise ValueError(
            "suffix_beside is True and overlap is True: with a round in flight nobody knows the text; leave overlap out"
        )
