"""A verifier's decode rounds as CUDA graphs: which shapes are captured, and which ones a round runs in.

A round is two graphs. Its forward pass is captured once per bucket, in as many as `MOST_GRAPHS` leaves room for; the
choice of its tokens, which costs little, in a few sizes, once per way of choosing (`Choosing`). Each pads the round to
the smallest bucket that holds it; one of too many rows for any computes longer than its kernels take to launch, so it
runs eagerly, by the same functions.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.buckets import MOST_GRAPHS, batch_buckets, bucket_for, within
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import (
    Bucket,
    GraphPool,
    GraphRunner,
    GraphStats,
    Stage,
)
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.verifier.choices.choice import Choosing
from wingbeat.runtime.verifier.forward_result import ForwardBuffers, ForwardResult
from wingbeat.runtime.verifier.slots import DecodeRows, SlotState
from wingbeat.runtime.verifier.tree_check import TreeInbox

MOST_ROWS = 2048
"""Nodes of a whole batch in the largest graph."""
_NODE_BUCKETS = (4, 8, 16, 32)
_FEW_SEQS = 16
"""Most sequences whose batches leave graphs for all of these; larger engines have every second one."""
_CHOICES_APART = 16
"""Times the batch before: sizes in which tokens are chosen."""

ForwardFunction = Callable[[Tensor, TokenTree | None, int], ForwardResult]
"""(slots, trees or None for bare roots, nodes to verify per sequence) -> what the model says of them. The trees are its
own to write into."""
DecideFunction = Callable[[ForwardResult, Choosing], AcceptedPaths]
"""(a forward pass, how tokens are chosen) -> what was decided."""


class SlotInputs(NamedTuple):
    """Bare roots to decode, or whose tokens are chosen."""

    slots: Tensor
    """int64 [num_reqs]"""


class ForwardDone(NamedTuple):
    """The output of a captured forward pass; what it computed lies in `ForwardBuffers`."""

    roots: Tensor
    """int64 [num_reqs]: position of each root."""


def node_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Widths that trees are verified in, ascending: pruned ones in the smallest that pays, others as configured."""
    most = config.speculation.num_nodes
    smaller = _NODE_BUCKETS if config.speculation.adaptive else ()
    smaller = smaller if config.max_num_seqs <= _FEW_SEQS else smaller[::2]
    return (*(n for n in smaller if n < most), most)


def num_graphs(config: EngineConfig) -> int:
    """Graphs that `DecodeGraphs` captures at most."""
    return sum(len(shape.forwards) + len(Choosing) * len(shape.choices) for shape in round_shapes(config).values())


class RoundShapes(NamedTuple):
    """Batch sizes that rounds of one width are captured in, ascending."""

    forwards: tuple[int, ...]
    choices: tuple[int, ...]
    """The largest is that of `forwards`."""


def round_shapes(config: EngineConfig) -> dict[int, RoundShapes]:
    """By nodes per sequence, 1 for bare roots; widths of which one sequence has too many rows are left out."""
    sizes = batch_buckets(config.max_num_seqs)
    batches = {n: tuple(size for size in sizes if size * n <= MOST_ROWS) for n in (1, *node_buckets(config))}
    batches = {num_nodes: fitting for num_nodes, fitting in batches.items() if fitting}
    choices = {num_nodes: _choices(fitting) for num_nodes, fitting in batches.items()}
    forwards = within(MOST_GRAPHS - len(Choosing) * sum(map(len, choices.values())), batches)
    return {num_nodes: RoundShapes(forwards[num_nodes], choices[num_nodes]) for num_nodes in batches}


def _choices(batches: tuple[int, ...]) -> tuple[int, ...]:
    kept = [batches[0]]
    kept += [size for size in batches if size >= _CHOICES_APART * kept[-1]][:1]
    return tuple(dict.fromkeys((*kept, batches[-1])))


class DecodeGraphs:
    """The graphs of one model runner.

    Args:
        forward: a round's forward pass; captured and, where that fails, called as it is, as the next one is.
        decide: what it decides. Rows of the spare slot must change nothing in either.
        slots: state by slot; its device is that of all inputs.
        inbox: where captured rounds find their trees, and look at them.
        graph_device: captures and replays.
    """

    def __init__(
        self,
        forward: ForwardFunction,
        decide: DecideFunction,
        slots: SlotState,
        inbox: TreeInbox,
        config: EngineConfig,
        graph_device: GraphDevice,
    ) -> None:
        self.forward, self.decide = forward, decide
        self.slots = slots
        self.inbox = inbox
        self.config = config
        self.pool = GraphPool(graph_device)
        self.shapes = round_shapes(config)
        self._buffers = ForwardBuffers()
        self._forwards: dict[int, GraphRunner] = {}
        self._choices: dict[tuple[int, Choosing], GraphRunner] = {}
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
        self._capture([1], layers)

    def capture_trees(self, layers: AbstractContextManager | None = None) -> None:
        """Capture rounds of trees, unless they are; `layers` as in `capture_roots`."""
        self._capture([n for n in self.shapes if n > 1 and n not in self._forwards], layers)

    def run(self, rows: DecodeRows, num_nodes: int, choosing: Choosing) -> AcceptedPaths:
        """One round; valid until any graph of the pool is replayed next.

        Args:
            rows: whose trees are those of the inbox.
            num_nodes: 1 for bare roots, else one of `node_buckets`.
            choosing: how tokens are chosen.
        """
        forward = self._forwards.get(num_nodes)
        if forward is None or len(rows.slots) > self.shapes[num_nodes].forwards[-1]:
            self.stats.count_eager_run(_stage(num_nodes))
            return self.decide(self.forward(rows.slots, self._trees(rows, num_nodes), num_nodes), choosing)
        forwards, choices = self.shapes[num_nodes]
        self._replay(forward, rows, Bucket(bucket_for(len(rows.slots), forwards), num_nodes))
        choice = self._choices[num_nodes, choosing]
        accepted = self._replay(choice, rows, Bucket(bucket_for(len(rows.slots), choices), num_nodes))
        # The inputs' memory is every bucket's: what was decided must not point into it.
        return accepted._replace(slots=rows.slots)

    def _replay(self, runner: GraphRunner, rows: DecodeRows, bucket: Bucket) -> tuple:
        before, self._loaded[runner] = self._loaded.get(runner), (rows, bucket)
        if before is not None and before[0] is rows and before[1] == bucket:  # a batch mostly stays as it is
            return runner.replay(bucket, len(rows.slots))
        return runner.run(bucket, rows if isinstance(runner.inputs(bucket), DecodeRows) else SlotInputs(rows.slots))

    def _trees(self, rows: DecodeRows | SlotInputs, num_nodes: int) -> TokenTree | None:
        return None if num_nodes == 1 else self.inbox.checked(rows)

    def _capture(self, widths: list[int], layers: AbstractContextManager | None) -> None:
        if not widths:
            return
        nobody = {n: self._slot_padding(n) if n == 1 else self._tree_padding(n) for n in widths}
        self._buffers.reserve(
            [self._compute(nobody[n], n) for n in widths], [self.shapes[n].forwards[-1] for n in widths]
        )
        for n in widths:
            padding = self._slot_padding if n == 1 else self._tree_padding
            forwards = [Bucket(size, n) for size in self.shapes[n].forwards]
            self._forwards[n] = GraphRunner(_stage(n), self._forward_stage(n), padding, forwards, self.pool)
            choices = [Bucket(size, n) for size in self.shapes[n].choices]
            for how in Choosing:
                function = self._choice_stage(n, how)
                self._choices[n, how] = GraphRunner(Stage.BASE_CHOICE, function, self._slot_padding, choices, self.pool)
        runners = [self._forwards[n] for n in widths] + [self._choices[n, how] for n in widths for how in Choosing]
        with layers or nullcontext():
            self.pool.capture(*runners)

    @torch.inference_mode()
    def _compute(self, inputs: SlotInputs | DecodeRows, num_nodes: int) -> ForwardResult:
        self.slots.reset_spare()
        return self.forward(inputs.slots, self._trees(inputs, num_nodes), num_nodes)

    def _forward_stage(self, num_nodes: int) -> Callable[[SlotInputs | DecodeRows], ForwardDone]:
        def stage(inputs: SlotInputs | DecodeRows) -> ForwardDone:
            result = self._compute(inputs, num_nodes)
            self._buffers.put(result)
            return ForwardDone(result.decodes.roots)

        return stage

    def _choice_stage(self, num_nodes: int, choosing: Choosing) -> Callable[[SlotInputs], AcceptedPaths]:
        def stage(inputs: SlotInputs) -> AcceptedPaths:
            return self.decide(self._buffers.take(inputs.slots, num_nodes), choosing)

        return stage

    def _slot_padding(self, num_nodes: int) -> SlotInputs:
        return SlotInputs(torch.full((1,), self.slots.spare, device=self.slots.device))

    def _tree_padding(self, num_nodes: int) -> DecodeRows:
        """Nobody, for whom no tree counts."""
        slots = self._slot_padding(num_nodes).slots
        return DecodeRows(slots, torch.zeros_like(slots, dtype=torch.bool))


def _stage(num_nodes: int) -> Stage:
    return Stage.BASE_DECODING if num_nodes == 1 else Stage.BASE_VERIFICATION
