"""Interface of devices that capture and replay graphs for `graph_runner`, and its CUDA implementation."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

ResultT = TypeVar("ResultT")

WARM_UP_RUNS = 2
"""Runs before a capture: kernels compile, tune themselves and allocate workspaces in their first run."""


class GraphDevice(Protocol):
    """A device that captures graphs. All calls come from one thread, and all replays go to one stream."""

    def new_pool(self) -> Any:
        """Returns a handle of a memory pool that captures share."""

    def warm_up(self, function: Callable[[], ResultT]) -> ResultT:
        """Runs `function` until it does nothing that a capture forbids; returns the last result."""

    def capture(self, function: Callable[[], ResultT], pool: Any) -> tuple[Any, ResultT]:
        """Captures `function` with its memory in `pool`.

        Returns the graph, and the result that every replay overwrites.
        """

    def replay(self, graph: Any) -> None:
        """Enqueues a captured graph on the current stream."""

    def synchronize(self) -> None:
        """Waits for all enqueued work."""

    def memory_bytes(self) -> int:
        """Returns bytes of device memory that this process holds."""


class CudaGraphDevice:
    """Captures on a CUDA device with `torch.cuda.CUDAGraph`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], ResultT]) -> ResultT:
        """See `GraphDevice.warm_up`; runs on the capturing stream, which has its own library handles and workspaces."""
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
            RuntimeError: the function did what a capture forbids (waited for the device, allocated outside the pool).
        """
        graph, error = torch.cuda.CUDAGraph(), None
        # If a capture cannot be ended, torch.cuda.graph leaves its stream current: this context restores the stream.
        with torch.cuda.stream(torch.cuda.current_stream(self.device)):
            try:
                # Other threads may use the device meanwhile; in this mode only this thread's calls can invalidate the
                # capture.
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
        # Otherwise frees across streams would be deferred forever, and low memory could not be met by emptying the
        # cache.
        index = self._stream.device.index
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
        # Up to torch 2.12 the random generator stays in capture mode until a capture ends successfully.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory_bytes(self) -> int:
        """Returns bytes that the caching allocator holds on this device, after releasing its unused cache."""
        self.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)
