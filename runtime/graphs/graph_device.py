"""Interface of devices that capture and replay graphs for `graph_runner`, and its CUDA implementation."""

import statistics
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

ResultT = TypeVar("ResultT")

WARM_UP_RUNS = 2
"""Number of runs before a capture, because kernels are compiled and tuned and allocate workspaces in their first run.
"""


class GraphDevice(Protocol):
    """A device that captures graphs. All calls come from one thread, and all replays go to one stream."""

    def new_pool(self) -> Any:
        """Returns a handle of a memory pool that captures share."""

    def warm_up(self, function: Callable[[], ResultT]) -> ResultT:
        """Runs `function` until all operations that a capture forbids (such as compiling) are done.

        Returns the last result.
        """

    def capture(self, function: Callable[[], ResultT], pool: Any) -> tuple[Any, ResultT]:
        """Captures `function` with its memory in `pool`.

        Returns the graph, and the result that every replay overwrites.
        """

    def replay(self, graph: Any) -> None:
        """Enqueues a captured graph on the current stream."""

    def synchronize(self) -> None:
        """Waits for all enqueued work."""

    def memory_bytes(self) -> int:
        """Returns the bytes of device memory that this process holds."""


class CudaGraphDevice:
    """Captures on a CUDA device with `torch.cuda.CUDAGraph`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], ResultT]) -> ResultT:
        """See `GraphDevice.warm_up`.

        Runs are on the capturing stream, which has its own library handles and workspaces.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                result = function()
        current.wait_stream(self._stream)
        self.synchronize()
        return result

    def capture(self, function: Callable[[], ResultT], pool: Any) -> tuple[Any, ResultT]:
        """See `GraphDevice.capture`.

        Raises:
            RuntimeError: the function did something that a capture forbids, such as waiting for the device or
                allocating outside the pool.
        """
        graph, error = torch.cuda.CUDAGraph(), None
        # If a capture cannot be ended, torch.cuda.graph leaves its own stream current; this context restores the
        # previous stream.
        with torch.cuda.stream(torch.cuda.current_stream(self.device)):
            try:
                # Other threads may use the device during a capture; in this mode, only calls of this thread can
                # invalidate the capture.
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        result = function()
                    except Exception as raised:
                        error = raised
            except RuntimeError as spoiled:
                self._abandon(graph, pool)
                raise spoiled from error
        if error is not None:
            raise error
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Ends a capture that torch could not end."""
        # The pinned-memory allocator keeps querying this graph for its stream, so the graph must stay alive.
        self._failed.append(graph)
        # The pool is released here, because otherwise torch would defer frees across streams forever, and could not
        # empty its cache when memory is short.
        index = self._stream.device.index
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
        # Up to torch 2.12, the random generator stays in capture mode until a capture ends successfully, so an empty
        # graph is captured.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory_bytes(self) -> int:
        """Returns the bytes that the caching allocator holds on this device, after its unused cache was released."""
        self.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)


def replay_ms(step: Callable[[], object], graphs: GraphDevice, repeats: int) -> float:
    """Returns median milliseconds of a step replayed as a CUDA graph.

    Args:
        graphs: the capturing device, which all steps share because each `GraphDevice` has a stream, and each stream a
            workspace that is never freed.
    """
    graphs.warm_up(step)
    graph, _ = graphs.capture(step, graphs.new_pool())
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs.replay(graph)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
