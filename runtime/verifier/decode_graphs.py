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
from wingbeat.runtime.verifier.slots import SlotState

MOST_ROWS = 2048
"""Nodes of a whole batch in the largest graph."""
_NODE_BUCKETS = (4, 8, 16, 32)

RoundFunction = Callable[[Tensor, TokenTree | None, int, Choosing], AcceptedPaths]
"""(slots, trees or None for bare roots, nodes to verify per sequence, how tokens are chosen) -> what was decided."""


class RootInputs(NamedTuple):
    """Bare roots to decode."""

    slots: Tensor
    """int64 [num_reqs]"""


class TreeInputs(NamedTuple):
    """Trees to verify, as wide as they are drafted."""

    slots: Tensor
    """int64 [num_reqs]"""
    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    """float32 [num_reqs, num_nodes], as the three int64 before: fields of `TokenTree`."""
    num_valid: Tensor
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
        graph_device: captures and replays.
    """

    def __init__(
        self, function: RoundFunction, slots: SlotState, config: EngineConfig, graph_device: GraphDevice
    ) -> None:
        self.function = function
        self.slots = slots
        self.config = config
        self.pool = GraphPool(graph_device)
        self.widths = node_buckets(config)
        self._runners: dict[tuple[int, Choosing], GraphRunner] = {}
        self._batches: dict[int, tuple[int, ...]] = {}

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

    def run(self, slots: Tensor, trees: TokenTree | None, num_nodes: int, choosing: Choosing) -> AcceptedPaths:
        """One round; valid until any graph of the pool is replayed next.

        Args:
            slots: int64 [num_reqs].
            num_nodes: 1 for bare roots, else one of `widths`.
            choosing: how tokens are chosen.
        """
        inputs = RootInputs(slots) if trees is None else TreeInputs(slots, *trees)
        batches, num_reqs = self._batches.get(num_nodes, ()), len(slots)
        if not batches or num_reqs > batches[-1]:
            self.stats.count_eager_run(_stage(num_nodes))
            return self.function(slots, trees, num_nodes, choosing)
        bucket = Bucket(bucket_for(num_reqs, batches), num_nodes)
        # The inputs' memory is every bucket's: what was decided must not point into it.
        return self._runners[num_nodes, choosing].run(bucket, inputs)._replace(slots=slots)

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

    def _stage_function(self, num_nodes: int, choosing: Choosing) -> Callable[[RootInputs | TreeInputs], AcceptedPaths]:
        def stage(inputs: RootInputs | TreeInputs) -> AcceptedPaths:
            self.slots.reset_spare()
            slots, *tree = inputs
            return self.function(slots, TokenTree(*tree) if tree else None, num_nodes, choosing)

        return stage

    def _root_padding(self, num_nodes: int) -> RootInputs:
        return RootInputs(torch.full((1,), self.slots.spare, device=self.slots.device))

    def _tree_padding(self, num_nodes: int) -> TreeInputs:
        """A bare root; trees are as wide as drafted in every bucket, and cut to its width inside."""
        slots = self._root_padding(num_nodes).slots
        zeros = slots.new_zeros(1, self.config.speculation.num_nodes)
        return TreeInputs(slots, zeros, zeros, zeros, zeros.to(torch.float32), torch.ones_like(slots))


def _stage(num_nodes: int) -> Stage:
    return Stage.BASE_DECODING if num_nodes == 1 else Stage.BASE_VERIFICATION
