"""Runs passes of one graph over rows of linear KV.

A pass is padded to a contiguous range of rows, and can be captured as a CUDA graph. Rows of the range that belong to no
sequence of the pass write their KV after the maximum length of a sequence, where no sequence keeps KV.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.graphs.buckets import batch_buckets
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.tensorrt.engine_config import Limits
from wingbeat.runtime.tensorrt.graph_shapes import BATCH, MASK, ROWS, SELECTED, START, GraphShapes, cache_names
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.session import EngineSession, EngineStage, TensorSpec, check_dtypes, check_graph

logger = logging.getLogger(__name__)
FIRST_ROW = 1
"""Index of the first KV row that a sequence can use; row 0 is unused padding."""


class CapacityExceededError(ValueError):
    """A sequence has more tokens than positions in its KV row."""


class RowRange(NamedTuple):
    """The contiguous KV rows of one pass: from `begin` up to but excluding `end`."""

    begin: int
    end: int
    rows: list[int]
    """The rows of the range that belong to a sequence of the pass, ascending."""
    indices: list[int]
    """Indices, in the pass, of the sequences of `rows`."""

    def is_pass(self, num_seqs: int) -> bool:
        """Whether the range consists of exactly the rows of all sequences of a pass, in the order of the sequences."""
        return self.end - self.begin == num_seqs and self.indices == list(range(num_seqs))


class _Captured(NamedTuple):
    graph: Any
    tensors: dict[str, Tensor]
    num_rows: int


class StageRunner:
    """Runs the stages of one graph.

    Args:
        session: the loaded graph.
        shapes: shapes of the graph.
        kv: KV rows of all sequences; its addresses must not change.
        limits: limits of the graph's shapes.
        graph_device: captures stages; None runs everything eagerly.
        fixed: inputs that are the same in every pass, at fixed addresses.

    Raises:
        EngineLoadError: the session's graph has other shapes.
    """

    def __init__(
        self,
        session: EngineSession,
        shapes: GraphShapes,
        kv: LinearKV,
        limits: Limits,
        graph_device: GraphDevice | None = None,
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_graph(session, *shapes)
        self.session, self.kv, self.limits = session, kv, limits
        self.failed: dict[EngineStage, str] = {}
        """Stages that could not be captured and run eagerly, with the reason."""
        self._fixed = fixed or {}
        caches = {*cache_names(len(kv.layers)), *cache_names(len(kv.layers), "present_"), *self._fixed}
        self._inputs, self._outputs = (
            {name: spec for name, spec in part.items() if name not in caches} for part in shapes
        )
        self._device = graph_device
        self._captured: dict[tuple[EngineStage, int], list[_Captured]] = {}

    @property
    def captured(self) -> list[EngineStage]:
        """Stages that were captured, so that passes replay a graph."""
        return sorted({stage for stage, _ in self._captured})

    def capture(self, stage: EngineStage, num_rows: int, num_selected: int) -> bool:
        """Capture a stage with `num_rows` rows per sequence, for all batch buckets. Returns False if the stage has to
        run eagerly.
        """
        if self._device is None:
            return False
        pool = self._device.new_pool()
        found: list[_Captured] = []
        for batch in batch_buckets(min(self.limits.max_batch_size, self.kv.num_rows - FIRST_ROW)):
            sizes = {BATCH: batch, ROWS: num_rows, SELECTED: num_selected}
            tensors = self._padding(sizes) | self._empty_outputs(sizes)
            try:
                self.session.bind(stage, tensors | self._bound(FIRST_ROW, FIRST_ROW + batch))
                self._device.warm_up(lambda: self.session.enqueue(stage))
                graph, _ = self._device.capture(lambda: self.session.enqueue(stage), pool)
                self.session.keep_bound(stage)
            except Exception as error:  # libraries raise various classes; after any exception the stage runs eagerly
                self.failed[stage] = f"{type(error).__name__}: {error}"
                logger.warning("stage %s is not captured and runs eagerly: %s", stage, self.failed[stage])
                return False
            found.append(_Captured(graph, tensors, batch))
        self._captured[stage, num_rows] = found
        return True

    def run(
        self, stage: EngineStage, rows: list[int], starts: list[int], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run one pass.

        Args:
            stage: the stage.
            rows: KV row of each sequence, without duplicates.
            starts: cache position of the first input row of each sequence.
            inputs: [num_seqs, ...] by name, without starts and caches.

        Returns:
            Outputs [num_seqs, ...] by name, without the caches.

        Raises:
            CapacityExceededError: the rows of a sequence do not fit into its KV row; the message names the KV row.
            WrongInputError: an input has another dtype or shape than the graph's; the message names the input.
        """
        sizes = {ROWS: inputs["input_ids"].shape[1], SELECTED: inputs["last_token_ids"].shape[1]}
        self._check_room(rows, starts, sizes[ROWS])
        inputs = {**inputs, START: upload(starts, self.session.device)}
        check_dtypes(inputs, self._inputs)
        # Padding writes its KV to the last positions of a KV row. The last `capacity - max_kv_cache_capacity` positions
        # are reserved for trees and hold no kept KV. A pass with more rows per sequence, such as a prefill, may not
        # include other sequences' KV rows, because padding would overwrite kept KV.
        gaps = sizes[ROWS] <= self.limits.capacity - self.limits.max_kv_cache_capacity
        captured = self._captured.get((stage, sizes[ROWS]), ())
        outputs: dict[str, Tensor] = {}
        for part in row_ranges(rows, self.limits.max_batch_size, gaps):
            graph = next((one for one in captured if part.end <= FIRST_ROW + one.num_rows), None)
            if graph is None and part.is_pass(len(rows)):
                return self._enqueue(stage, part, inputs, sizes)
            first = part.begin if graph is None else FIRST_ROW
            places, indices = upload([[row - first for row in part.rows], part.indices], self.session.device)
            if graph is None:
                padded = self._padding(sizes | {BATCH: part.end - part.begin})
                _fill(padded, inputs, places, indices)
                results = self._enqueue(stage, part, padded, sizes)
            else:
                results = self._replay(graph, inputs, places, indices)
            outputs = outputs or self._empty_outputs(sizes | {BATCH: len(rows)})
            for name, output in outputs.items():
                output.index_copy_(0, indices, results[name].index_select(0, places))
        return outputs

    def _enqueue(
        self, stage: EngineStage, part: RowRange, inputs: dict[str, Tensor], sizes: dict[str, int]
    ) -> dict[str, Tensor]:
        """Runs the engine over a range; returns the outputs of every row of the range."""
        results = self._empty_outputs(sizes | {BATCH: part.end - part.begin})
        self.session.bind(stage, inputs | results | self._bound(part.begin, part.end))
        self.session.enqueue(stage)
        return results

    def _replay(
        self, captured: _Captured, inputs: dict[str, Tensor], places: Tensor, indices: Tensor
    ) -> dict[str, Tensor]:
        """Replays a captured graph; returns the outputs of every captured row, valid until the next replay."""
        # The rows without a sequence still hold inputs of earlier rounds. Only the position at which they store KV
        # could do harm, so that position is set after all kept KV.
        captured.tensors[START].fill_(self.kv.capacity - inputs["input_ids"].shape[1])
        _fill(captured.tensors, inputs, places, indices)
        self._device.replay(captured.graph)
        return captured.tensors

    def _check_room(self, rows: list[int], starts: list[int], num_rows: int) -> None:
        capacity = self.kv.capacity
        for row, start in zip(rows, starts, strict=True):
            if start + num_rows > capacity:
                raise CapacityExceededError(
                    f"KV row {row}: {num_rows} tokens from {start} exceed its capacity {capacity}"
                )

    def _bound(self, begin: int, end: int) -> dict[str, Tensor]:
        """The fixed inputs, and the caches of a range as both inputs and outputs."""
        views, num_layers = self.kv.rows(begin, end), len(self.kv.layers)
        return dict(self._fixed) | {
            name: view
            for prefix in ("", "present_")
            for name, view in zip(cache_names(num_layers, prefix), views, strict=True)
        }

    def _padding(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Inputs that consist of padding only."""
        tensors = self._new(self._inputs, sizes, torch.zeros)
        tensors[START].fill_(self.kv.capacity - sizes[ROWS])
        for name, tensor in tensors.items():
            if name.startswith(MASK):
                tensor[..., 0] = True  # a row that sees no key would give NaN
        return tensors

    def _empty_outputs(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        return self._new(self._outputs, sizes, torch.empty)

    def _new(self, specs: Mapping[str, TensorSpec], sizes: dict[str, int], make: Any) -> dict[str, Tensor]:
        device = self.session.device
        return {
            name: make([sizes.get(dim, dim) for dim in spec.shape], dtype=spec.dtype, device=device)
            for name, spec in specs.items()
        }


def _fill(tensors: dict[str, Tensor], inputs: dict[str, Tensor], places: Tensor, indices: Tensor) -> None:
    """Copies the inputs of the sequences at `indices` to the rows at `places` of a range's tensors."""
    for name, tensor in inputs.items():
        tensors[name].index_copy_(0, places, tensor.index_select(0, indices))


def row_ranges(rows: list[int], most: int, gaps: bool = True) -> list[RowRange]:
    """Splits the KV rows of a pass into contiguous ranges of at most `most` rows.

    Args:
        rows: the KV rows of a pass.
        most: maximum rows per range.
        gaps: whether a range may include rows that are not in `rows`.
    """
    ranges: list[RowRange] = []
    for index in sorted(range(len(rows)), key=rows.__getitem__):
        row, last = rows[index], ranges[-1] if ranges else None
        if last is not None and row - last.begin < most and (gaps or row == last.end):
            ranges[-1] = RowRange(last.begin, row + 1, [*last.rows, row], [*last.indices, index])
        else:
            ranges.append(RowRange(row, row + 1, [row], [index]))
    return ranges
