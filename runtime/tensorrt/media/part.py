"""Images of engine directories; imports what reads them where an engine takes some."""

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wingbeat.runtime.media.rows import MediaRows
    from wingbeat.runtime.tensorrt.backend import LoadedEngine
    from wingbeat.runtime.tensorrt.engine_directory import EngineDirectory


def extend_engine(directory: "EngineDirectory", loaded: "LoadedEngine", device: "torch.device") -> None:
    """Let an engine's verifier take images, where the directory has its vision encoder."""
    if directory.base.visual is not None:
        from wingbeat.runtime.tensorrt.media.visual_encoder import serve_images

        serve_images(directory, loaded, device)


def embedded_rows(columns: Mapping[type, Any]) -> "MediaRows | None":
    """Rows of a batch that hold images."""
    from wingbeat.runtime.media.rows import MediaRows

    return columns.get(MediaRows)


def visual_build() -> ModuleType:
    """The build of vision encoders."""
    from wingbeat.runtime.tensorrt.media import visual_build

    return visual_build
