"""Settings of text trees that are used in addition to a drafter; does not import torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig

ENGINE_SETTINGS = {"suffix_beside": (bool, False)}
"""Whether a tree that continues earlier text may replace the drafter's tree, if more accepted tokens are expected of
the text tree.
"""


def check_limits(config: "EngineConfig") -> None:
    """Raises ValueError if text trees and overlapping rounds are both enabled."""
    if config.suffix_beside and config.overlap:
        raise ValueError(
            "suffix_beside is True and overlap is True: a round in flight leaves the text unknown; leave overlap out"
        )
