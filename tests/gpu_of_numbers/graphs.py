"""CUDA graphs as recordings: every call of a capture, made again on the same memory when the graph is replayed.

Faults that a real graph hides are errors here or ruin numbers: memory that is freed before the replay, work of the host
in a capture, and outputs that are read after another graph, which may use their memory, has run.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.gpu_of_numbers.device import borrowed, poison

_WAITS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"})
_SHAPES_BY_VALUE = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "bincount"})
_COPIES = frozenset({"copy_", "_to_copy", "to", "_foreach_copy_"})
BEFORE_REPLAY: list[Callable[["NumberGraph"], None]] = []
"""Called before each replay; they raise if the graph's memory cannot be used."""


class CaptureError(RuntimeError):
    """A capture holds what a graph cannot."""


class StaleAddressError(RuntimeError):
    """A graph is replayed whose memory has been given back."""


class Outside(NamedTuple):
    """Memory that was there before a capture."""

    storage: StorageWeakRef
    user: str
    """Name of an operation that uses it."""
    address: int


class Call(NamedTuple):
    """A recorded call."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    results: list[Tensor]
    """In memory of their own: what a replay writes."""


class Recorder(TorchDispatchMode):
    """Notes what is called on the device while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.spoiled: str | None = None
        """Description of an operation that a capture forbids, if there was any."""
        self.outside: dict[int, Outside] = {}
        """Memory that was there before the capture, by its identity."""
        self._own: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        given = list(tensors_in((args, kwargs)))
        if any(tensor.is_cuda for tensor in given):
            self._check(name, args)
        result = function(*args, **kwargs)
        made = list(tensors_in(result))
        if not any(tensor.is_cuda for tensor in [*given, *made]):
            return result
        self._check_devices(name, given, made)
        known = {identity(tensor) for tensor in given}
        fresh = [tensor for tensor in made if identity(tensor) not in known]
        self._own.update(map(identity, fresh))
        if fresh or function._schema.is_mutable:
            self.note(function, args, kwargs, fresh, name)
        return result

    def note(self, function: Callable, args: tuple, kwargs: dict[str, Any], fresh: list[Tensor], name: str) -> None:
        """Record a call. Tensors that existed before the capture are kept by address only."""

        def as_captured(tensor: Tensor) -> Tensor:
            if not tensor.is_cuda or identity(tensor) in self._own:
                return tensor
            storage = tensor.untyped_storage()
            self.outside.setdefault(identity(tensor), Outside(StorageWeakRef(storage), name, storage.data_ptr()))
            return borrowed(tensor)

        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, as_captured, (args, kwargs))
        self.calls.append(Call(function, args, kwargs, fresh))

    def forbid(self, what: str) -> None:
        """Spoil the capture.

        Raises:
            CaptureError: always.
        """
        self.spoiled = f"{what}: operation not permitted when stream is capturing"
        raise CaptureError(self.spoiled)

    def _check(self, name: str, args: tuple) -> None:
        indexed = name.lstrip("_").startswith("index") and isinstance(args[1], list | tuple)
        by_mask = indexed and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in _WAITS or name in _SHAPES_BY_VALUE or by_mask:
            self.forbid(f"{name} asks the device for a value")

    def _check_devices(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        if any(not tensor.is_cuda for tensor in made):
            self.forbid(f"{name} copies to the host")
        if any(not tensor.is_cuda and (tensor.dim() > 0 or name in _COPIES) for tensor in given):
            self.forbid(f"{name} copies from the host")


class Pool:
    """Graphs that share memory, in the order of their captures."""

    def __init__(self) -> None:
        self.graphs: list[NumberGraph] = []


class NumberGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.calls: list[Call] = []
        self.outside: list[Outside] = []
        self.num_replays = 0
        self._ruined = False

    def keep(self, recorder: Recorder, pool: Pool | None) -> None:
        """Be the graph of what was recorded."""
        self.calls, self.outside = recorder.calls, list(recorder.outside.values())
        self.pool = pool or Pool()
        self.pool.graphs.append(self)

    def replay(self) -> None:
        """Make all calls again.

        Raises:
            StaleAddressError: memory that it reads or writes is not there any more.
        """
        if self.pool is None:
            raise RuntimeError("replay before the graph is captured")
        gone = next((one.user for one in self.outside if one.storage.expired()), None)
        if gone is not None:
            raise StaleAddressError(f"{gone} is given memory that has been freed since the capture")
        for check in BEFORE_REPLAY:
            check(self)
        self._ruin_later_ones()
        # Whatever mode the host is in: a graph knows of none.
        with _disable_current_modes(), torch.inference_mode():
            for index, call in enumerate(self.calls):
                try:
                    again = call.function(*call.args, **call.kwargs)
                except Exception as error:
                    error.add_note(f"call {index} of {len(self.calls)} of a graph: {call.function}")
                    raise
                if call.results:
                    self._take(call, again)
        self._ruined = False
        self.num_replays += 1

    @staticmethod
    def _take(call: Call, again: Any) -> None:
        known = {identity(tensor) for tensor in tensors_in((call.args, call.kwargs))}
        fresh = [tensor for tensor in tensors_in(again) if identity(tensor) not in known]
        for old, new in zip(call.results, fresh, strict=True):
            old.copy_(new)

    def _ruin_later_ones(self) -> None:
        """A later capture may lie where this one keeps what it computes on the way; what an earlier one has returned
        was still held when this one was captured."""
        graphs = self.pool.graphs
        for other in graphs[graphs.index(self) + 1 :]:
            if not other._ruined:
                for tensor in (result for call in other.calls for result in call.results):
                    poison(tensor)
                other._ruined = True


class Capturing:
    """The capture that goes on, if any: `capture` stands for `torch.cuda.graph`."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def forbid(self, what: str) -> None:
        """An error in a capture, and nothing otherwise."""
        if self.recorder is not None:
            self.recorder.forbid(what)

    def capture(self, graph: NumberGraph, pool: Pool | None = None, **options: Any) -> "_Capture":
        """The context in which calls are recorded."""
        return _Capture(self, graph, pool)


class _Capture:
    def __init__(self, capturing: Capturing, graph: NumberGraph, pool: Pool | None) -> None:
        self._capturing, self._graph, self._pool = capturing, graph, pool

    def __enter__(self) -> None:
        if self._capturing.recorder is not None:
            raise RuntimeError("a capture is underway")
        self._recorder = self._capturing.recorder = Recorder()
        self._recorder.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recorder.__exit__(*error)
        self._capturing.recorder = None
        if self._recorder.spoiled is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        if error[0] is None:
            self._graph.keep(self._recorder, self._pool)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors among arguments or results."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def identity(tensor: Tensor) -> int:
    """Key that tensors in a storage share."""
    return tensor.untyped_storage()._cdata
