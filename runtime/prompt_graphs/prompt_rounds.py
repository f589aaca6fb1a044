"""CUDA graphs of a verifier's rounds with prompt chunks: alone, or beside decodes.

Attention reads lengths and block tables on the device, and the pieces form a single segment, regardless of how the
chunks are cut. Therefore a whole pass over a number of pieces, including attention, is one graph. Inputs and outputs of
chunks are in `ChunkBuffers`. First tokens are chosen eagerly after the graph.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from wingbeat.runtime.graphs.buckets import bucket_for
from wingbeat.runtime.graphs.graph_runner import Bucket, GraphRunner, Stage
from wingbeat.runtime.prompt_graphs.chunk_buffers import ChunkBuffers
from wingbeat.runtime.prompt_graphs.prompt_shapes import PromptShapes
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.round.buffers import ForwardResult
from wingbeat.runtime.round.decode_graphs import DecodeGraphs, ForwardDone, SlotInputs
from wingbeat.runtime.round.eager_rounds import rooted
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS, in_pieces
from wingbeat.runtime.round.rows import ModelOutput
from wingbeat.runtime.round.shapes import round_shapes
from wingbeat.runtime.round.slots import DecodeRows
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput


class Pieces(NamedTuple):
    """Inputs and outputs of a captured pass; has no fields, because all data of the pass is in `ChunkBuffers`."""


class PromptGraphs:
    """Runs rounds without decodes, and the forward passes of mixed rounds.

    Rounds without decodes that fit no graph are passed to `EagerRounds`, which has the same methods.

    Args:
        graphs: graphs of the rounds with decodes.
        shapes: shapes that are captured.
        last_position: last position that the model supports.
    """

    def __init__(self, graphs: DecodeGraphs, shapes: PromptShapes, last_position: int) -> None:
        self.eager, self._graphs, self.shapes = graphs.eager, graphs, shapes
        self._last_position = last_position
        self._buffers = ChunkBuffers(graphs.slots, shapes.most_pieces)
        self.mixed: dict[tuple[int, int, bool], GraphRunner] = {}
        """Graphs of mixed rounds, by nodes per sequence, by number of chunk rows, and by whether they are lean."""
        self.runners = {
            (num_pieces, lean): GraphRunner(
                Stage.BASE_PROMPTS,
                self._stage(num_pieces, lean),
                lambda size: Pieces(),
                [Bucket(num_pieces, PIECE_ROWS)],
                graphs.pool,
            )
            for num_pieces in shapes.prompts
            for lean in graphs.variants
        }

    def new_runners(self, widths: list[int], sample: ModelOutput) -> list[GraphRunner]:
        """Returns the graphs to capture with those of decodes of these widths; with width 1, also those without
        decodes.

        Args:
            sample: output of a decode, with the row shapes of the chunks' output.
        """
        self._buffers.reserve(sample)
        graphs, runners = self._graphs, [*self.runners.values()] if 1 in widths else []
        for n in widths:
            for num_pieces in self.shapes.pieces:
                beside = num_pieces * PIECE_ROWS
                buckets = [Bucket(size, n, beside) for size in self.shapes.mixed[n]]
                for lean in graphs.variants:
                    stage = self._mixed_stage(n, num_pieces, lean)
                    runner = GraphRunner(Stage.BASE_MIXED, stage, graphs.padding(n), buckets, graphs.pool)
                    self.mixed[n, beside, lean] = runner
                    runners.append(runner)
        if graphs.config.cuda_graphs == "decode_only":
            whole = round_shapes(replace(graphs.config, cuda_graphs="full")).prompts
            untried = whole.num_mixed(widths) + len(whole.prompts) * (1 in widths)
            graphs.stats.num_untried += len(graphs.variants) * untried
        return runners

    def replay_mixed(self, plan: SchedulerOutput, rows: DecodeRows, num_nodes: int) -> ModelOutput | None:
        """Replays a mixed forward pass and returns the chunks' output; the decodes' output stays in `ForwardBuffers`.

        Returns None if no graph holds the round.
        """
        chunks = plan.chunks
        if not all(chunk.is_plain for chunk in chunks):
            return None
        own = in_pieces(chunks, self._last_position)
        bucket = self.shapes.mixed_bucket(num_nodes, len(rows.slots), len(own.slots))
        runner = None if bucket is None else self.mixed[num_nodes, bucket.beside, self._graphs.is_lean(plan)]
        if runner is None or not runner.has_graphs:  # without a graph, padding would only cost time
            return None
        num_pieces = bucket.beside // PIECE_ROWS
        self._buffers.put(own, num_pieces)
        self._graphs.replay(runner, rows, bucket)
        num_samples, num_tokens = sum(chunk.samples for chunk in chunks), sum(chunk.length for chunk in chunks)
        return self._buffers.latest_output(num_pieces, num_samples, num_tokens)

    def forward(
        self,
        plan: SchedulerOutput,
        rows: DecodeRows,
        trees: TokenTree | None,
        num_nodes: int,
        masks: "Future[list[int]] | None" = None,
    ) -> ForwardResult:
        """Runs a round without decodes, as `EagerRounds.forward` does. A graph's output is valid until the next round.

        The round runs eagerly if there are more pieces than the largest graph holds, if a chunk has spans or is
        reported on, or if the graph was not captured.
        """
        chunks = plan.chunks
        runner = self._runner(plan)
        if runner is None:
            self._graphs.stats.count_eager_run(Stage.BASE_PROMPTS)
            return self.eager.forward(plan, rows, trees, num_nodes, masks)
        started = time.perf_counter()
        own = in_pieces(chunks, self._last_position)
        [bucket] = runner.buckets
        self._buffers.put(own, bucket.num_reqs)
        runner.replay(bucket, bucket.num_reqs)
        num_samples, num_tokens = sum(chunk.samples for chunk in chunks), sum(chunk.length for chunk in chunks)
        said, forward_s = (
            self._buffers.latest_output(bucket.num_reqs, num_samples, num_tokens),
            time.perf_counter() - started,
        )
        rooted(None, masks)
        return ForwardResult(None, ModelOutput(said.logits[:0], None), None, said, forward_s)

    def with_roots(self, result: ForwardResult, late: list[int]) -> ForwardResult:
        """Returns the result unchanged: the round has no decodes."""
        return result

    def decide(self, plan: SchedulerOutput, result: ForwardResult) -> AcceptedPaths:
        """See `EagerRounds.decide`. The paths are empty, because the round has no decodes."""
        return self.eager.decide(plan, result)

    def _runner(self, plan: SchedulerOutput) -> GraphRunner | None:
        chunks = plan.chunks
        num_pieces = sum(-(-chunk.length // PIECE_ROWS) for chunk in chunks)
        captured = self.shapes.prompts
        if not captured or num_pieces > captured[-1] or not all(chunk.is_plain for chunk in chunks):
            return None
        runner = self.runners[bucket_for(num_pieces, captured), self._graphs.is_lean(plan)]
        return runner if runner.has_graphs else None  # without a graph, padding would only cost time

    def _stage(self, num_pieces: int, lean: bool) -> Callable[[Pieces], Pieces]:
        fixed = self._graphs.fixed

        def stage(inputs: Pieces) -> Pieces:
            self._buffers.keep(fixed.model(fixed.builder.fixed(None, self._buffers.rows(num_pieces), lean)))
            return inputs

        return stage

    def _mixed_stage(
        self, num_nodes: int, num_pieces: int, lean: bool
    ) -> Callable[[SlotInputs | DecodeRows], ForwardDone]:
        graphs = self._graphs

        def stage(inputs: SlotInputs | DecodeRows) -> ForwardDone:
            trees, chunks = graphs.trees(inputs, num_nodes), self._buffers.rows(num_pieces)
            result = graphs.fixed.forward(inputs.slots, trees, num_nodes, chunks, lean=lean)
            graphs.buffers.put(result)
            self._buffers.keep(result.chunks)
            return ForwardDone(result.decodes.roots)

        return stage
