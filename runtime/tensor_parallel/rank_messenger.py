"""Sends rank 0's messages to the other ranks: passes, moves in the KV pool, and steps of graphs."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from wingbeat.runtime.graphs.graph_runner import first_cause
from wingbeat.runtime.round.rows import NO_COLUMNS, ROWS_KEYWORD, Rows
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.tensor_parallel.round_message import GraphOrder, PoolShape, RoundMessage, pack
from wingbeat.runtime.verifier.layers.model_part import ModelPart
from wingbeat.runtime.verifier_errors import BackendLost


def problem_of(step: Callable[[], object]) -> str | None:
    """Runs a function; returns the cause in one line if the function raises an exception, else None."""
    try:
        step()
    except Exception as error:  # Every kind of problem is reported to the other ranks, which wait for the report.
        return first_cause(error)
    return None


class GraphMessage(NamedTuple):
    """Message in a graph: the form is fixed; the bytes change with each replay."""

    form: bytes
    num_bytes: int


class RankMessenger:
    """Sends messages in the order of the work that they announce. During a capture, only the messages' tensors are
    broadcast, by operations in the graph.

    Args:
        parts: parts of the model, by name.
    """

    def __init__(self, ranks: Ranks, parts: dict[str, ModelPart]) -> None:
        self.ranks = ranks
        self._parts = parts
        self._keys: Callable[[], Tensor | None] = lambda: None
        """Weak reference to the keys of the first layer in the KV pool."""
        self._pool: PoolShape | None = None
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._in_step = True
        self._learnt: list[GraphMessage] | None = None
        """Messages recorded for a capture during its warm-up run; None at other times."""
        self._captured: Iterator[GraphMessage] | None = None
        """Messages that the running capture still has to send; None outside a capture."""

    @contextmanager
    def a_pass(self, input_ids: Tensor, **inputs: Any) -> Iterator[None]:
        """Context manager around a pass of the model on rank 0, which announces the pass to the other ranks.

        Raises:
            BackendLost: a rank is gone, or an earlier pass failed and left the ranks in different states.
        """
        rows: Rows | None = inputs.get(ROWS_KEYWORD)
        told = tuple((name, part.tell(rows)) for name, part in self._parts.items())
        if rows is None:
            message = self._message(told)._replace(observed=input_ids)
        else:
            self._use(rows.caches)
            rows = rows._replace(caches=[], packed=None, columns=NO_COLUMNS, around=(), chunk_rows=None, into=None)
            message = self._message(told)._replace(rows=rows)
        # During a capture `in_step` is not used, because a capture executes nothing, so a failure does not leave the
        # ranks in different states.
        with self.in_step() if self._captured is None else nullcontext():
            self._say(message)
            yield

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Context manager around work that all ranks do together. If the work raises an error, all later work raises
        BackendLost.

        Raises:
            BackendLost: earlier work raised.
        """
        if not self._in_step:
            raise BackendLost("a pass of the verifier has failed, and its ranks are no longer in step")
        self._in_step = False
        yield
        self._in_step = True

    def moved(self, from_slots: Tensor, to_slots: Tensor) -> None:
        """Makes the other ranks repeat a move of KV on rank 0, either within the graph or before their next pass."""
        self._moves.append((from_slots, to_slots))
        if self._learnt is not None or self._captured is not None:
            self._say(self._message())

    def order(self, step: str, number: int) -> None:
        """Makes the other ranks execute a step of a graph."""
        told = tuple((name, part.tell(None)) for name, part in self._parts.items())
        self._say(self._message(told)._replace(order=GraphOrder(step, number)))

    def change_weight(self, step: str, name: str, value: Tensor | None) -> None:
        """Makes the other ranks take a step with their parts of a weight; see `RoundMessage.weight`."""
        self._say(self._message()._replace(weight=(step, name, value)))

    def change_memory(self, step: tuple[str, str, int | str], own: Callable[[], object]) -> str | None:
        """Makes all ranks take a step of a change of memory; returns the problem of the first rank that could not.

        Args:
            step: arguments of the hook `change_memory`, which the other ranks call.
            own: takes the step on this rank.

        Raises:
            BackendLost: a rank is gone.
        """
        with self.in_step():
            self._say(self._message()._replace(memory=step))
            return self.ranks.agree(problem_of(own))

    @contextmanager
    def learnt(self) -> Iterator[list[GraphMessage]]:
        """Context manager that appends the messages sent inside it to the yielded list."""
        self._learnt = []
        try:
            yield self._learnt
        finally:
            self._learnt = None

    @contextmanager
    def captured(self, script: list[GraphMessage]) -> Iterator[None]:
        """Context manager around a capture, which must send exactly the messages of `script`."""
        self._captured = iter(script)
        try:
            yield
        finally:
            self._captured = None

    def _message(self, told: tuple[tuple[str, Any], ...] = ()) -> RoundMessage:
        moves, self._moves = tuple(self._moves), []
        return RoundMessage(self._pool, moves, told)

    def _say(self, message: RoundMessage) -> None:
        form, numbers = pack(message)
        if self._captured is not None:
            warm = next(self._captured, None)
            if warm is None or warm.num_bytes != len(numbers):
                raise RuntimeError(f"a capture sends {len(numbers)} bytes where its warm-up sent {warm}")
            self.ranks.share(numbers)
            return
        self.ranks.tell(form, numbers)
        if self._learnt is not None:
            self._learnt.append(GraphMessage(form, len(numbers)))

    def _use(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        keys = caches[0][0]
        if self._keys() is not keys:
            self._keys = weakref.ref(keys)
            self._pool = PoolShape(1 if self._pool is None else self._pool.number + 1, *keys.shape[:2])
