"""A round's rows that hold images: their embeddings, what they see, and by which positions they are rotated."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Feature, Placed
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.images import ImageInput
from wingbeat.runtime.scheduling.plan import Chunk
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.vision.encoder import ImageEncoder
from wingbeat.runtime.vision.families import VisionFamily
from wingbeat.runtime.vision.positions import rotations

_CACHE_BYTES = 2**28


class ImageRows(NamedTuple):
    """Rows of a flattened batch in whose place an image's features come."""

    rows: Tensor
    """int64 [num_image_rows]"""
    embeddings: Tensor
    """[num_image_rows, hidden_size]"""
    deep: tuple[Tensor, ...] = ()
    """As `ImageFeatures.deep`, of these rows."""


class Vision:
    """What a model that takes images adds to a batch."""

    def __init__(self, model: PreTrainedModel, family: VisionFamily) -> None:
        self.family = family
        self.encoder = ImageEncoder(model, family, _CACHE_BYTES)
        self._config = model.config

    @property
    def sees_whole_images(self) -> bool:
        """Whether an image's tokens attend to each other in both directions, so that no chunk may end among them."""
        return self.family.sees_whole_images

    @property
    def rotates_in_grids(self) -> bool:
        """Whether rows are rotated by other positions than those that they stand at."""
        return self.family.rotates_in_grids

    def check(self, request: Request, most_at_once: int) -> None:
        """Refuse images that the model cannot have.

        Args:
            most_at_once: prompt tokens of a round.

        Raises:
            ValueError: one line that begins with "images".
        """
        if request.adapter is not None:
            raise ValueError("images are not served with LoRA adapters")
        end = 0
        for image in request.images:
            if set(image.arrays) != set(self.family.inputs):
                raise ValueError(f"images hold {', '.join(image.arrays)}: {', '.join(self.family.inputs)} are needed")
            if image.length != self.family.num_tokens(self._config, image.arrays):
                raise ValueError(f"images: {image.length} tokens are not those of the image")
            if image.start < end or image.end >= len(request.prompt_token_ids):
                raise ValueError("images overlap, or are not followed by text")
            if self.sees_whole_images and image.length > most_at_once:
                raise ValueError(
                    f"images: one has {image.length} tokens, and max_num_batched_tokens is {most_at_once}; raise it"
                )
            end = image.end

    def rows(self, chunks: Sequence[Chunk], starts: Sequence[int], device: torch.device) -> ImageRows | None:
        """Of chunks, whose first rows are `starts`; None where they hold no image."""
        within = [
            (image, start + image_start - chunk.start, image_start - image.start, image_end - image.start)
            for chunk, start in zip(chunks, starts, strict=True)
            for image, image_start, image_end in images_within(chunk)
        ]
        if not within:
            return None
        features = self.encoder.features(image for image, *_ in within)
        rows = np.concatenate([np.arange(row, row + last - first) for _, row, first, last in within])
        parts = [(features[image.digest], slice(first, last)) for image, _, first, last in within]
        embeddings = torch.cat([of.embeddings[part] for of, part in parts])
        depth = len(parts[0][0].deep)
        deep = tuple(torch.cat([of.deep[layer][part] for of, part in parts]) for layer in range(depth))
        return ImageRows(upload(rows, device), embeddings, deep)

    def visible(self, chunk: Chunk) -> Tensor | None:
        """Which of a chunk's rows each of them sees: bool [1, length, length]; None is causal."""
        if not self.sees_whole_images:
            return None
        spans = [(start - chunk.start, end - chunk.start) for _, start, end in images_within(chunk)]
        if not spans:
            return None
        seen = torch.ones(chunk.length, chunk.length, dtype=torch.bool).tril()
        for first, last in spans:
            seen[first:last, first:last] = True
        return seen[None]

    def rotated(self, positions: Tensor, chunks: Sequence[Chunk], starts: Sequence[int]) -> Tensor:
        """Positions [num_rows] by which rows are rotated: [1, num_rows], or [3, 1, num_rows] where images are among
        them.

        Args:
            positions: of the rows, moved as far as what is behind the images is.
        """
        with_images = [(chunk, start) for chunk, start in zip(chunks, starts, strict=True) if chunk.seq.request.images]
        if not with_images:
            return positions[None]
        thrice = positions.repeat(3, 1)
        for chunk, start in with_images:
            found = rotations(chunk.seq.request.images, chunk.start, chunk.start + chunk.length)
            thrice[:, start : start + chunk.length] = upload(found, positions.device)
        return thrice[:, None]


def images_within(chunk: Chunk) -> list[tuple[ImageInput, int, int]]:
    """Images with tokens in a chunk, and which: their first position, and the one behind the last."""
    end = chunk.start + chunk.length
    return [
        (image, max(image.start, chunk.start), min(image.end, end))
        for image in chunk.seq.request.images
        if image.start < end and image.end > chunk.start
    ]


class Images(Feature):
    """Images in prompts: rows that hold their embeddings, which tokens see each other, and how these are rotated."""

    kind = ImageRows

    def __init__(self, vision: Vision, slots: SlotState, model: nn.Module, decoder_layers: nn.ModuleList) -> None:
        self.vision, self.slots = vision, slots
        self.model, self.decoder_layers = model, tuple(decoder_layers)

    def visible(self, chunk: Chunk) -> Tensor | None:
        """See `Feature.visible`."""
        return self.vision.visible(chunk)

    def positions(self, positions: Tensor, placed: Placed) -> Tensor:
        """See `Feature.positions`; [3, 1, num_rows] where images are among the rows."""
        if not self.vision.rotates_in_grids:
            return positions
        moved = positions[0] + self.slots.position_deltas[placed.slots]
        return self.vision.rotated(moved, () if placed.plan is None else placed.plan.chunks, placed.starts)

    def column(self, placed: Placed) -> ImageRows | None:
        """See `Feature.column`."""
        if placed.plan is None:
            return None
        return self.vision.rows(placed.plan.chunks, placed.starts, self.slots.device)

    @contextmanager
    def entered(self, column: ImageRows | None, inputs: dict[str, Any]) -> Iterator[None]:
        """See `Feature.entered`: embeddings in their rows, and what is added to the results of the first layers."""
        if column is None:
            yield
            return
        rows = column.rows
        embeddings = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        inputs["inputs_embeds"] = embeddings.index_copy(1, rows, column.embeddings[None])

        def adding(features: Tensor) -> Callable[[nn.Module, tuple, Tensor], Tensor]:
            return lambda module, args, hidden: hidden.index_add(1, rows, features[None])

        deep = zip(self.decoder_layers, column.deep, strict=False)
        hooks = [layer.register_forward_hook(adding(features)) for layer, features in deep]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
