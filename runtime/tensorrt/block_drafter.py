"""Drafter that runs the engine of a one-pass head: it builds the same trees as `OnePassDrafter`, one block per tree."""

from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.growth import Growth
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.one_pass_drafter import CandidateChooser, check_shape
from wingbeat.runtime.one_pass.walks import grow_along
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.tensorrt.block_runner import BlockRunner
from wingbeat.runtime.tensorrt.engine_config import DraftEngineConfig
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter
from wingbeat.runtime.tensorrt.session import EngineSession


class BlockDrafter(EngineDrafter):
    """Drafter of a one-pass head: the engine runs the block, and the head's walk from slot to slot runs in torch.

    Args:
        session: session of the graph `eagle_draft`.
        config: config of the graph.
        walker: the head, with weights for its walk only (`load_walker`).
        speculation: shape of the trees.
        graph_device: captures the block and accept stages; None runs them eagerly.

    Raises:
        ValueError: the trees are deeper than the block.
    """

    runner_kind = BlockRunner

    def __init__(
        self,
        session: EngineSession,
        config: DraftEngineConfig,
        walker: OnePassHead,
        speculation: SpeculationConfig,
        graph_device: GraphDevice | None = None,
    ) -> None:
        check_shape(speculation, config.block.num_drafted)
        super().__init__(session, config, walker.draft_token_ids, speculation, graph_device)
        self.walker = walker
        self._choose_for = CandidateChooser(self.growth, walker)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Grow a tree per proposal slot; see `Drafter.propose`."""
        kv_rows, slots = self._rows(batch.proposal_slots.tolist())
        roots = self.growth.roots(batch, slots)
        output = self.runner.block(kv_rows, (roots.positions[0] - 1).tolist(), roots.token_ids, roots.position_deltas)
        walk = self.walker.walk_over(output.logits, output.hidden, self._choose_for(roots))
        return grow_along(self.growth, roots, walk, batch.growth_rules)

    def _growth_of(self, draft_token_ids: Tensor) -> Growth:
        return Growth(self.speculation, draft_token_ids, packed=True, whole=True)

    def _rows_behind(self) -> int:
        return self.config.block.size
