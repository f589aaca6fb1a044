"""A stand-in for CUDA graphs of one pool: whatever a replay may overwrite of other graphs' outputs, it does."""

from typing import Any

import torch
from torch import Tensor

from tests.runtime.recorded_graphs import Call, RecordingDevice

POISON = 1 << 40
"""In outputs of integers: no index, no length and no token."""


class PoisoningDevice:
    """Each replay ruins the outputs of all other graphs: captured earlier or later, they may share its memory.

    Args:
        inner: captures and replays.
    """

    def __init__(self, inner: RecordingDevice) -> None:
        self.inner = inner
        self.new_pool, self.warm_up = inner.new_pool, inner.warm_up
        self.synchronize, self.memory_bytes = inner.synchronize, inner.memory_bytes
        self.num_poisoned = 0
        self._outputs: list[tuple[Any, list[Tensor]]] = []

    def capture(self, function, pool) -> tuple[Any, Any]:
        graph, result = self.inner.capture(function, pool)
        outputs = [part for part in result if part is not None]
        if isinstance(graph[0], Call):  # some of the outputs are inputs, whose memory is no graph's
            own = {tensor.untyped_storage()._cdata for call in graph for tensor in call.results}
            outputs = [part for part in outputs if part.untyped_storage()._cdata in own]
        self._outputs.append((graph, outputs))
        return graph, result

    def replay(self, graph: Any) -> None:
        for other, outputs in self._outputs:
            for output in outputs if other is not graph else ():
                ruined = float("nan") if output.is_floating_point() else POISON
                output.fill_(True if output.dtype == torch.bool else ruined)
                self.num_poisoned += 1
        self.inner.replay(graph)
