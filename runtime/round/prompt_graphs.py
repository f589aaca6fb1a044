"""CUDA graphs of a verifier's rounds that only compute prompts: one whole forward pass for each number of pieces.

Attention reads lengths and block tables on the device, and the pieces form a single segment, regardless of how the
chunks are cut. Therefore a whole pass, including attention, is one graph. Inputs and outputs are in `ChunkBuffers`, as
in mixed rounds. First tokens are chosen eagerly after the graph.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from wingbeat.runtime.graphs.buckets import bucket_for
from wingbeat.runtime.graphs.graph_runner import Bucket, GraphPool, GraphRunner, Stage
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.round.buffers import ChunkBuffers, ForwardResult
from wingbeat.runtime.round.eager_rounds import EagerRounds, rooted
from wingbeat.runtime.round.fixed_round import FixedRound
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS, in_pieces
from wingbeat.runtime.round.rows import ModelOutput
from wingbeat.runtime.round.slots import DecodeRows
from wingbeat.runtime.scheduling.plan import Chunk
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput


class Pieces(NamedTuple):
    """Inputs and outputs of a captured pass; has no fields, because all data of the pass is in `ChunkBuffers`."""


class PromptGraphs:
    """Runs rounds without decodes. Rounds that fit no graph are passed to `EagerRounds`, which has the same methods.

    Args:
        pieces: numbers of pieces that are captured, ascending.
        last_position: last position that the model supports.
    """

    def __init__(
        self,
        fixed: FixedRound,
        eager: EagerRounds,
        buffers: ChunkBuffers,
        pieces: tuple[int, ...],
        last_position: int,
        pool: GraphPool,
    ) -> None:
        self.eager, self.pool = eager, pool
        self._buffers = buffers
        self._pieces = pieces
        self._last_position = last_position
        self.runners = {
            num_pieces: GraphRunner(
                Stage.BASE_PROMPTS,
                _stage(fixed, buffers, num_pieces),
                lambda size: Pieces(),
                [Bucket(num_pieces, PIECE_ROWS)],
                pool,
            )
            for num_pieces in pieces
        }

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
        runner = self._runner(chunks)
        if runner is None:
            self.pool.stats.count_eager_run(Stage.BASE_PROMPTS)
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

    def _runner(self, chunks: Sequence[Chunk]) -> GraphRunner | None:
        num_pieces = sum(-(-chunk.length // PIECE_ROWS) for chunk in chunks)
        if not self._pieces or num_pieces > self._pieces[-1] or not all(chunk.is_plain for chunk in chunks):
            return None
        runner = self.runners[bucket_for(num_pieces, self._pieces)]
        return runner if runner.has_graphs else None  # without a graph, padding would only cost time


def _stage(fixed: FixedRound, buffers: ChunkBuffers, num_pieces: int) -> Callable[[Pieces], Pieces]:
    def stage(inputs: Pieces) -> Pieces:
        buffers.keep(fixed.prompts(buffers.rows(num_pieces)))
        return inputs

    return stage
