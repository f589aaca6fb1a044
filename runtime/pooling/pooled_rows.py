"""Embeddings of prompts: the hidden states at the input of the output head are pooled during prefill."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from wingbeat.runtime.round.rows import Feature, Placed
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


class PooledRows(NamedTuple):
    """Chunks whose rows are pooled. For each chunk: its first row in the batch, its number of rows, and whether to sum
    all rows or take the last.
    """

    plan: SchedulerOutput
    """The batch's plan."""
    parts: tuple[tuple[int, int, bool], ...]


class PromptPooling(Feature):
    """Pools the rows of prompt chunks that request pooling; a pass without such rows has no hook."""

    kind, of_chunks = PooledRows, True

    def __init__(self, loaded: LoadedModel) -> None:
        self._model, self._layers = loaded.model, (loaded.decoder_layers,)
        self._pooled: tuple[SchedulerOutput, Tensor] | None = None
        """Plan of the latest pass that pooled rows, and the pooled rows."""

    def column(self, placed: Placed) -> PooledRows | None:
        """See `Feature.column`."""
        if placed.plan is None:
            return None
        chunks = zip(placed.plan.chunks, placed.starts, strict=True)
        parts = tuple((start, chunk.length, chunk.report.is_of_all) for chunk, start in chunks if chunk.report)
        return PooledRows(placed.plan, parts) if parts else None

    @contextmanager
    def entered(self, column: PooledRows | None, inputs: dict[str, Any]) -> Iterator[None]:
        """See `Feature.entered`."""
        if column is None:
            yield
            return

        def pool(module: nn.Module, args: tuple, output: BaseModelOutputWithPast) -> None:
            self._pooled = column.plan, _pooled(output.last_hidden_state[0], column)

        (layers,) = self._layers
        decoder = next(module for module in self._model.modules() if layers in list(module.children()))
        hook = decoder.register_forward_hook(pool)
        try:
            yield
        finally:
            hook.remove()

    def reported_values(self, plan: SchedulerOutput) -> Mapping[str, Tensor]:
        """Returns the sum or the last row of each pooled chunk, as int64 [num_parts, hidden_size] with the bits of
        float64 values.

        The result is empty if no chunk of this plan was pooled, for example after a round that raised.
        """
        pooled, self._pooled = self._pooled, None
        return {} if pooled is None or pooled[0] is not plan else {"reported": pooled[1]}


def _pooled(hidden: Tensor, column: PooledRows) -> Tensor:
    rows = []
    for start, length, is_of_all in column.parts:
        own = hidden[start : start + length]
        rows.append(own.float().sum(dim=0) if is_of_all else own[-1].float())
    return torch.stack(rows).double().view(torch.int64)
