"""A verifier's rounds without prompt chunks as CUDA graphs: which shapes are captured, and which one a round runs in.

Each bucket is captured once per way of choosing tokens (`Choosing`). A round is padded to the
smallest bucket that holds it; one of too many rows for any bucket computes longer than its kernels take to launch, so
it runs eagerly, by the same function.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import (
    Bucket,
    GraphPool,
    GraphRunner,
    GraphStats,
    Stage,
    batch_buckets,
    bucket_for,
)
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.verifier.choice import Choosing
from wingbeat.runtime.verifier.slots import DecodeRows, SlotState
from wingbeat.runtime.verifier.tree_inbox import TreeInbox

MOST_ROWS = 2048
"""Nodes of a whole batch in the largest graph."""
_NODE_BUCKETS = (4, 8, 16, 32)

RoundFunction = Callable[[Tensor, TokenTree | None, int, Choosing], AcceptedPaths]
"""(slots, trees or None for bare roots, nodes to verify per sequence, how tokens are chosen) -> what was decided.
The trees are its own to write into."""


class RootInputs(NamedTuple):
    """Bare roots to decode."""

    slots: Tensor
    """int64 [num_reqs]"""


def node_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Widths that trees are verified in, ascending: pruned ones in the smallest that pays, others as configured."""
    most = config.speculation.num_nodes
    smaller = _NODE_BUCKETS if config.speculation.adaptive else ()
    return (*(n for n in smaller if n < most), most)


def num_graphs(config: EngineConfig) -> int:
    """Graphs that `DecodeGraphs` captures at most."""
    return len(Choosing) * sum(len(_batches(config, num_nodes)) for num_nodes in (1, *node_buckets(config)))


def _batches(config: EngineConfig, num_nodes: int) -> tuple[int, ...]:
    return tuple(n for n in batch_buckets(config.max_num_seqs) if n * num_nodes <= MOST_ROWS)


class DecodeGraphs:
    """The graphs of one model runner.

    Args:
        function: the whole round on the device; captured and, where that fails, called as it is. Rows of the spare
            slot must change nothing.
        slots: state by slot; its device is that of all inputs.
        inbox: where captured rounds find their trees, and look at them.
        graph_device: captures and replays.
    """

    def __init__(
        self,
        function: RoundFunction,
        slots: SlotState,
        inbox: TreeInbox,
        config: EngineConfig,
        graph_device: GraphDevice,
    ) -> None:
        self.function = function
        self.slots = slots
        self.inbox = inbox
        self.config = config
        self.pool = GraphPool(graph_device)
        self.widths = node_buckets(config)
        self._runners: dict[tuple[int, Choosing], GraphRunner] = {}
        self._batches: dict[int, tuple[int, ...]] = {}
        self._loaded: dict[GraphRunner, tuple[DecodeRows, Bucket]] = {}
        """Which rows the inputs of a runner are."""

    @property
    def stats(self) -> GraphStats:
        """What was captured and how often it ran."""
        return self.pool.stats

    def capture_roots(self, layers: AbstractContextManager | None = None) -> None:
        """Capture rounds of bare roots.

        Args:
            layers: entered meanwhile; see `wingbeat.runtime.verifier.compiled.faster_layers`.
        """
        self._capture((1,), layers)

    def capture_trees(self, layers: AbstractContextManager | None = None) -> None:
        """Capture rounds of trees, unless they are; `layers` as in `capture_roots`."""
        if self.widths[-1] not in self._batches:
            self._capture(self.widths, layers)

    def run(self, rows: DecodeRows, num_nodes: int, choosing: Choosing) -> AcceptedPaths:
        """One round; valid until any graph of the pool is replayed next.

        Args:
            rows: whose trees are those of the inbox.
            num_nodes: 1 for bare roots, else one of `widths`.
            choosing: how tokens are chosen.
        """
        batches, num_reqs = self._batches.get(num_nodes, ()), len(rows.slots)
        if not batches or num_reqs > batches[-1]:
            self.stats.count_eager_run(_stage(num_nodes))
            return self.function(rows.slots, self._trees(rows, num_nodes), num_nodes, choosing)
        bucket, runner = Bucket(bucket_for(num_reqs, batches), num_nodes), self._runners[num_nodes, choosing]
        before, self._loaded[runner] = self._loaded.get(runner), (rows, bucket)
        if before is not None and before[0] is rows and before[1] == bucket:  # a batch mostly stays as it is
            accepted = runner.replay(bucket, num_reqs)
        else:
            accepted = runner.run(bucket, RootInputs(rows.slots) if num_nodes == 1 else rows)
        # The inputs' memory is every bucket's: what was decided must not point into it.
        return accepted._replace(slots=rows.slots)

    def _trees(self, rows: DecodeRows, num_nodes: int) -> TokenTree | None:
        return None if num_nodes == 1 else self.inbox.checked(rows)

    def _capture(self, widths: tuple[int, ...], layers: AbstractContextManager | None) -> None:
        runners = []
        for num_nodes in widths:
            batches = _batches(self.config, num_nodes)
            self._batches[num_nodes] = batches
            for choosing in Choosing if batches else ():
                runner = GraphRunner(
                    _stage(num_nodes),
                    self._stage_function(num_nodes, choosing),
                    self._root_padding if num_nodes == 1 else self._tree_padding,
                    [Bucket(n, num_nodes) for n in batches],
                    self.pool,
                )
                self._runners[num_nodes, choosing] = runner
                runners.append(runner)
        with layers or nullcontext():
            self.pool.capture(*runners)

    def _stage_function(self, num_nodes: int, choosing: Choosing) -> Callable[[RootInputs | DecodeRows], AcceptedPaths]:
        def stage(inputs: RootInputs | DecodeRows) -> AcceptedPaths:
            self.slots.reset_spare()
            return self.function(inputs.slots, self._trees(inputs, num_nodes), num_nodes, choosing)

        return stage

    def _root_padding(self, num_nodes: int) -> RootInputs:
        return RootInputs(torch.full((1,), self.slots.spare, device=self.slots.device))

    def _tree_padding(self, num_nodes: int) -> DecodeRows:
        """Nobody, for whom no tree counts."""
        slots = self._root_padding(num_nodes).slots
        return DecodeRows(slots, torch.zeros_like(slots, dtype=torch.bool))


def _stage(num_nodes: int) -> Stage:
    return Stage.BASE_DECODING if num_nodes == 1 else Stage.BASE_VERIFICATION
