"""A GPU of numbers: cuda:0 in a torch without CUDA. Tensors lie in the host's memory, ATen runs on the CPU, Triton's
kernels are interpreted or executed as compiled, graphs are recorded and replayed, and everything is done when its call
returns. In a process of its own: the device stays in it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from tests.gpu_of_numbers import device
from tests.gpu_of_numbers.cards import CARDS, CONTEXT_BYTES, Card
from tests.gpu_of_numbers.graphs import Capturing, NumberGraph, Pool
from tests.gpu_of_numbers.kernels import launching
from tests.runtime.fake_gpu import refuse_arrays

PATIENCE_S = 1800.0
"""Limit in seconds: work of milliseconds on a GPU takes minutes here."""


class Stream:
    """The only one there is, under any name."""

    device = device.CUDA
    cuda_stream = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        """Do nothing: enqueued work is done already."""

    wait_event = wait_stream


@dataclass
class NumberGpu:
    """Counts of the simulated device's work."""

    card: Card
    launches: Counter[str] = field(default_factory=Counter)
    """Launches of Triton's kernels by name, including those of replayed graphs."""
    graphs: list[NumberGraph] = field(default_factory=list)
    capturing: Capturing = field(default_factory=Capturing)

    @property
    def num_replays(self) -> int:
        """Number of replays of all graphs."""
        return sum(graph.num_replays for graph in self.graphs)


@contextmanager
def number_gpu(card: str = "H100", compiled: bool = False) -> Iterator[NumberGpu]:
    """While entered, the machine has this card.

    Args:
        card: of `CARDS`.
        compiled: execute what Triton compiles for the card's capability, in place of interpreting its source.

    Raises:
        RuntimeError: there is a real GPU or no compiler, or the process has chosen otherwise (`launching`).
    """
    from wingbeat.kernels.gpu.attention.device import device_limits
    from wingbeat.runtime.engine_checks import graph_check, kernel_check

    memory, gpu = device.load(), NumberGpu(CARDS[card])
    capability = gpu.card.major * 10 + gpu.card.minor if compiled else None
    # torch caches the functions that `with torch.device(...)` redirects: fill the cache before the functions are
    # patched.
    _device_constructors()
    with pytest.MonkeyPatch.context() as patch, launching(gpu.capturing, capability) as gpu.launches:
        of_device = _of_the_host(gpu) | _of_memory(memory, gpu.card) | _of_graphs(gpu)
        for name, value in of_device.items():
            patch.setattr(torch.cuda, name, value)
        for check in (graph_check, kernel_check):
            patch.setattr(check, "LIMIT_S", PATIENCE_S)
        # Its time is that of an interpreter, which would hold every product against itself for hours.
        patch.setattr("wingbeat.runtime.fused.products.replay_ms", lambda step, graphs, repeats: 1.0)
        # Pinned memory is what CUDA may read while the host goes on: here nothing does.
        for name in ("empty", "zeros", "empty_like"):
            patch.setattr(torch, name, _unpinned(getattr(torch, name)))
        patch.setattr(torch, "tensor", _new_tensor(_unpinned(torch.tensor), gpu.capturing))
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *args: tensor.clone())
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            patch.setattr(torch._C, name, lambda *args: None, raising=False)
        device_limits.cache_clear()
        memory.gpu_limit(gpu.card.total_memory - CONTEXT_BYTES)
        try:
            yield gpu
        finally:
            device_limits.cache_clear()


def _of_the_host(gpu: NumberGpu) -> dict[str, Any]:
    """Functions of torch.cuda about the machine, and its streams and events, whose work is always done."""
    card, forbid = gpu.card, gpu.capturing.forbid
    properties = SimpleNamespace(**card._asdict())
    stream = Stream()

    class Event:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._at = 0.0

        def record(self, *args: Any) -> None:
            self._at = time.perf_counter()

        def wait(self, *args: Any) -> None:
            pass

        def query(self) -> bool:
            forbid("an event is asked for")
            return True

        def synchronize(self) -> None:
            forbid("an event is waited for")

        def elapsed_time(self, end: "Event") -> float:
            return (end._at - self._at) * 1e3

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda where: None,
        "device": lambda where: nullcontext(),
        "device_of": lambda tensor: nullcontext(),
        "get_device_name": lambda where=None: card.name,
        "get_device_capability": lambda where=None: (card.major, card.minor),
        "get_device_properties": lambda where=None: properties,
        "is_bf16_supported": lambda *args, **options: card.major >= 8,
        "synchronize": lambda where=None: forbid("the device is waited for"),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda where=None: stream,
        "stream": lambda which: nullcontext(),
    }


def _of_memory(memory: Any, card: Card) -> dict[str, Any]:
    def info(where: Any = None) -> tuple[int, int]:
        return card.total_memory - CONTEXT_BYTES - memory.gpu_allocated(), card.total_memory

    return {
        "mem_get_info": info,
        "memory_allocated": lambda where=None: memory.gpu_allocated(),
        "memory_reserved": lambda where=None: memory.gpu_allocated(),
        "max_memory_allocated": lambda where=None: memory.gpu_peak(),
        "reset_peak_memory_stats": lambda where=None: memory.gpu_forget_peak(),
        "empty_cache": lambda: None,
    }


def _of_graphs(gpu: NumberGpu) -> dict[str, Any]:
    def new_graph(*args: Any, **options: Any) -> NumberGraph:
        gpu.graphs.append(NumberGraph())
        return gpu.graphs[-1]

    return {"CUDAGraph": new_graph, "graph": gpu.capturing.capture, "graph_pool_handle": Pool}


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return made


def _new_tensor(make: Callable[..., torch.Tensor], capturing: Capturing) -> Callable[..., torch.Tensor]:
    """`torch.tensor`, which uploads where no mode looks."""

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            refuse_arrays(data)
        if device is not None and torch.device(device).type == "cuda":
            capturing.forbid("torch.tensor copies from the host")
        return make(data, device=device, **options)

    return tensor
