"""Drafter that runs the engine of a one-pass head: it commits positions from their taps, and builds the same trees as
`OnePassDrafter`, one block per tree.
"""

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.growth import Growth
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.one_pass.config import LayerMask
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.one_pass_drafter import CandidateChooser, check_shape
from wingbeat.runtime.one_pass.walks import grow_along
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.tensorrt.block_graph import COMMITTED
from wingbeat.runtime.tensorrt.draft_runner import DraftOutput, DraftRunner, KnownPairs
from wingbeat.runtime.tensorrt.engine_config import DraftEngineConfig
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter
from wingbeat.runtime.tensorrt.graph_shapes import block_mask_name
from wingbeat.runtime.tensorrt.session import EngineSession, EngineStage


class BlockRunner(DraftRunner):
    """Runs the engine of a one-pass head. The KV of position p is stored where `DraftRunner` stores the KV of pair
    p.
    """

    def capture(self, tree_size: int, top_k: int, max_path: int) -> bool:
        """Capture the accept stage for padded paths, and the block stage. Returns False if one of the two has to run
        eagerly.
        """
        block = self.config.block
        done = [self.stages.capture(EngineStage.ACCEPT, max_path, 1)]
        done.append(self.stages.capture(EngineStage.PROPOSAL, block.size, block.num_drafted))
        return all(done)

    def block(
        self, kv_rows: list[int], starts: list[int], anchors: Tensor, deltas: Tensor | None = None
    ) -> DraftOutput:
        """Run one block per sequence, without committing positions.

        Args:
            kv_rows: KV row of each sequence.
            starts: number of committed positions of each sequence.
            anchors: int64 [num_seqs]: the last committed tokens.
            deltas: int64 [num_seqs]: see `Roots.position_deltas`.

        Returns:
            Logits [num_seqs, num_drafted, draft_vocab_size] and hidden states of the slots that predict a token.

        Raises:
            WrongInputError: a sequence's context was not committed; the message names the value.
        """
        self._check_context(kv_rows, starts)
        block, device = self.config.block, self._device
        slots = torch.arange(block.size, device=device)
        positions = upload(starts, device)[:, None] + slots
        ids = torch.full_like(positions, block.vocab_size)
        ids[:, 0] = anchors
        inputs = {
            "input_ids": ids,
            "hidden_states_input": self._no_hidden(ids, self.config.base_model_hidden_size),
            "attention_pos_id": positions if deltas is None else positions + deltas[:, None],
            "last_token_ids": slots[block.first_slot :].repeat(len(ids), 1),
            **{block_mask_name(*mask): self._seen(mask, positions) for mask in block.distinct_masks},
        }
        outputs = self.stages.run(EngineStage.PROPOSAL, kv_rows, starts, inputs)
        return DraftOutput(outputs["logits"], outputs["hidden_states"])

    def _known_inputs(self, pairs: KnownPairs, positions: Tensor) -> dict[str, Tensor]:
        seen = (self._keys <= positions[..., None])[:, None]
        masks = {block_mask_name(*mask): seen for mask in self.config.block.distinct_masks}
        ids = torch.full_like(pairs.token_ids, COMMITTED)
        return {"input_ids": ids, "hidden_states_input": pairs.base_hidden, **masks}

    def _seen(self, mask: LayerMask, positions: Tensor) -> Tensor:
        """bool [num_seqs, 1, size, capacity]: keys that the slots of a block see in layers with this mask."""
        last = positions if mask.causal else positions[:, -1:].expand_as(positions)
        seen = self._keys <= last[..., None]
        if mask.window is not None:
            seen &= positions[..., None] - self._keys < mask.window
        return seen[:, None]


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
