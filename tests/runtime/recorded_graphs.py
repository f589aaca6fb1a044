"""Stand-ins for CUDA graphs on the CPU: one replays the recorded operations, one calls the function again."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2"})


class Call(NamedTuple):
    """A recorded operation."""

    function: Callable
    args: tuple
    kwargs: dict
    results: list[Tensor]
    """Results in memory of their own, which a replay writes."""


class Recorder(TorchDispatchMode):
    """Notes every operation; refuses those whose result the host would have to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        if name in WAITS or any(index is not None and index.dtype == torch.bool for index in indices):
            raise RuntimeError(f"{name} is not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        fresh = [tensor for tensor in _tensors(result) if _memory(tensor) not in given]
        self.calls.append(Call(function, args, kwargs or {}, fresh))
        return result


class RecordingDevice:
    """Replays what a CUDA graph would: the same operations on the same memory, and whatever the host said back then."""

    recorder = Recorder

    def __init__(self) -> None:
        self.num_captures = 0

    def new_pool(self) -> int:
        return 0

    def warm_up(self, function):
        return function()

    def capture(self, function, pool) -> tuple[list[Call], Any]:
        with self.recorder() as recorder:
            result = function()
        self.num_captures += 1
        return recorder.calls, result

    def replay(self, graph: list[Call]) -> None:
        for call in graph:
            again = call.function(*call.args, **call.kwargs)
            if call.results:
                given = {_memory(tensor) for tensor in _tensors((call.args, call.kwargs))}
                fresh = [tensor for tensor in _tensors(again) if _memory(tensor) not in given]
                for old, new in zip(call.results, fresh, strict=True):
                    old.copy_(new)

    def synchronize(self) -> None:
        pass

    def memory_bytes(self) -> int:
        return 0


class RepeatingDevice(RecordingDevice):
    """Captures by remembering the function: for what waits on the CPU alone, such as sampling."""

    def capture(self, function, pool) -> tuple[Any, Any]:
        self.num_captures += 1
        result = function()
        return (function, result), result

    def replay(self, graph) -> None:
        function, outputs = graph
        for old, new in zip(outputs, function(), strict=True):
            if old is not None:
                old.copy_(new)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
