"""Captures a round's verification, acceptance, commit and next draft as one CUDA graph.

If the drafter runs in the engine's process, nothing between these stages needs the host. A captured round verifies the
trees in the inbox, walks them, commits the accepted tokens to the drafter's KV and leaves the next trees in the inbox.
It reads and writes the engine's state by slot, so that any other round may follow: prompts, grammars and sampling rules
take the usual graphs, one for each stage.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.decided_rows import DecidedRows
from wingbeat.runtime.drafters.draft_stages import DraftStages
from wingbeat.runtime.drafters.growth import SlotTables
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.graphs.buckets import bucket_for
from wingbeat.runtime.graphs.graph_runner import Bucket, GraphRunner, Stage
from wingbeat.runtime.protocol.ends import DrafterEnd
from wingbeat.runtime.protocol.messages import AcceptedPaths
from wingbeat.runtime.round.choice import Choosing
from wingbeat.runtime.round.runner import ModelRunner
from wingbeat.runtime.round.shapes import round_shapes, variants
from wingbeat.runtime.round.slots import DecodeRows
from wingbeat.runtime.scheduling.plan import SchedulerOutput

_CHOICES = (Choosing.GREEDY, Choosing.SAMPLED)
"""Kinds of token choice that are captured."""


class WholeRounds:
    """Captured rounds of an engine and the drafter in its process.

    Args:
        runner: the engine's rounds, which are captured and verify trees of one width.
        stages: the drafter's captured stages, over the engine's slots and blocks.
        history: token history of the channel, int64 [num_slots, max_model_len + 1], on the engine's device.
        is_free: whether the drafter has nothing else to do before it drafts again.
    """

    def __init__(self, runner: ModelRunner, stages: DraftStages, history: Tensor, is_free: Callable[[], bool]) -> None:
        self._runner, self._graphs, self._stages = runner, runner.graphs, stages
        self._history, self._is_free = history, is_free
        state, spec = runner.slots, stages.spec
        self._state = state
        self._num_nodes, self._depth = spec.num_nodes, spec.max_path - 1
        self._sizes = self._graphs.shapes[self._num_nodes].forwards
        deltas = state.position_deltas if stages.moves else None
        self._tables = SlotTables(
            *(state.committed_lens, state.last_token_ids, state.seeds, state.temperatures, state.block_tables, deltas)
        )
        with torch.inference_mode(mode=False):
            stages.growth.prepare(self._sizes)
        buckets = [Bucket(size, self._num_nodes) for size in self._sizes]
        self._runners = {
            (how, lean): GraphRunner(
                Stage.WHOLE_ROUND, self._stage(how, lean), self._graphs.tree_padding, buckets, self._graphs.pool
            )
            for how in _CHOICES
            for lean in self._graphs.variants
        }
        self._graphs.pool.capture(*self._runners.values())

    def takes(self, plan: SchedulerOutput, trees: Any) -> bool:
        """Whether a round is replayed as one graph.

        The round has decodes alone, whose contexts the drafter holds completely; the drafter's own trees are verified;
        and no decode needs a mask, reports or rules of sampling other than its temperature.
        """
        decodes = plan.decodes
        if trees is not self._runner.inbox or plan.chunks or not decodes or len(decodes) > self._sizes[-1]:
            return False
        if not all(seq.draft.complete and not seq.draft.num_deferred and seq.masker is None for seq in decodes):
            return False
        runner = self._runners.get(self._kind(plan))
        if runner is None or not runner.has_graphs:
            return False
        rules = self._state.published_rules
        return (rules is None or not rules.kinds(decodes)) and self._is_free()

    def replay(self, plan: SchedulerOutput, rows: DecodeRows) -> AcceptedPaths:
        """Enqueues the graph of a round for which `takes` is True. The result is valid until the next replay."""
        runner = self._runners[self._kind(plan)]
        bucket = Bucket(bucket_for(len(rows.slots), self._sizes), self._num_nodes)
        # All buckets share the inputs' memory, so the result must not refer to that memory.
        return self._graphs.replay(runner, rows, bucket)._replace(slots=rows.slots)

    def _kind(self, plan: SchedulerOutput) -> tuple[Choosing, bool]:
        """How a round's tokens are chosen, and whether the round is lean."""
        return Choosing.of([seq.request.params for seq in plan.decodes]), self._graphs.is_lean(plan)

    def _stage(self, choosing: Choosing, lean: bool) -> Callable[[DecodeRows], AcceptedPaths]:
        def stage(rows: DecodeRows) -> AcceptedPaths:
            accepted = self._runner.fixed.decide(self._graphs.verify(rows, self._num_nodes, lean), choosing)
            self._draft(accepted)
            return accepted

        return stage

    def _draft(self, accepted: AcceptedPaths) -> None:
        """Commits the accepted tokens and writes the next trees into the inbox, for all rows but padding."""
        stages, state, slots = self._stages, self._state, accepted.slots
        real, taps = slots != state.spare, accepted.taps
        decided = DecidedRows(
            slots,
            accepted.positions * real,
            accepted.num_tokens * real,
            accepted.token_ids,
            accepted.token_ids[..., None][..., :0].to(stages.dtype) if taps is None else taps,
            accepted.tree_token_ids[:, 0],
            state.position_deltas[slots] if stages.moves else None,
        )
        roots = stages.growth.roots_of(self._tables, slots, self._depth)
        self._runner.inbox.put(slots, stages.draft(decided, roots, state.block_tables))
        # Padding rows write to the last column, which no text reaches.
        last = self._history.shape[1] - 1
        columns = torch.where(real[:, None], accepted.columns, last)
        self._history[slots.clamp_max(len(self._history) - 1)[:, None], columns] = accepted.token_ids


def whole_rounds(runner: ModelRunner, worker: DraftWorker, end: DrafterEnd) -> WholeRounds | None:
    """Captures rounds of an engine and the drafter that has just been attached to it in its process.

    Returns None if a round needs the host between its stages: if a policy chooses each round's depth and nodes, if
    either of the two is not captured or they are on different devices, if other graphs than the drafter's capture the
    verifier, as with several ranks, or if the drafter also serves other verifiers.

    Args:
        end: the drafter's end of the channel between the two.
    """
    drafter, graphs = worker.drafter, runner.graphs
    stages = drafter.stages if isinstance(drafter, StagedDrafter) else None
    if graphs is None or stages is None or runner.config.speculation.adaptive:
        return None
    here = end.token_ids.device == runner.device == drafter.device
    alone = worker.ends == [end] and stages.spare_slot == runner.slots.spare
    fits = end.spec.num_nodes in graphs.shapes and type(graphs.pool.device) is type(stages.graph_device)
    if not (here and alone and fits):
        return None

    def is_free() -> bool:
        return worker.ends == [end] and drafter.stages is stages and not worker.observer.has_work

    return WholeRounds(runner, stages, end.token_ids, is_free)


def num_whole_rounds(config: EngineConfig) -> int:
    """Maximum number of graphs that `WholeRounds` captures."""
    shapes = round_shapes(config).decodes.get(config.speculation.num_nodes)
    if shapes is None or config.speculation.adaptive:
        return 0
    return len(_CHOICES) * len(variants(config)) * len(shapes.forwards)
