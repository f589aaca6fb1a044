"""Captured rounds over several ranks: each rank has a graph of its own part, and all ranks replay together.

The graphs contain the collectives, and also the transfer of a pass's inputs. Rank 0's graph computes the rows and
broadcasts their tensors; the graphs of all other ranks begin by receiving these tensors. The warm-up sends the same
messages eagerly and records the number and sizes of the tensors. Outside the graphs, rank 0 announces each step
(`GraphOrder`), so that all ranks warm up, capture and replay in the same order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import first_cause
from wingbeat.runtime.tensor_parallel.rank_messenger import GraphMessage, RankMessenger
from wingbeat.runtime.tensor_parallel.ranks import Ranks
from wingbeat.runtime.tensor_parallel.round_message import GraphOrder, RoundMessage, unpack
from wingbeat.runtime.verifier_errors import BackendLost

ResultT = TypeVar("ResultT")


class LedGraph(NamedTuple):
    """Graph of rank 0."""

    graph: Any
    number: int | None
    """Number of the corresponding graphs on the other ranks; None if the other ranks take no part."""


class LeadingGraphs:
    """`GraphDevice` of rank 0, which makes all ranks capture.

    Args:
        inner: captures rank 0's part.
    """

    def __init__(self, messenger: RankMessenger, inner: GraphDevice) -> None:
        self._messenger, self._inner = messenger, inner
        self.new_pool, self.synchronize, self.memory_bytes = inner.new_pool, inner.synchronize, inner.memory_bytes
        self._number = 0
        self._script: list[GraphMessage] = []

    def warm_up(self, function: Callable[[], ResultT]) -> ResultT:
        """See `GraphDevice.warm_up`. In each warm-up run, the other ranks execute the messages that rank 0 sends."""
        self._number += 1

        def run() -> ResultT:
            with self._messenger.learnt() as self._script:
                result = function()
            self._messenger.order("run ended", self._number)
            return result

        self._messenger.order("warm up", self._number)
        return self._inner.warm_up(run)

    def capture(self, function: Callable[[], ResultT], pool: Any) -> tuple[LedGraph, ResultT]:
        """See `GraphDevice.capture`; `function` must be the function that was warmed up last.

        Raises:
            RuntimeError: a rank cannot capture the function; the message names the rank. The class is OutOfMemoryError
                if memory is the cause.
            BackendLost: another rank is gone.
        """
        if not self._script:
            graph, result = self._inner.capture(function, pool)
            return LedGraph(graph, None), result
        self._messenger.order("capture", self._number)
        own: str | None = None
        try:
            with self._messenger.captured(self._script):
                graph, result = self._inner.capture(function, pool)
        except Exception as error:  # No message is sent during a capture, so the loss of a rank cannot be the cause.
            own = first_cause(error)
        problem = self._messenger.ranks.agree(own)
        if problem is not None:
            raise (torch.OutOfMemoryError if torch.OutOfMemoryError.__name__ in problem else RuntimeError)(problem)
        return LedGraph(graph, self._number), result

    def replay(self, graph: LedGraph) -> None:
        """Replays a graph on all ranks; see `GraphDevice.replay`.

        Raises:
            BackendLost: another rank is gone.
        """
        if graph.number is None:
            self._inner.replay(graph.graph)
            return
        with self._messenger.in_step():
            self._messenger.order("replay", graph.number)
            with self._messenger.ranks.with_others():
                self._inner.replay(graph.graph)


class FollowingGraphs:
    """Graphs of a rank other than 0.

    Args:
        run: function that executes a message.
    """

    def __init__(self, ranks: Ranks, device: GraphDevice, run: Callable[[RoundMessage], None]) -> None:
        self._ranks, self._device, self._run = ranks, device, run
        self._pool = device.new_pool()
        self._script: list[GraphMessage] = []
        self._graphs: dict[int, Any] = {}

    def obey(self, order: GraphOrder) -> None:
        """Executes a step of rank 0 on this rank's graph, at the same time as rank 0.

        Raises:
            BackendLost: rank 0 or another rank is gone.
        """
        if order.step == "warm up":
            self._device.warm_up(self._run_once)
        elif order.step == "capture":
            self._capture(order.number)
        else:
            with self._ranks.with_others():
                self._device.replay(self._graphs[order.number])

    def forget(self) -> None:
        """Releases all graphs, because the KV pool that they use is released."""
        self._graphs.clear()

    def _run_once(self) -> None:
        """Executes messages until one warm-up run of rank 0 ends."""
        self._script = []
        while True:
            form, numbers = self._ranks.hear()
            if not form:
                raise BackendLost("rank 0 has ended while a graph was warmed up")
            message = unpack(form, numbers)
            if message.order is not None:
                return
            self._script.append(GraphMessage(form, len(numbers)))
            self._run(message)

    def _capture(self, number: int) -> None:
        script, problem, graph = self._script, None, None

        def function() -> None:
            for form, num_bytes in script:
                numbers = torch.empty(num_bytes, dtype=torch.uint8, device=self._ranks.device)
                self._run(unpack(form, self._ranks.share(numbers)))

        try:
            graph, _ = self._device.capture(function, self._pool)
        except Exception as error:
            problem = first_cause(error)
            self._pool = self._device.new_pool()
        if self._ranks.agree(problem) is None:
            self._graphs[number] = graph
