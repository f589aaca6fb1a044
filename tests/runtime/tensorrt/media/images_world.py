"""Vision and audio encoders of tiny models as graphs that torch runs."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.runtime.media.media_world import shown
from tests.runtime.tensorrt.engine_world import LIMITS, TorchSession, base_config
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.media.rows import MediaPart
from wingbeat.runtime.tensorrt.backend import LoadedEngine, load_engine
from wingbeat.runtime.tensorrt.engine_config import BaseEngineConfig, Limits
from wingbeat.runtime.tensorrt.media.encoder_graph import EncoderGraph, as_encoder_graph, encoder_shapes
from wingbeat.runtime.tensorrt.media.engine_encoder import take_media
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

SOUNDS = ("qwen2_audio", "audioflamingo3", "glmasr")
"""Models that take audio."""


def encoder_session(loaded: LoadedModel, config: BaseEngineConfig) -> TorchSession:
    """The graph of the encoder, run by torch."""
    shapes = encoder_shapes(config.encoder, loaded.hidden_size, torch.float32)
    graph = EncoderGraph(loaded, config.encoder, list(shapes.inputs))

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        with as_encoder_graph(loaded, config.encoder):
            return graph(list(tensors.values()))

    return TorchSession(run, *shapes)


def images_of(name: str, built: Limits = LIMITS) -> MediaPart:
    """The part of a verifier that a session runs which reads a model's images or sounds."""
    config = base_config(shown(name).loaded, (), built)
    loaded, _ = load_engine(config, EngineConfig(), torch.device("cpu"))
    return with_images(name)(loaded)


def with_images(name: str) -> Callable[[LoadedEngine], MediaPart]:
    """Lets a verifier that a session runs take images or audio by the graph of a model's encoder, run by torch."""
    loaded = shown(name).loaded
    config = base_config(loaded, ())
    return lambda engine: take_media(engine, encoder_session(loaded, config), loaded.model.config)
