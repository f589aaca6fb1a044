"""Vision and audio encoders: compute embeddings of media, and cache recent results."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.runtime.device_clock import DeviceClock
from wingbeat.runtime.media.family import MediaFamily
from wingbeat.runtime.media.media_input import MediaInput

MOST_AT_ONCE = 8
"""Maximum number of images or sounds in one pass."""
_ATTENTION = "sdpa"
CACHE_BYTES = 2**28
"""Maximum bytes of features in the cache."""


class MediaFeatures(NamedTuple):
    """Features of an image or sound for the language model."""

    embeddings: Tensor
    """Embeddings [length, hidden_size] that replace the embeddings of the placeholder tokens."""
    deep: tuple[Tensor, ...] = ()
    """Features [length, hidden_size] for each of the first layers, which are added to the layer's output (DeepStack).
    """

    @property
    def num_bytes(self) -> int:
        """Size of all features in bytes."""
        return sum(part.nbytes for part in (self.embeddings, *self.deep))


@dataclass
class EncoderFigures:
    """Counters of an encoder."""

    num_encoded: int = 0
    num_hits: int = 0
    num_bytes: int = 0
    """Bytes that are in the cache now."""


class MediaEncoder(ABC):
    """An encoder with a bounded cache of the most recently used media.

    Args:
        max_bytes: maximum bytes of features in the cache.
    """

    def __init__(self, family: MediaFamily, device: torch.device, max_bytes: int = CACHE_BYTES) -> None:
        self.family = family
        self.max_bytes = max_bytes
        self.figures = EncoderFigures()
        self.device_clock = DeviceClock(device)
        """Clock of the encoder's device seconds, stage `encoder`. The verifier's stage `prefill` or `verify` includes
        these seconds.
        """
        self._known: OrderedDict[bytes, MediaFeatures] = OrderedDict()

    def check(self, medium: MediaInput) -> None:
        """Raises ValueError for an unsupported medium; the message is one line that begins with the kind."""
        return

    @abstractmethod
    def _encode(self, media: Sequence[MediaInput]) -> list[MediaFeatures]:
        """Encodes media whose arrays can be concatenated."""

    def features(self, media: Iterable[MediaInput], counted: bool = True) -> dict[bytes, MediaFeatures]:
        """Returns features by digest, from the cache or by encoding.

        Args:
            counted: whether media that are found in the cache count as hits.

        Raises:
            ValueError: for a medium, the encoder's number of embeddings differs from the number of the medium's tokens.
        """
        wanted = {one.digest: one for one in media}
        found = {digest: self._known[digest] for digest in wanted if digest in self._known}
        for digest in found:
            self._known.move_to_end(digest)
        self.figures.num_hits += counted * len(found)
        missing = [one for digest, one in wanted.items() if digest not in found]
        for group in _alike(missing):
            began = self.device_clock.begin()
            made = self._encode(group)
            self.device_clock.end("encoder", began)
            for one, features in zip(group, made, strict=True):
                if len(features.embeddings) != one.length:
                    raise ValueError(
                        f"{one.kind} of {one.length} tokens, and the encoder made {len(features.embeddings)}"
                    )
                found[one.digest] = features
                self._remember(one.digest, features)
        return found

    def forget(self) -> None:
        """Clears the cache and all counters."""
        self._known.clear()
        self.figures = EncoderFigures()
        self.device_clock.reset()

    def _remember(self, digest: bytes, features: MediaFeatures) -> None:
        self._known[digest] = features
        self.figures.num_encoded += 1
        self.figures.num_bytes += features.num_bytes
        while self.figures.num_bytes > self.max_bytes:
            _, oldest = self._known.popitem(last=False)
            self.figures.num_bytes -= oldest.num_bytes


class ModelEncoder(MediaEncoder):
    """The vision or audio encoder that is part of a model.

    Args:
        model: the model in its final form; its language model may use another attention function than the encoder.
    """

    def __init__(self, model: PreTrainedModel, family: MediaFamily) -> None:
        super().__init__(family, next(model.parameters()).device)
        self._model = model
        self.towers = _towers(model)

    @torch.inference_mode()
    def _encode(self, media: Sequence[MediaInput]) -> list[MediaFeatures]:
        for tower in self.towers:
            # The encoder's attention function is restored, because changing the language model's attention function
            # also changes the encoder's.
            if tower.config._attn_implementation != _ATTENTION:
                tower.set_attn_implementation(_ATTENTION)
        embedding = self._model.get_input_embeddings().weight
        arrays = {name: np.concatenate([one.arrays[name] for one in media]) for name in self.family.inputs}
        tensors = {name: torch.from_numpy(array).to(embedding.device) for name, array in arrays.items()}
        tensors = {
            name: tensor.to(embedding.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        output = self.family.encode(self._model, tensors)
        parts = getattr(output, "pooler_output", output)
        if isinstance(parts, Tensor) and parts.dim() == 2:
            parts = parts.split([one.length for one in media])
        deep = list(zip(*getattr(output, "deepstack_features", None) or (), strict=True)) or [()] * len(media)
        # The parts are cloned, because a cached view would keep the tensor of all media in memory.
        return [
            MediaFeatures(
                part.to(embedding.dtype).clone(), tuple(layer.to(embedding.dtype).clone() for layer in layers)
            )
            for part, layers in zip(parts, deep, strict=True)
        ]


def _towers(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Returns the submodels outside the language model that have an attention setting of their own."""
    language = {id(part) for part in model.get_decoder().modules()}
    named = [part for part in model.modules() if isinstance(part, PreTrainedModel) and id(part) not in language]
    return [part for part in named if part.config is not model.config]


def _alike(media: list[MediaInput]) -> list[list[MediaInput]]:
    """Groups media whose arrays can be concatenated."""
    groups: list[list[MediaInput]] = []
    open_groups: dict[tuple, list[MediaInput]] = {}
    for one in media:
        shape = tuple((name, array.shape[1:], array.dtype) for name, array in one.arrays.items())
        group = open_groups.get(shape)
        if group is None or len(group) == MOST_AT_ONCE:
            group = open_groups[shape] = []
            groups.append(group)
        group.append(one)
    return groups
