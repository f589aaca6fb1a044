"""Transfers tensors of an open update, which are read from files, from shared memory or from a trainer's broadcasts.
Before a broadcast the trainer announces the tensors in vLLM's format.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wingbeat.deployments.parts import first_result
from wingbeat.deployments.rollouts.wire import Finished, OperationResult
from wingbeat.runtime.rollouts.broadcasts import Broadcasts
from wingbeat.runtime.rollouts.served_weights import WeightsRefused, shown
from wingbeat.runtime.rollouts.update import WeightUpdate, WrongOrder, read_checkpoint, read_files

DTYPES = {shown(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
PACKED_BYTES = 1 << 30
"""Default of vLLM's `packed_buffer_size_bytes`, in bytes."""
PIECE_BYTES = 1 << 28
"""Bytes of tensors that make up one piece. All tensors of a piece are received before any of them is written. If one
tensor cannot be used, no tensor of its piece is written.
"""
_FIELDS = {"names", "dtype_names", "shapes", "packed", "packed_buffer_size_bytes", "packed_num_buffers"}


def announced_tensors(info: Mapping[str, Any]) -> list[tuple[str, list[int], torch.dtype]]:
    """Return name, shape and dtype of each tensor that a broadcast's `update_info` (vLLM) announces.

    Raises:
        WeightsRefused: a field is wrong or unsupported. CUDA IPC handles, for example, are refused because they are
            pickles.
    """
    if others := sorted(info.keys() - _FIELDS):
        raise WeightsRefused(f"update_info.{others[0]} is not supported: give files, or names, dtype_names and shapes")
    columns = [info.get(name) for name in ("names", "dtype_names", "shapes")]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        raise WeightsRefused("update_info must have names, dtype_names and shapes, lists of one length")
    size = info.get("packed_buffer_size_bytes", PACKED_BYTES)
    if not isinstance(size, int) or size < 1:
        raise WeightsRefused("update_info.packed_buffer_size_bytes must be a whole number above 0")
    announced, seen = [], set()
    for name, dtype, shape in zip(*columns, strict=True):
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
            raise WeightsRefused(f"update_info: {name} is {dtype}: dtype_names must be of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise WeightsRefused(f"update_info: the shape of {name} must be a list of whole numbers")
        if name in seen:
            raise WeightsRefused(f"update_info: {name} is announced twice")
        seen.add(name)
        announced.append((name, shape, DTYPES[dtype]))
    return announced


if TYPE_CHECKING:
    from wingbeat.runtime.rollouts.head_update import HeadUpdate

logger = logging.getLogger(__name__)
_READ = {"files", "checkpoint"}
"""Fields of `update_info` that name files to read."""


class WeightTransfer:
    """Writes tensors to the open update of the weights or of the draft head.

    Args:
        update: updates of the weights.
        answered: calls a method with arguments; returns its result or its refusal as an `OperationResult`.
        backend: backend of `torch.distributed` by which trainers send tensors; with None, tensors are read only from
            files.
        head_update: creates updates of the draft head; raises WeightsRefused if there is no head.
        checkpoint: folder that the weights were loaded from, for reloads; with None, reloads are refused.
    """

    def __init__(
        self,
        update: WeightUpdate,
        device: torch.device,
        answered: Callable[..., Any],
        backend: str | None = None,
        head_update: "Callable[[], HeadUpdate] | None" = None,
        checkpoint: Path | None = None,
    ) -> None:
        self._update, self._device, self._answered = update, device, answered
        self._backend, self._head_update, self._checkpoint = backend, head_update, checkpoint
        self._broadcasts: Broadcasts | None = None
        self._head: HeadUpdate | None = None
        """Open update of the draft head; None if no such update is open."""
        self._writing: Future[OperationResult] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="wingbeat-weights")
        """Thread for operations that may wait for a trainer, so that the engine's thread can answer calls meanwhile."""

    @property
    def is_open(self) -> bool:
        """Whether an update of the weights or of the draft head is open."""
        return self._update.is_open or self._head is not None

    def opened(self) -> "HeadUpdate | WeightUpdate":
        """Return the open update.

        Raises:
            WrongOrder: no update is open.
        """
        if not self.is_open:
            raise WrongOrder("no weight update has started")
        return self._head or self._update

    def check_closed(self) -> None:
        """Raise WrongOrder while an update is open."""
        if self.is_open:
            raise WrongOrder("a weight update is under way: finish it, or abort it")

    def check_settled(self) -> None:
        """Raise WrongOrder while tensors are arriving."""
        if self._writing is not None and not self._writing.done():
            raise WrongOrder("tensors of a weight update are on their way")

    def join(self, info: dict[str, Any], index: int) -> "Future[OperationResult] | None":
        """See `RolloutEngine.init_transfer`."""
        self.check_settled()
        if self._backend is None:
            if "master_address" in info:
                raise WeightsRefused("init_info.master_address is given: weight_transfer_config has no such backend")
            self.end()
            return None
        fields = {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int}
        for name, kind in fields.items():
            if not isinstance(info.get(name), kind):
                raise WeightsRefused(f"init_info.{name} must be {'text' if kind is str else 'a whole number'}")
        rank = info["rank_offset"] + index
        if not 0 < rank < info["world_size"]:
            raise WeightsRefused(f"init_info.world_size is {info['world_size']}: engine {index} has rank {rank}")
        self.end()
        return self._submit(self._join, info, rank)

    def start_head(self) -> None:
        """See `RolloutEngine.start_head_update`."""
        self.check_closed()
        if self._head_update is None:
            raise WeightsRefused("drafter has no head to update")
        self._head = self._head_update()

    def write(self, info: dict[str, Any]) -> "Future[OperationResult]":
        """See `RolloutEngine.update_weights`."""
        self.check_settled()
        return self._submit(self._write, info)

    def finish_head(self) -> "Future[OperationResult] | None":
        """Serve the updated draft head; returns None if no update of the head is open.

        Raises:
            WrongOrder: tensors are still arriving.
        """
        self.check_settled()
        if self._head is None:
            return None
        head, self._head = self._head, None
        return self._submit(lambda: Finished(head.finish(), of_head=True))

    def num_written(self) -> Finished:
        """See `RolloutEngine.num_written`."""
        self.check_settled()
        return Finished((self._head or self._update).num_written, self._head is not None)

    def end(self) -> None:
        """End the open update before it is finished; see `RolloutEngine.abandon_update`."""
        self._head = None
        if self._update.is_open:
            self._update.abandon()
            logger.warning("A weight update has ended without being finished; %d tensors torn", len(self._update.torn))

    def _submit(self, operation: Callable[..., Any], *arguments: Any) -> "Future[OperationResult]":
        self._writing = self._worker.submit(self._answered, operation, *arguments)
        return self._writing

    def _join(self, info: dict[str, Any], rank: int) -> None:
        address = info["master_address"], info["master_port"]
        self._broadcasts = Broadcasts(self._backend, *address, rank, info["world_size"], self._device)

    def _write(self, info: dict[str, Any]) -> None:
        target = self.opened()
        shared = first_result("shared_tensors", info, self._device, self._check_tensor)
        try:
            if shared is not None:
                with shared as tensors:
                    target.write(tensors.items)
                return
            pieces = iter([self._files(info)] if _READ & info.keys() else self._broadcast(info))
            try:
                for read in pieces:
                    target.write(read)
            except WeightsRefused:
                # the remaining tensors are received and dropped, because the trainer sends them in any case
                for _ in pieces:
                    pass
                raise
        except ConnectionError as error:
            self.end()
            raise WrongOrder(str(error)) from None

    def _check_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """See `ServedWeights.check`; for tensors of the open update."""
        (self._head or self._update.weights).check(name, shape, dtype)

    def _files(self, info: dict[str, Any]) -> "Callable[[], Iterator[tuple[str, Tensor]]]":
        first, *others = sorted(_READ & info.keys(), reverse=True) + sorted(info.keys() - _READ)
        if others:
            raise WeightsRefused(f"update_info.{others[0]} is given with {first}: leave one out")
        if first == "checkpoint":
            if info["checkpoint"] is not True:
                raise WeightsRefused("update_info.checkpoint must be true")
            if self._checkpoint is None:
                raise WeightsRefused("update_info.checkpoint cannot be read: the weights come from no folder")
            return partial(read_checkpoint, self._checkpoint, self._update.weights)
        paths = info["files"]
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise WeightsRefused("update_info.files must be a list of paths")
        return partial(read_files, paths)

    def _broadcast(self, info: dict[str, Any]) -> "Iterator[Callable[[], list[tuple[str, Tensor]]]]":
        """Check that the names, shapes and dtypes of all announced tensors match the weights, then receive the
        broadcast tensors and yield them in pieces. Each piece but the last has more than `PIECE_BYTES` bytes.
        """
        if self._broadcasts is None:
            raise WrongOrder("no weight transfer engine was initialised, which a trainer's broadcasts need")
        announced = announced_tensors(info)
        for name, shape, dtype in announced:
            self._check_tensor(name, tuple(shape), dtype)
        packed_bytes = info.get("packed_buffer_size_bytes", PACKED_BYTES) if info.get("packed") else None
        piece, size = [], 0
        for pair in self._broadcasts.receive_all(announced, packed_bytes):
            piece.append(pair)
            size += pair[1].nbytes
            if size > PIECE_BYTES:
                yield piece.copy
                piece, size = [], 0
        if piece or not announced:
            yield piece.copy
