"""Registers text trees that are used in addition to a drafter; their code is imported only if they are enabled."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.engine.speculation import Speculation

engine_settings = "wingbeat.runtime.suffix_beside.settings:ENGINE_SETTINGS"
check_limits = "wingbeat.runtime.suffix_beside.settings:check_limits"
add_nodes = "wingbeat.runtime.suffix_beside.text_trees:add_nodes"
add_nodes_on_host = "wingbeat.runtime.suffix_beside.text_trees:add_nodes_on_host"


def text_drafts(config: "EngineConfig", speculation: "Speculation") -> Any:
    """The object that builds text trees; None if text trees are not enabled."""
    if not config.suffix_beside:
        return None
    from wingbeat.runtime.suffix_beside.suffix_beside import SuffixBeside

    return SuffixBeside(config.speculation, speculation)
