"""Captures on a GPU of shapes alone."""

from collections import Counter
from typing import Any

from tests.runtime.fake_gpu import FakeGpu


class FakeGraphDevice:
    """Captures by running under `FakeGpu.capture`; a graph is the count of its launches."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.graphs: list[Counter[str]] = []
        self._result: Any = None

    def new_pool(self) -> int:
        return 0

    def warm_up(self, function):
        with self.gpu.capture() as launches:
            self._result = function()
        self.graphs.append(launches)
        return self._result

    def capture(self, function, pool):
        # Nothing is computed, so the result of the run before the capture serves.
        return self.graphs[-1], self._result

    def replay(self, graph: Counter[str]) -> None:
        self.gpu.launches["graph"] += 1

    def synchronize(self) -> None:
        pass

    def memory_bytes(self) -> int:
        return 0
