"""LoRA adapters of a divided model: each rank holds the parts of an adapter that match its part of the layer.

For a layer divided by outputs, a rank holds rows of B; for a layer divided by inputs, columns of A. The adapters'
effect is thus included in the ranks' outputs, which are summed or gathered after the layer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wingbeat.kernels.lora.stacked_adapters import AdapterRows, StackedAdapters
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.lora.adapter import LinearAdapter, LinearShape
from wingbeat.runtime.round.rows import NO_COLUMNS, Rows
from wingbeat.runtime.scheduling.request import Variant
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

Change = tuple[int, tuple[str, str, str] | None]
"""Adapter id, and the `Variant` that was loaded for the id; None if the id was cleared."""
AdapterMessage = tuple[tuple[Change, ...], tuple[Tensor, bool] | None]
"""Changes before a pass; then the adapter ids of the pass's rows and whether the host may read them, or None if no
row has an adapter.
"""


class RankAdapters(ModelAdapters):
    """A rank's part of all adapters. All ranks load an adapter before the same pass; rank 0 determines which adapters
    are loaded.

    Args:
        loaded: this rank's part of the model.

    Raises:
        AdapterError: as for `ModelAdapters`.
    """

    def __init__(self, loaded: LoadedModel, ranks: Ranks, max_loras: int, max_rank: int) -> None:
        self._rank = ranks.rank
        self._changes: list[Change] = []
        super().__init__(loaded.model, loaded.decoder_layers, max_loras, max_rank, loaded.inner_linears)
        whole = {path: loaded.model.get_submodule(path) for path in self.linears}
        self.linears = {path: LinearShape(linear.in_features, linear.out_features) for path, linear in whole.items()}

    def put(self, adapter_id: int, path: str, adapter: LinearAdapter) -> None:
        """See `AdapterPlaces.put`; receives the whole adapter and keeps this rank's part."""
        place = self._places[path]
        inputs, outputs = place.stack.a.shape[1], place.stack.parts[place.part]
        # In a dimension that is not divided, the part begins at index 0 on all ranks.
        first_in, first_out = (
            self._rank * mine if mine < whole else 0
            for mine, whole in zip((inputs, outputs), self.linears[path], strict=True)
        )
        a, b = adapter
        part = LinearAdapter(a[:, first_in : first_in + inputs], b[first_out : first_out + outputs])
        super().put(adapter_id, path, part)

    def clear(self, adapter_id: int) -> None:
        """See `AdapterPlaces.clear`."""
        super().clear(adapter_id)
        self._changes.append((adapter_id, None))

    def tell(self, rows: Rows | None) -> AdapterMessage:
        """On rank 0: returns the changes that the other ranks apply before their next pass, and the adapter ids of that
        pass's rows.
        """
        changes, self._changes = tuple(self._changes), []
        adapted = None if rows is None else rows.columns.get(AdapterRows)
        return changes, None if adapted is None else (adapted.ids, adapted.runs is not None)

    def hear(self, told: AdapterMessage) -> Mapping[type, Any]:
        """On the other ranks: applies rank 0's changes.

        Raises:
            AdapterError: an adapter's files have changed since rank 0 read them.
        """
        changes, of_rows = told
        self.rows = None if of_rows is None else self.rows_of(*of_rows)
        for adapter_id, name in changes:
            if name is None:
                super().clear(adapter_id)
            else:
                super()._load(Variant(*name), adapter_id)
        return NO_COLUMNS if self.rows is None else {AdapterRows: self.rows}

    def _load(self, adapter: Variant, adapter_id: int) -> None:
        super()._load(adapter, adapter_id)
        # The path is made absolute, because the other ranks read the files themselves and may have another working
        # directory.
        path = str(Path(adapter.path).absolute())
        self._changes.append((adapter_id, tuple(adapter._replace(path=path))))

    def _stack(self, linears: list[nn.Linear]) -> StackedAdapters:
        # The sizes are read from the weights, because the layer's in_features and out_features are still those of the
        # whole layer.
        weight, parts = linears[0].weight, tuple(len(linear.weight) for linear in linears)
        return StackedAdapters.empty(self.max_loras, self.max_rank, weight.shape[1], parts, weight.dtype, weight.device)
