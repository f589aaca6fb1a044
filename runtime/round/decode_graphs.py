"""CUDA graphs of a verifier's rounds with decodes.

A round replays two graphs: the forward pass, captured once per bucket, and the choice of tokens, which is cheap and
therefore captured in only a few batch sizes for each `Choosing`. `round_shapes` lists the buckets. A round is padded to
the smallest bucket that holds it. A round with more rows than the largest bucket runs eagerly through the same
functions, which costs little because computing so many rows takes longer than launching the kernels.

A mixed round, with decodes and prompt chunks, is also a single forward pass, so that the weights are read once. Runtime
parts may capture mixed rounds and rounds that only compute prompts (hook `prompt_graphs`). A mixed round that fits no
graph runs its forward pass eagerly, and still replays a graph for its choice of tokens.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.buckets import bucket_for
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import (
    Bucket,
    GraphPool,
    GraphRunner,
    GraphStats,
    Stage,
)
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.buffers import ForwardBuffers, ForwardResult
from wingbeat.runtime.round.choice import Choosing
from wingbeat.runtime.round.eager_rounds import EagerRounds, rooted
from wingbeat.runtime.round.fixed_round import FixedRound
from wingbeat.runtime.round.rows import ModelOutput
from wingbeat.runtime.round.shapes import round_shapes, variants
from wingbeat.runtime.round.slots import DecodeRows, SlotState
from wingbeat.runtime.round.tree_check import TreeInbox
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput


class GraphPass(NamedTuple):
    """Forward pass whose tokens `DecodeGraphs.decide` chooses next."""

    rows: DecodeRows
    """Decodes of the pass, whose trees are in the inbox."""
    num_nodes: int
    result: ForwardResult | None
    """Result of an eager pass; None if a graph left the result in `ForwardBuffers`."""
    chunks: ModelOutput | None
    """Output for prompt chunks as in `ForwardResult.chunks`, but without padding."""
    forward_s: float


class SlotInputs(NamedTuple):
    """Inputs of a captured pass over bare roots, or of a captured choice of tokens."""

    slots: Tensor
    """int64 [num_reqs]"""


class ForwardDone(NamedTuple):
    """Output of a captured forward pass; its results are in `ForwardBuffers`."""

    roots: Tensor
    """int64 [num_reqs]: position of each root."""


class DecodeGraphs:
    """CUDA graphs of one model runner.

    Args:
        fixed: functions that are captured; they are called directly if no graph holds the round.
        eager: runs rounds with prompt chunks that no graph holds.
        slots: state by slot; all inputs are on the same device as this state.
        inbox: holds the trees of captured rounds and checks them.
        last_position: last position that the model supports.
        graph_device: captures and replays graphs.
    """

    def __init__(
        self,
        fixed: FixedRound,
        eager: EagerRounds,
        slots: SlotState,
        inbox: TreeInbox,
        config: EngineConfig,
        last_position: int,
        graph_device: GraphDevice,
    ) -> None:
        self.fixed, self.eager = fixed, eager
        self.slots = slots
        self.inbox = inbox
        self.config = config
        self.pool = GraphPool(graph_device)
        self.shapes, shapes = round_shapes(config)
        optional = any(feature.can_be_absent for feature in fixed.builder.features)
        self.variants = variants(config) if optional else (False,)
        self._has_lean = True in self.variants
        self.buffers = ForwardBuffers()
        self.prompts: Any = None if shapes is None else first_result("prompt_graphs", self, shapes, last_position)
        """Graphs of rounds with prompt chunks; None if no part captures them."""
        self._forwards: dict[tuple[int, bool], GraphRunner] = {}
        """Graphs of forward passes by number of nodes, and by whether they are lean."""
        self._choices: dict[tuple[int, Choosing], GraphRunner] = {}
        self._loaded: dict[GraphRunner, tuple[DecodeRows, Bucket]] = {}
        """Rows and bucket that are currently in the inputs of each runner."""
        for feature in fixed.builder.features:
            feature.reserve(max(num_nodes * shape.forwards[-1] for num_nodes, shape in self.shapes.items()))

    @property
    def without_decodes(self) -> Any:
        """Executor of rounds without decodes, with the methods of `EagerRounds`."""
        return self.eager if self.prompts is None else self.prompts

    @property
    def stats(self) -> GraphStats:
        """Numbers of captured graphs and of their replays."""
        return self.pool.stats

    def capture_roots(self) -> None:
        """Captures rounds of bare roots, and rounds without decodes."""
        self._capture([1])

    def capture_trees(self) -> None:
        """Captures rounds of trees for each width that is not captured yet."""
        self._capture([n for n in self.shapes if n > 1 and (n, False) not in self._forwards])

    def is_lean(self, plan: SchedulerOutput) -> bool:
        """Whether the lean graphs hold a round, see `BatchBuilder.is_lean`."""
        return self._has_lean and self.fixed.builder.is_lean(plan)

    def forward(
        self,
        plan: SchedulerOutput,
        rows: DecodeRows,
        trees: TokenTree | TreeInbox | None,
        num_nodes: int,
        masks: "Future[list[int]] | None" = None,
    ) -> GraphPass:
        """Runs a forward pass with at least one decode, as `EagerRounds.forward` does.

        The result is valid until any graph of the pool is replayed.

        Args:
            trees: trees that are already checked; or the inbox itself, if the graphs are to check the inbox's trees.
            num_nodes: nodes of each tree, one of `node_buckets`.
        """
        started = time.perf_counter()
        if not isinstance(trees, TreeInbox):
            trees = rooted(trees, masks)
            num_nodes = 1 if trees is None else num_nodes
            rows = rows if trees is None else self.inbox.put(rows.slots, trees)
        forward = self._forward_mixed if plan.chunks else self._forward
        done = forward(plan, rows, num_nodes)
        return done._replace(forward_s=time.perf_counter() - started)

    def with_roots(self, done: GraphPass, late: list[int]) -> GraphPass:
        """See `EagerRounds.with_roots`."""
        if late and done.result is not None:
            self.eager.with_roots(done.result, late)
        elif late:
            self.buffers.keep_roots(done.num_nodes, upload(late, self.slots.device))
        return done

    def decide(self, plan: SchedulerOutput, done: GraphPass) -> AcceptedPaths:
        """See `EagerRounds.decide`. If any request asks for log-probabilities, they are computed for all decodes."""
        choosing = Choosing.of([seq.request.params for seq in plan.decodes])
        if done.result is not None:
            accepted = self.fixed.decide(done.result, choosing)
        else:
            sizes = self.shapes[done.num_nodes].choices
            bucket = Bucket(bucket_for(len(done.rows.slots), sizes), done.num_nodes)
            accepted = self.replay(self._choices[done.num_nodes, choosing], done.rows, bucket)
            # All buckets share the inputs' memory, so the result must not refer to that memory.
            accepted = accepted._replace(slots=done.rows.slots)
        # `packed` holds only results of decodes, so a round with chunks downloads its tensors one by one.
        return accepted._replace(packed=None) if plan.chunks else accepted

    def _forward(self, plan: SchedulerOutput, rows: DecodeRows, num_nodes: int) -> GraphPass:
        """Runs a forward pass over decodes alone."""
        result, lean = None, self._has_lean and self.is_lean(plan)
        if self._holds(rows, num_nodes):
            sizes = self.shapes[num_nodes].forwards
            self.replay(self._forwards[num_nodes, lean], rows, Bucket(bucket_for(len(rows.slots), sizes), num_nodes))
        else:
            self.stats.count_eager_run(_stage(num_nodes))
            result = self.fixed.forward(rows.slots, self.trees(rows, num_nodes), num_nodes, lean=lean)
        return GraphPass(rows, num_nodes, result, None, 0.0)

    def _forward_mixed(self, plan: SchedulerOutput, rows: DecodeRows, num_nodes: int) -> GraphPass:
        """Runs a forward pass over decodes and prompt chunks."""
        captured = self._holds(rows, num_nodes)
        if captured and self.prompts is not None:
            chunks = self.prompts.replay_mixed(plan, rows, num_nodes)
            if chunks is not None:
                return GraphPass(rows, num_nodes, None, chunks, 0.0)
        self.stats.count_eager_run(Stage.BASE_MIXED)
        result = self.eager.forward(plan, rows, self.trees(rows, num_nodes), num_nodes)
        if captured:
            self.buffers.put(result)
        return GraphPass(rows, num_nodes, None if captured else result, result.chunks, 0.0)

    def _holds(self, rows: DecodeRows, num_nodes: int) -> bool:
        """Whether a graph was captured for trees of `num_nodes` nodes and for at least as many decodes."""
        return (num_nodes, False) in self._forwards and len(rows.slots) <= self.shapes[num_nodes].forwards[-1]

    def replay(self, runner: GraphRunner, rows: DecodeRows, bucket: Bucket) -> tuple:
        """Replays a bucket for a round's decodes; the outputs are valid until any graph of the pool is replayed."""
        # removed before the replay, because the inputs' content is undefined if the replay raises
        before = self._loaded.pop(runner, None)
        if before is not None and before[0] is rows and before[1] == bucket:  # the batch seldom changes between rounds
            output = runner.replay(bucket, len(rows.slots))
        else:
            inputs = rows if isinstance(runner.inputs(bucket), DecodeRows) else SlotInputs(rows.slots)
            output = runner.run(bucket, inputs)
        self._loaded[runner] = rows, bucket
        return output

    def trees(self, rows: DecodeRows | SlotInputs, num_nodes: int) -> TokenTree | None:
        """Returns one checked tree per row; None for bare roots."""
        return None if num_nodes == 1 else self.inbox.checked(rows)

    def _capture(self, widths: list[int]) -> None:
        if not widths:
            return
        samples = [self._compute(self.padding(n)(n), n) for n in widths]
        self.buffers.reserve(samples, [self.shapes[n].forwards[-1] for n in widths])
        runners = [] if self.prompts is None else self.prompts.new_runners(widths, samples[0].output)
        for n in widths:
            padding, shape = self.padding(n), self.shapes[n]
            forwards = [Bucket(size, n) for size in shape.forwards]
            for lean in self.variants:
                stage = self._forward_stage(n, lean)
                self._forwards[n, lean] = GraphRunner(_stage(n), stage, padding, forwards, self.pool)
                runners.append(self._forwards[n, lean])
            choices = [Bucket(size, n) for size in shape.choices]
            for how in Choosing:
                function = self._choice_stage(n, how)
                self._choices[n, how] = GraphRunner(Stage.BASE_CHOICE, function, self._slot_padding, choices, self.pool)
                runners.append(self._choices[n, how])
        self.pool.capture(*runners)

    @torch.inference_mode()
    def _compute(
        self, inputs: SlotInputs | DecodeRows, num_nodes: int, into: ModelOutput | None = None, lean: bool = False
    ) -> ForwardResult:
        return self.fixed.forward(inputs.slots, self.trees(inputs, num_nodes), num_nodes, into=into, lean=lean)

    def verify(self, inputs: SlotInputs | DecodeRows, num_nodes: int, lean: bool) -> ForwardResult:
        """Runs a captured forward pass, whose logits and taps are written into the buffers of its width."""
        return self._compute(inputs, num_nodes, self.buffers.room(len(inputs.slots), num_nodes), lean)

    def _forward_stage(self, num_nodes: int, lean: bool) -> Callable[[SlotInputs | DecodeRows], ForwardDone]:
        def stage(inputs: SlotInputs | DecodeRows) -> ForwardDone:
            result = self.verify(inputs, num_nodes, lean)
            self.buffers.put(result)
            return ForwardDone(result.decodes.roots)

        return stage

    def _choice_stage(self, num_nodes: int, choosing: Choosing) -> Callable[[SlotInputs], AcceptedPaths]:
        def stage(inputs: SlotInputs) -> AcceptedPaths:
            return self.fixed.decide(self.buffers.latest_result(inputs.slots, num_nodes), choosing)

        return stage

    def padding(self, num_nodes: int) -> Callable[[int], SlotInputs | DecodeRows]:
        """Returns a function that makes a padding row for graphs of this width, see `GraphRunner`."""
        return self._slot_padding if num_nodes == 1 else self.tree_padding

    def _slot_padding(self, num_nodes: int) -> SlotInputs:
        return SlotInputs(torch.full((1,), self.slots.spare, device=self.slots.device))

    def tree_padding(self, num_nodes: int) -> DecodeRows:
        """Returns a padding row: the spare slot, marked as not wanting a tree."""
        slots = self._slot_padding(num_nodes).slots
        return DecodeRows(slots, torch.zeros_like(slots, dtype=torch.bool))


def _stage(num_nodes: int) -> Stage:
    return Stage.BASE_DECODING if num_nodes == 1 else Stage.BASE_VERIFICATION
