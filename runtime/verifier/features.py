"""What features add to a round: columns beside the rows of its batch, and a hand in the model while these are computed.

Whoever builds and runs batches knows none of them by name. A feature that an engine has not costs nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wingbeat.kernels.layer.stacked_adapters import AdapterRows
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.verifier.decodes import Decodes
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.slots import SlotState
from wingbeat.runtime.vision.rows import ImageRows, Vision

if TYPE_CHECKING:
    from wingbeat.runtime.verifier.layers.adapted import ModelAdapters


class Placed:
    """Whose the rows of a batch are: the decodes', then those of prompt chunks.

    Args:
        plan: None at shapes that the arguments decide, in which nothing of the host's may be asked.
        decodes: None without any.
        chunk_slots: makes int64 [num_chunk_rows], the slots of the rows behind the decodes'; None without such.
        starts: by chunk of the plan: row of the batch of its first token.
        on_host: looking at a tensor is no wait.
    """

    def __init__(
        self,
        plan: SchedulerOutput | None,
        decodes: Decodes | None,
        chunk_slots: Callable[[], Tensor] | None,
        starts: list[int],
        on_host: bool,
    ) -> None:
        self.plan, self.decodes, self.starts, self.on_host = plan, decodes, starts, on_host
        self._chunk_slots = chunk_slots

    @cached_property
    def slots(self) -> Tensor:
        """int64 [num_rows]: of each row's sequence."""
        parts = []
        if self.decodes is not None:
            parts.append(self.decodes.packed(self.decodes.slots[:, None].expand_as(self.decodes.token_ids)))
        if self._chunk_slots is not None:
            parts.append(self._chunk_slots())
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Feature:
    """A feature of an engine; this one does nothing."""

    kind: type = type(None)
    """Of its column; the columns of a batch are found by it."""

    def visible(self, chunk: Chunk) -> Tensor | None:
        """Which of a chunk's rows each of them sees: bool [1, length, length]; None is causal."""
        return None

    def positions(self, positions: Tensor, placed: Placed) -> Tensor:
        """By what rows are rotated, of their logical positions [1, num_rows]."""
        return positions

    def column(self, placed: Placed) -> Any | None:
        """Of `kind`, for the rows of a batch; None where no row needs it."""
        return None

    def entered(self, column: Any | None, inputs: dict[str, Any]) -> AbstractContextManager:
        """Entered while the model runs with these keyword arguments, which may be changed before."""
        return nullcontext()


class Adapters(Feature):
    """LoRA: which adapter each row has."""

    kind = AdapterRows

    def __init__(self, adapters: "ModelAdapters", slots: SlotState) -> None:
        self.adapters, self.slots = adapters, slots

    def column(self, placed: Placed) -> AdapterRows | None:
        """See `Feature.column`."""
        if placed.on_host and placed.plan is not None and placed.plan.is_unadapted:
            return None
        return AdapterRows.of(self.slots.adapter_ids[placed.slots], self.adapters.max_loras, placed.on_host)

    @contextmanager
    def entered(self, column: AdapterRows | None, inputs: dict[str, Any]) -> Iterator[None]:
        """See `Feature.entered`: linear layers that run by themselves find their rows."""
        self.adapters.rows = column
        try:
            yield
        finally:
            self.adapters.rows = None


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


def features_of(loaded: LoadedModel, slots: SlotState, states: Feature | None) -> tuple[Feature, ...]:
    """Those that a model has.

    Args:
        states: keeper of its layers' own states.
    """
    adapters, vision = loaded.adapters, loaded.vision
    return (
        *(() if adapters is None else (Adapters(adapters, slots),)),
        *(() if states is None else (states,)),
        *(() if vision is None else (Images(vision, slots, loaded.model, loaded.decoder_layers),)),
    )


def columns_of(features: tuple[Feature, ...], placed: Placed) -> Mapping[type, Any]:
    """What all of them add to a batch, by kind."""
    found = ((feature.kind, feature.column(placed)) for feature in features)
    return {kind: column for kind, column in found if column is not None}
