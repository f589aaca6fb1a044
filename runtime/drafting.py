"""The verifier's side of drafting: asks for trees, feeds the drafter what was decided, survives its loss.

The verifier is the source of truth. A tree counts only if it was grown from the sequence's committed length, epoch and
root by the attached incarnation; whatever else arrives, or does not arrive, costs speed and never a request.
"""

import logging
from enum import StrEnum

import torch
from torch import Tensor

from wingbeat.runtime.adaptive import AdaptiveSpeculation
from wingbeat.runtime.batch import Outcome, TokenTree
from wingbeat.runtime.block_manager import BlockManager
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.link import VerifierEnd
from wingbeat.runtime.model_runner import RoundResult
from wingbeat.runtime.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.sequence import Sequence
from wingbeat.runtime.slot_state import SlotState

logger = logging.getLogger(__name__)


class DrafterState(StrEnum):
    """Whether rounds are drafted."""

    NONE = "none"
    ATTACHED = "attached"
    LOST = "lost"
    """Dead or silent: the engine decodes plainly until another drafter is attached."""


class DraftSession:
    """One verifier's use of one drafter at a time.

    Args:
        slots: device state by slot, shared with the model runner.
        adaptive: decides how deep to draft; without it every draft has the configured shape.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        slots: SlotState,
        adaptive: AdaptiveSpeculation | None = None,
    ) -> None:
        self.config = config
        self.adaptive = adaptive
        self._max_levels = config.speculation.max_path - 1
        self.block_manager = block_manager
        self.slots = slots
        self.state = DrafterState.NONE
        self._end: VerifierEnd | None = None
        self._incarnation = 0
        self._round = 0

    def attach(self, end: VerifierEnd, running: list[Sequence]) -> None:
        """Draft through this end from the next round on; contexts the drafter lacks are replayed."""
        self._end, self._incarnation = end, end.incarnation
        self.state = DrafterState.ATTACHED
        for seq in running:
            self.admit(seq)

    def detach(self) -> None:
        """Decode plainly from the next round on."""
        self._end = None
        self.state = DrafterState.NONE

    def admit(self, seq: Sequence) -> None:
        """Note how much of a sequence's cached context the drafter holds, and hand over its tokens."""
        seq.draft_len, seq.tree_requested = 0, False
        if self._end is None or not seq.request.params.speculation:
            return
        size = self.config.block_size
        for index, block in enumerate(seq.blocks):
            filled = self.block_manager.draft_filled(block, self._incarnation)
            seq.draft_len = min(index * size + filled, seq.num_computed)
            if filled < size:
                break
        self._end.token_ids[seq.slot, : len(seq.token_ids)] = torch.tensor(seq.token_ids)

    def plan_replay(self, plan: SchedulerOutput) -> list[Chunk]:
        """Chunks of context the drafter lacks, from what the prompts left of the budget; oldest sequence first."""
        chunks: list[Chunk] = []
        if self._end is None or self._end.spec.taps_size == 0:
            return chunks
        budget = plan.budget_left
        for seq in plan.decodes:
            missing = seq.num_computed - seq.draft_len
            if missing > 0 and seq.request.params.speculation and budget:
                chunks.append(Chunk(seq, seq.draft_len, min(missing, budget), replay=True))
                budget -= chunks[-1].length
        return chunks

    def collect(self, decodes: list[Sequence]) -> TokenTree | None:
        """Wait for the trees asked for in the last round.

        Returns:
            One tree per decoding sequence, bare roots where none is usable; None where all are bare.
        """
        if self._end is None or not any(seq.tree_requested for seq in decodes):
            return None
        reply = self._end.wait_reply(self._round, self.config.drafter_timeout_s)
        if reply is None or int(reply.header[1]) != self._incarnation:
            self._lose()
            return None
        slots, wanted, epochs, lens, roots = torch.tensor(
            [(seq.slot, seq.tree_requested, seq.epoch, len(seq.token_ids), seq.token_ids[-1]) for seq in decodes]
        ).unbind(1)
        fresh = (
            wanted.bool()
            & (reply.epochs[slots] == epochs)
            & (reply.committed_lens[slots] == lens)
            & (reply.token_ids[slots, 0] == roots)
        )
        tree = TokenTree(*(getattr(reply, name)[slots] for name in TokenTree._fields))
        fresh &= well_formed(tree, self.slots.vocab_size, chains=self.config.speculation.draft_top_k == 1)
        if not bool(fresh.any()):
            return None
        # What is not to be verified must not reach an index either: a stale row may hold anything.
        real = fresh[:, None] & (torch.arange(tree.token_ids.shape[1]) < tree.num_valid[:, None])
        checked = TokenTree(
            torch.where(real, tree.token_ids, 0),
            torch.where(real, tree.parents, 0),
            torch.where(real, tree.depths, 0),
            tree.scores,
            torch.where(fresh, tree.num_valid, 1),
        )
        if self.slots.device.type == "cpu":
            # No captured graph asks for a fixed width here, and every padding node would cost its share of the pass.
            width = int(checked.num_valid.max())
            return TokenTree(*(field[:, :width] if field.dim() == 2 else field for field in checked))
        return TokenTree(*(field.to(self.slots.device, non_blocking=True) for field in checked))

    def publish(self, plan: SchedulerOutput, result: RoundResult) -> None:
        """Hand the round's tokens and taps to the drafter and ask for the next trees; rings the doorbell."""
        plain = not any(seq.request.params.speculation for seq in (*plan.decodes, *(c.seq for c in plan.chunks)))
        if self._end is None or plain:
            return
        outcome = self._end.acquire_outcome(self.config.drafter_timeout_s)
        if outcome is None:
            self._lose()
            return
        stateless = self._end.spec.taps_size == 0
        chunks = self._publish_chunks(plan.chunks, result, outcome)
        rows = [
            row
            for row, seq in enumerate(plan.decodes)
            if seq.request.params.speculation and (stateless or seq.draft_len == seq.num_computed)
        ]
        self._publish_decodes(plan.decodes, rows, result, outcome)
        self._publish_history(plan.decodes, result)
        proposals = [
            plan.decodes[row] for row in rows if self._has_room(plan.decodes[row], result.num_tokens_list[row])
        ]
        proposals += [chunk.seq for chunk in chunks if chunk.samples and self._has_room(chunk.seq, 1)]
        if stateless:
            proposals += [
                chunk.seq
                for chunk in plan.chunks
                if chunk.samples and chunk.seq.request.params.speculation and self._has_room(chunk.seq, 1)
            ]
        for seq in plan.decodes:
            seq.tree_requested = False
        levels = self._max_levels
        if self.adaptive is not None:
            draft = self.adaptive.plan(plan.decodes, proposals)
            self.adaptive.write_rule(draft, outcome)
            levels = draft.levels
            proposals = proposals if levels else []
        for seq in proposals:
            seq.tree_requested = True
        slots = self.slots
        outcome.proposal_slots[: len(proposals)] = torch.tensor([seq.slot for seq in proposals], dtype=torch.int64)
        outcome.epochs.copy_(slots.epochs)
        outcome.committed_lens.copy_(slots.committed_lens)
        outcome.block_tables.copy_(slots.block_tables)
        outcome.temperatures.copy_(slots.temperatures)
        outcome.seeds.copy_(slots.seeds)
        outcome.header[1:5] = torch.tensor([len(rows), len(chunks), len(proposals), levels])
        self._round = self._end.publish_outcome()

    def _publish_chunks(self, chunks: list[Chunk], result: RoundResult, outcome: Outcome) -> list[Chunk]:
        """Copy the chunks that continue the drafter's context; the others are replayed later."""
        for chunk, sampled in zip(chunks, result.chunk_token_ids, strict=True):
            if sampled and chunk.seq.request.params.speculation:
                self._end.token_ids[chunk.seq.slot, len(chunk.seq.token_ids)] = sampled[0]
        if self._end.spec.taps_size == 0:
            return []
        kept: list[Chunk] = []
        filled, row = 0, 0
        for chunk, sampled in zip(chunks, result.chunk_token_ids, strict=True):
            seq = chunk.seq
            rows = slice(row, row + chunk.length)
            row += chunk.length
            if not seq.request.params.speculation or seq.draft_len != chunk.start:
                continue
            end = chunk.start + chunk.length
            following = (seq.token_ids + sampled)[chunk.start + 1 : end + 1]
            into = slice(filled, filled + chunk.length)
            outcome.chunk_slots[len(kept)] = seq.slot
            outcome.chunk_positions[len(kept)] = chunk.start
            outcome.chunk_lens[len(kept)] = chunk.length
            outcome.chunk_next_token_ids[into] = torch.tensor(following)
            outcome.chunk_taps[into] = result.chunk_taps[rows]
            self._advance(seq, end)
            filled += chunk.length
            kept.append(chunk)
        return kept

    def _publish_decodes(self, decodes: list[Sequence], rows: list[int], result: RoundResult, outcome: Outcome) -> None:
        count = len(rows)
        if not count:
            return
        index = slice(None) if count == len(decodes) else torch.tensor(rows)
        slots = torch.tensor([decodes[row].slot for row in rows])
        outcome.decode_slots[:count] = slots
        outcome.decode_positions[:count] = result.positions[index]
        outcome.decode_num_tokens[:count] = result.num_tokens[index]
        outcome.decode_token_ids[:count] = result.token_ids[index]
        if result.taps is not None and self._end.spec.taps_size:
            outcome.decode_taps[:count] = result.taps[index]
        for row in rows:
            self._advance(decodes[row], decodes[row].num_computed + result.num_tokens_list[row])

    def _publish_history(self, decodes: list[Sequence], result: RoundResult) -> None:
        """Append the emitted tokens, also of sequences whose context is still being replayed: history has no gaps."""
        if not decodes:
            return
        slots = torch.tensor([seq.slot for seq in decodes])
        positions, token_ids = result.positions.cpu(), result.token_ids.cpu()
        # Columns past num_tokens are written too: the next round overwrites them before anyone reads them.
        columns = positions[:, None] + 1 + torch.arange(token_ids.shape[1])
        self._end.token_ids[slots[:, None], columns.clamp_max(self._end.token_ids.shape[1] - 1)] = token_ids

    def _advance(self, seq: Sequence, draft_len: int) -> None:
        """The drafter's KV of this sequence reaches `draft_len`: noted by block, for whoever shares the prefix."""
        size = self.config.block_size
        for index in range(seq.draft_len // size, -(-draft_len // size)):
            self.block_manager.set_draft_filled(
                seq.blocks[index], self._incarnation, min(size, draft_len - index * size)
            )
        seq.draft_len = draft_len

    def _has_room(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Whether a drafted token could still be emitted after this round and the next bonus token."""
        length = len(seq.token_ids) + num_new_tokens
        left = seq.request.params.max_tokens - (length - seq.num_prompt_tokens)
        return min(left, self.config.max_model_len - length) > 1

    def _lose(self) -> None:
        why = "is silent" if self._end.peer_alive() else "is gone"
        logger.warning("drafter incarnation %d %s: decoding plainly", self._incarnation, why)
        self.detach()
        self.state = DrafterState.LOST


def well_formed(tree: TokenTree, vocab_size: int, *, chains: bool = False) -> Tensor:
    """bool [num_reqs]: parents precede their children, depths follow from them, tokens exist.

    A wrong depth would shift positions and so change the output: it is the one field that must never be believed.

    Args:
        chains: each node must follow the one before it: where chains are configured, accepted KV is never moved.
    """
    num_nodes = tree.token_ids.shape[1]
    index = torch.arange(num_nodes)
    real = index < tree.num_valid[:, None]
    parents = tree.parents[:, 1:]
    in_order = (parents >= (index[:-1] if chains else 0)) & (parents < index[1:])
    expected = tree.depths.gather(1, parents.clamp(0, num_nodes - 1)) + 1
    good = in_order & (tree.depths[:, 1:] == expected)
    good_token = (tree.token_ids >= 0) & (tree.token_ids < vocab_size)
    return (
        (good | ~real[:, 1:]).all(1)
        & (good_token | ~real).all(1)
        & (tree.depths[:, 0] == 0)
        & (tree.num_valid >= 1)
        & (tree.num_valid <= num_nodes)
    )
