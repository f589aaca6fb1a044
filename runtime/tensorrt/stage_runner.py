"""Passes of one graph over rows of linear KV: padded to a range of rows, captured where that was asked for.

Rows of a range that are no sequence of the pass write where no sequence keeps anything: behind its longest length.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.graphs.buckets import batch_buckets
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.tensorrt.linear_kv import LinearKV, row_ranges
from wingbeat.runtime.tensorrt.session import EngineSession, EngineStage, TensorSpec

logger = logging.getLogger(__name__)
START, MASK = "kvcache_start_index", "attention_mask"
FIRST_ROW = 1
"""Row 0 belongs to nobody."""


class CapacityExceededError(ValueError):
    """More tokens than a sequence's KV has rows for."""


class _Captured(NamedTuple):
    graph: Any
    tensors: dict[str, Tensor]
    num_rows: int


class StageRunner:
    """Runs the stages of one graph.

    Args:
        kv: rows of all sequences; its addresses must not change.
        most_rows: largest batch of the graph.
        graph_device: captures stages; None runs everything eagerly.
    """

    def __init__(
        self, session: EngineSession, kv: LinearKV, most_rows: int, graph_device: GraphDevice | None = None
    ) -> None:
        self.session = session
        self.kv = kv
        self.most_rows = most_rows
        self.failed: dict[EngineStage, str] = {}
        """Stages that could not be captured and run eagerly, with the reason."""
        self._device = graph_device
        self._captured: dict[tuple[EngineStage, int], list[_Captured]] = {}

    @property
    def captured(self) -> list[EngineStage]:
        """Stages that are replayed."""
        return sorted({stage for stage, _ in self._captured})

    def capture(self, stage: EngineStage, num_rows: int, num_selected: int) -> bool:
        """Capture a stage at `num_rows` rows a sequence, for every batch; False where it has to run eagerly."""
        if self._device is None:
            return False
        pool = self._device.new_pool()
        found: list[_Captured] = []
        for batch in batch_buckets(min(self.most_rows, self.kv.num_blocks - FIRST_ROW)):
            tensors = self._empty(batch, num_rows, num_selected)
            tensors |= self._caches(FIRST_ROW, FIRST_ROW + batch)
            try:
                self.session.bind(stage, tensors)
                self._device.warm_up(lambda: self.session.enqueue(stage))
                graph, _ = self._device.capture(lambda: self.session.enqueue(stage), pool)
                self.session.keep_bound(stage)
            except Exception as error:  # whatever a library raises: the stage runs without
                self.failed[stage] = f"{type(error).__name__}: {error}"
                logger.warning("stage %s is not captured and runs eagerly: %s", stage, self.failed[stage])
                return False
            found.append(_Captured(graph, tensors, batch))
        self._captured[stage, num_rows] = found
        return True

    def run(
        self, stage: EngineStage, rows: list[int], inputs: Mapping[str, Tensor], num_out: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """One pass.

        Args:
            rows: of the KV, one a sequence, each once.
            inputs: [num_seqs, ...] by name, without the caches.
            num_out: second dimension of each output but the caches.

        Raises:
            CapacityExceededError: a sequence has no room for its rows; names them. Told where the device is the host.
        """
        self._check_room(rows, inputs)
        outputs = {
            name: self._new(self.session.outputs[name], len(rows), size, torch.empty) for name, size in num_out.items()
        }
        captured = self._captured.get((stage, inputs["input_ids"].shape[1]), ())
        for begin, end, indices in row_ranges(rows, self.most_rows):
            graph = next((one for one in captured if end <= FIRST_ROW + one.num_rows), None)
            if graph is not None:
                self._replay(graph, [rows[index] - FIRST_ROW for index in indices], indices, inputs, outputs)
                continue
            places = [rows[index] - begin for index in indices]
            tensors = {
                name: self._padded(name, tensor, end - begin, places, indices) for name, tensor in inputs.items()
            }
            results = {
                name: self._new(self.session.outputs[name], end - begin, size, torch.empty)
                for name, size in num_out.items()
            }
            self.session.bind(stage, tensors | results | self._caches(begin, end))
            self.session.enqueue(stage)
            if indices == places == list(range(len(rows))):
                return results
            for name, output in outputs.items():
                output[indices] = results[name][places]
        return outputs

    def _replay(
        self,
        captured: _Captured,
        places: list[int],
        indices: list[int],
        inputs: Mapping[str, Tensor],
        outputs: dict[str, Tensor],
    ) -> None:
        for name, tensor in inputs.items():
            captured.tensors[name].copy_(self._padded(name, tensor, captured.num_rows, places, indices))
        self._device.replay(captured.graph)
        for name, output in outputs.items():
            output[indices] = captured.tensors[name][places]

    def _padded(self, name: str, tensor: Tensor, num_rows: int, places: list[int], indices: list[int]) -> Tensor:
        """The sequences' rows of an input at their places in a range, and nobody's between them."""
        if num_rows == len(indices):
            return tensor if indices == list(range(len(tensor))) else tensor[indices]
        padded = tensor.new_zeros(num_rows, *tensor.shape[1:])
        if name == START:
            padded.fill_(self._spare_start)
        elif name.startswith(MASK):
            padded[..., 0] = True  # a row that sees nothing would give no number
        padded[places] = tensor[indices]
        return padded

    def _check_room(self, rows: list[int], inputs: Mapping[str, Tensor]) -> None:
        starts, width = inputs[START], inputs["input_ids"].shape[1]
        self._spare_start = max(self.kv.block_size - width, 0)
        if starts.device.type != "cpu" or not len(starts):
            return
        start, index = starts.max(0)
        if int(start) + width > self.kv.block_size:
            raise CapacityExceededError(
                f"KV row {rows[int(index)]}: {width} tokens from {int(start)} exceed its capacity {self.kv.block_size}"
            )

    def _caches(self, begin: int, end: int) -> dict[str, Tensor]:
        """The caches of a range under their names as inputs, and again as what the pass makes of them."""
        views = self.kv.rows(begin, end)
        return dict(zip(cache_names(len(views) // 2), views, strict=True)) | dict(
            zip(cache_names(len(views) // 2, "present_"), views, strict=True)
        )

    def _empty(self, batch: int, num_rows: int, num_selected: int) -> dict[str, Tensor]:
        """Fresh inputs and outputs of a stage, the inputs all padding."""
        tensors: dict[str, Tensor] = {}
        caches = {*self._caches(0, 0)}
        for name, spec in [*self.session.inputs.items(), *self.session.outputs.items()]:
            if name in caches:
                continue
            selected = name in ("last_token_ids", "logits") or (name == "hidden_states" and self._is_draft)
            tensors[name] = self._new(spec, batch, num_selected if selected else num_rows, torch.zeros)
            if name == START:
                tensors[name].fill_(self.kv.block_size - num_rows)
            elif name.startswith(MASK):
                tensors[name][..., 0] = True
        return tensors

    @property
    def _is_draft(self) -> bool:
        return "hidden_states_from_draft" in self.session.inputs

    def _new(self, spec: TensorSpec, batch: int, size: int, make: Any) -> Tensor:
        free: Iterable[int] = iter((batch, size))
        shape = [next(free) if dim == -1 else dim for dim in spec.shape]
        return make(*shape, dtype=spec.dtype, device=self.session.device)


def cache_names(num_layers: int, prefix: str = "") -> list[str]:
    """Names of keys and values of each layer in turn; `present_` for those that a pass returns."""
    return [f"{prefix}{kind}_cache_{layer}" for layer in range(num_layers) for kind in ("k", "v")]
