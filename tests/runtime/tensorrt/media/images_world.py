"""Vision encoders of tiny models as graphs that torch runs."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.runtime.media.media_world import shown
from tests.runtime.tensorrt.engine_world import LIMITS, TorchSession, base_config
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.media.rows import MediaPart
from wingbeat.runtime.tensorrt.backend import LoadedEngine, load_engine
from wingbeat.runtime.tensorrt.engine_config import BaseEngineConfig, Limits
from wingbeat.runtime.tensorrt.media.visual_encoder import take_images
from wingbeat.runtime.tensorrt.media.visual_graph import VisualGraph, as_visual_graph, visual_shapes
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def visual_session(loaded: LoadedModel, config: BaseEngineConfig) -> TorchSession:
    """The graph of the vision encoder, run by torch."""
    shapes = visual_shapes(config.visual, loaded.hidden_size, torch.float32)
    graph = VisualGraph(loaded, config.visual, list(shapes.inputs))

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        with as_visual_graph(loaded, config.visual):
            return graph(list(tensors.values()))

    return TorchSession(run, *shapes)


def images_of(name: str, built: Limits = LIMITS) -> MediaPart:
    """The part of a verifier that a session runs which reads a model's images."""
    config = base_config(shown(name).loaded, (), built)
    loaded, _ = load_engine(config, EngineConfig(), torch.device("cpu"))
    return with_images(name)(loaded)


def with_images(name: str) -> Callable[[LoadedEngine], MediaPart]:
    """Lets a verifier that a session runs take images by the graph of a model's vision encoder, run by torch."""
    loaded = shown(name).loaded
    config = base_config(loaded, ())
    return lambda engine: take_images(engine, visual_session(loaded, config), loaded.model.config)
