"""Runs the engine of a vision or audio encoder. Embeddings are cached as those of a model's own encoder."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from wingbeat.runtime.hugging_face import read_config
from wingbeat.runtime.media.encoder import MediaEncoder, MediaFeatures
from wingbeat.runtime.media.families import family_of
from wingbeat.runtime.media.family import MediaFamily
from wingbeat.runtime.media.media_input import AUDIO, IMAGE, SERVED, MediaInput
from wingbeat.runtime.media.rows import MediaPart
from wingbeat.runtime.tensorrt.backend import LoadedEngine
from wingbeat.runtime.tensorrt.engine_config import EngineEncoder
from wingbeat.runtime.tensorrt.engine_directory import EngineDirectory
from wingbeat.runtime.tensorrt.graph_shapes import TOKENS
from wingbeat.runtime.tensorrt.media.encoder_graph import encoder_inputs, encoder_shapes
from wingbeat.runtime.tensorrt.session import EngineSession, EngineStage, check_graph


def extend_engine(directory: EngineDirectory, loaded: LoadedEngine, device: torch.device) -> None:
    """Enable images or audio for an engine's verifier, if the directory has an encoder."""
    if (encoder := directory.base.encoder) is not None:
        take_media(loaded, directory.open_session(encoder.graph, device), read_config(directory.folder))


def take_media(loaded: LoadedEngine, session: EngineSession, config: PreTrainedConfig) -> MediaPart:
    """Enable images or audio for an engine's verifier; returns the `MediaPart` that reads them.

    Args:
        loaded: the verifier.
        session: session of the encoder's graph.
        config: config of the whole model.
    """
    base, kind = loaded.config, IMAGE if loaded.config.encoder.mask is None else AUDIO
    sizes = base.hidden_size, base.torch_dtype, base.limits.max_image_tokens
    part = MediaPart(config, EngineMediaEncoder(session, base.encoder, family_of(config, kind), *sizes), loaded)
    loaded.add(part)
    loaded.takes[kind] = SERVED
    return part


class EngineMediaEncoder(MediaEncoder):
    """Encodes images or sounds to embeddings with an engine.

    Args:
        session: session of the encoder's graph.
        encoder: config of the encoder.
        family: model family, for the encoder's inputs.
        hidden_size: width of the embeddings.
        dtype: dtype of the embeddings.
        max_tokens: maximum tokens of an image.

    Raises:
        EngineLoadError: the session's graph has other shapes.
    """

    def __init__(
        self,
        session: EngineSession,
        encoder: EngineEncoder,
        family: MediaFamily,
        hidden_size: int,
        dtype: torch.dtype,
        max_tokens: int,
    ) -> None:
        super().__init__(family, session.device)
        self.session, self.encoder, self.dtype = session, encoder, dtype
        self.max_tokens = max_tokens
        shapes = encoder_shapes(encoder, hidden_size, dtype)
        check_graph(session, *shapes)
        self._outputs = shapes.outputs

    def check(self, medium: MediaInput) -> None:
        """Raises ValueError if an image has more tokens than the engine was built for."""
        if self.encoder.merge and medium.length > self.max_tokens:
            raise ValueError(
                f"{medium.kind} of {medium.length} tokens: the engine was built with max_image_tokens {self.max_tokens}"
            )

    @torch.inference_mode()
    def _encode(self, media: Sequence[MediaInput]) -> list[MediaFeatures]:
        return [self._encode_one(one) for one in media]

    def _encode_one(self, medium: MediaInput) -> MediaFeatures:
        arrays = {name: torch.from_numpy(medium.arrays[name]) for name in self.family.inputs}
        passes = [self._run(inputs) for inputs in encoder_inputs(self.encoder, arrays, self.dtype)]
        embeddings, *deep = (torch.cat(parts) for parts in zip(*passes, strict=True))
        if self.encoder.mask is not None:  # only the last window of a sound has padding, at its end
            embeddings = embeddings[: medium.length].clone()
        return MediaFeatures(embeddings, tuple(deep))

    def _run(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        device = self.session.device
        inputs = {name: part.to(device).contiguous() for name, part in inputs.items()}
        sizes = {TOKENS: len(next(iter(inputs.values())))}
        outputs = {
            name: torch.empty([sizes.get(dim, dim) for dim in spec.shape], dtype=spec.dtype, device=device)
            for name, spec in self._outputs.items()
        }
        self.session.bind(EngineStage.ENCODE, inputs | outputs)
        self.session.enqueue(EngineStage.ENCODE)
        return list(outputs.values())
