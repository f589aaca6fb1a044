"""Runtime part: KV of layers with sliding windows; imports the implementation only for models with such layers."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

logger = logging.getLogger(__name__)
check_limits = "wingbeat.runtime.kv_windows.settings:check_limits"
engine_settings = "wingbeat.runtime.kv_windows.settings:ENGINE_SETTINGS"


def uneven_kv(fields: "Mapping[str, Any]") -> bool:
    """Whether layers of a model with these config fields may keep windows instead of whole contexts."""
    return bool(fields.get("sliding_window")) and fields.get("use_sliding_window") is not False


def extend_model(loaded: "LoadedModel", config: "EngineConfig") -> None:
    """Lets layers with sliding windows keep their windows alone; logs a line if this is impossible."""
    if any(loaded.windows) and loaded.keeps_states:
        _log_whole("the model also has layers with recurrent state")
    elif any(loaded.windows):
        from wingbeat.runtime.kv_windows.window_rows import ModelWindows

        loaded.add(ModelWindows(loaded.layers, loaded.dtype, loaded.device))


def extend_shard(loaded: "LoadedModel", ranks: Any, config: "EngineConfig") -> None:
    """Logs that the layers of a divided model keep whole contexts."""
    if any(loaded.windows) and ranks.rank == 0:
        _log_whole("the model is divided among ranks")


def _log_whole(why: str) -> None:
    logger.info("layers with sliding windows keep KV of whole contexts, because %s", why)
