"""What features add to a round: columns beside the rows of its batch, and a hand in the model while these are computed.

Whoever builds and runs batches knows none of them by name. A feature that an engine has not costs nothing.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.round.rows import Decodes
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput


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


def columns_of(features: tuple[Feature, ...], placed: Placed) -> Mapping[type, Any]:
    """What all of them add to a batch, by kind."""
    found = ((feature.kind, feature.column(placed)) for feature in features)
    return {kind: column for kind, column in found if column is not None}
