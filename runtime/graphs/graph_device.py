"""Capturing and replaying on a device: what `graph_runner` needs of it, and CUDA's way to do it."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

ResultT = TypeVar("ResultT")

WARM_UP_RUNS = 2
"""Before a capture: kernels compile, tune themselves and allocate workspaces in their first run."""


class GraphDevice(Protocol):
    """What capturing needs of a device. All calls come from one thread, all replays go to one stream."""

    def new_pool(self) -> Any:
        """A handle under which captures share memory."""

    def warm_up(self, function: Callable[[], ResultT]) -> ResultT:
        """Run `function` as often as it takes for nothing to be left that a capture forbids; the last result."""

    def capture(self, function: Callable[[], ResultT], pool: Any) -> tuple[Any, ResultT]:
        """Record `function` with its memory in `pool`: the graph, and the result that every replay overwrites."""

    def replay(self, graph: Any) -> None:
        """Enqueue a captured graph on the current stream."""

    def synchronize(self) -> None:
        """Wait for everything enqueued."""

    def memory_bytes(self) -> int:
        """Device memory this process holds."""


class CudaGraphDevice:
    """Captures on a CUDA device through `torch.cuda.CUDAGraph`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], ResultT]) -> ResultT:
        """See `GraphDevice.warm_up`; on the stream that captures, whose library handles and workspaces are its own."""
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
        # When a capture cannot be ended, torch.cuda.graph leaves its stream the current one: this context puts it back.
        with torch.cuda.stream(torch.cuda.current_stream(self.device)):
            try:
                # Other threads of the process may use the device meanwhile; only this thread's calls can spoil it.
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
        """Take the process out of a capture that could not be ended."""
        # The allocator of pinned memory goes on asking this graph which stream is its own: it must live.
        self._failed.append(graph)
        # Otherwise frees across streams would be put off for good, and low memory not met by emptying the cache.
        index = self._stream.device.index
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
        # Up to torch 2.12 the random generator stays in capture mode until some capture ends well.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory_bytes(self) -> int:
        """Bytes the caching allocator holds of this device, unused cache returned first."""
        self.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)
