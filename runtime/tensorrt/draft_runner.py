"""Runs the draft engine's three stages. Prefill and accept commit KV; proposal does not.

Pair j of a sequence is (the verifier's hidden state at position j, token j + 1), stored at position j. A committed pair
has the verifier's hidden state as input, and zeros in place of the head's hidden state. A drafted pair has the head's
hidden state as input, and zeros in place of the verifier's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.tensorrt.engine_config import DraftEngineConfig
from wingbeat.runtime.tensorrt.graph_shapes import EMBEDDINGS, MASK, SHOWN, block_mask_name, draft_shapes
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.session import EngineSession, EngineStage, WrongInputError, check_batch
from wingbeat.runtime.tensorrt.stage_runner import StageRunner


class DraftOutput(NamedTuple):
    """Outputs of a stage."""

    logits: Tensor
    """Logits [num_seqs, draft_vocab_size]; for a proposal [num_seqs, top_k, draft_vocab_size]."""
    hidden: Tensor
    """Hidden states [num_seqs, hidden_size]; for a proposal [num_seqs, top_k, hidden_size]."""


class KnownPairs(NamedTuple):
    """Pairs to commit, padded to the same number for each sequence."""

    kv_rows: list[int]
    """KV row of each sequence."""
    starts: list[int]
    """Number of pairs of each sequence that were committed earlier."""
    counts: list[int]
    """Number of valid pairs of each sequence, at least 1."""
    token_ids: Tensor
    """Token of each pair, int64 [num_seqs, num_padded]; the token's position is 1 higher than that of the pair's hidden
    state.
    """
    base_hidden: Tensor
    """Hidden states from the verifier, [num_seqs, num_padded, base_model_hidden_size]."""
    rotated: Tensor | None = None
    """RoPE positions of the pairs, int64 [num_seqs, num_padded], or [num_seqs, 3, num_padded] with one row per axis;
    None if RoPE positions equal the pairs' positions.
    """
    shown: tuple[Tensor, Tensor] | None = None
    """Mask of pairs whose tokens belong to images, bool [num_seqs, num_padded], and the embeddings [num_seqs,
    num_padded, media_width]; None if there are no such tokens."""

    def parts(self) -> dict[str, list[int] | Tensor]:
        """The fields that are not None, by name, with `shown` split into its two tensors."""
        shown = {} if self.shown is None else dict(zip((SHOWN, EMBEDDINGS), self.shown, strict=True))
        own = {name: part for name, part in self._asdict().items() if part is not None and name != "shown"}
        return own | shown


class DraftedTree(NamedTuple):
    """The partial trees of several sequences, padded to the same size. The KV of the trees' nodes is stored after the
    KV of the committed pairs.
    """

    kv_rows: list[int]
    """KV row of each sequence."""
    starts: list[int]
    """Number of committed pairs of each sequence."""
    token_ids: Tensor
    """Tokens of the nodes, int64 [num_seqs, num_padded]."""
    draft_hidden: Tensor
    """[num_seqs, num_padded, draft_model_hidden_size]: hidden state of each node's parent."""
    depths: Tensor
    """Depths of the nodes, int64 [num_padded]; 0 for children of the root."""
    visible: Tensor
    """bool [num_seqs, num_padded, num_padded]: which nodes each node sees, itself included."""
    deltas: Tensor | None = None
    """int64 [num_seqs]: see `Roots.position_deltas`."""


class DraftRunner:
    """Runs the draft engine.

    Args:
        session: session of the graph `eagle_draft`.
        config: config of the graph.
        kv: KV rows of all sequences.
        graph_device: captures proposal and accept; None runs them eagerly.
    """

    def __init__(
        self,
        session: EngineSession,
        config: DraftEngineConfig,
        kv: LinearKV,
        graph_device: GraphDevice | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        shapes = draft_shapes(
            config.layers,
            config.draft_vocab_size,
            config.base_model_hidden_size,
            config.draft_model_hidden_size,
            kv.capacity,
            config.torch_dtype,
            () if config.block is None else [block_mask_name(*mask) for mask in config.block.distinct_masks],
            config.media,
        )
        self.stages = StageRunner(session, shapes, kv, config.limits, graph_device)
        self.committed = [0] * kv.num_rows
        """Number of committed pairs of each KV row."""
        self._device = session.device
        self._keys = torch.arange(kv.capacity, device=self._device)
        self._zeros = torch.zeros(0, dtype=config.torch_dtype, device=self._device)

    def capture(self, tree_size: int, top_k: int, max_path: int) -> bool:
        """Capture the accept stage with `max_path` pairs per sequence, and the proposal stage with `tree_size` nodes.
        Returns False if one of the two stages has to run eagerly.

        Args:
            tree_size: number of drafted nodes; 0 if the accept stage's output suffices to draft, so that the proposal
                stage never runs.
            top_k: nodes per level.
            max_path: maximum length of an accepted path.
        """
        done = [self.stages.capture(EngineStage.ACCEPT, max_path, 1)]
        if tree_size:
            done.append(self.stages.capture(EngineStage.PROPOSAL, tree_size, top_k))
        return all(done)

    def begin(self, kv_row: int, start: int, block_table: Tensor) -> None:
        """Prepare to commit a chunk at `start`: if there are pages, fill the row's positions before `start` from them.

        Args:
            kv_row: KV row of the sequence.
            start: number of pairs before the chunk.
            block_table: int64 [1, num_table_blocks], the sequence's blocks.
        """
        if self.kv.pages:
            self.kv.fill(upload([kv_row], self._device), block_table, start)
            self.committed[kv_row] = start

    def prefill(self, pairs: KnownPairs) -> DraftOutput:
        """Commit pairs of a prompt.

        Returns:
            Logits and hidden state of each sequence's last pair.

        Raises:
            WrongInputError, CapacityExceededError: as for `accept`, or the chunk is longer than the engine's
                max_input_len.
        """
        length, most = pairs.token_ids.shape[1], self.config.limits.max_input_len
        if length > most:
            raise WrongInputError(f"a prefill of {length} tokens a sequence: max_input_len is {most}")
        return self._commit(EngineStage.PREFILL, pairs)

    def accept(self, pairs: KnownPairs) -> DraftOutput:
        """Commit accepted tokens with the verifier's hidden states.

        Returns:
            Logits and hidden state of each sequence's last accepted token.

        Raises:
            WrongInputError: inputs differ in batch size, or a position before the pairs was not committed; the message
                names the value.
            CapacityExceededError: a sequence's KV row is too short for the pairs.
        """
        return self._commit(EngineStage.ACCEPT, pairs)

    def proposal(self, tree: DraftedTree, selected: Tensor) -> DraftOutput:
        """Run the whole tree drafted so far, without committing it.

        Args:
            tree: the trees.
            selected: int64 [num_seqs, top_k], nodes whose outputs are computed.

        Returns:
            Logits and hidden states of the selected nodes.

        Raises:
            WrongInputError: the tree is too large, or a sequence's context was not committed; the message names the
                value.
        """
        num_nodes, most = tree.token_ids.shape[1], self.config.limits.max_draft_tree_size
        if num_nodes > most:
            raise WrongInputError(f"a tree of {num_nodes} drafted nodes: max_draft_tree_size is {most}")
        self._check_context(tree.kv_rows, tree.starts)
        starts = upload(tree.starts, self._device)[:, None]
        mask = (self._keys < starts).unsqueeze(1).repeat(1, num_nodes, 1)
        columns = (starts + self._keys[:num_nodes])[:, None].expand_as(tree.visible)
        # Columns beyond the capacity are clamped so that this call does not fail; `StageRunner.run` then raises the
        # error for the overflow.
        mask.scatter_(2, columns.clamp_max(self.kv.capacity - 1), tree.visible)
        positions = starts + tree.depths
        inputs = {
            "input_ids": tree.token_ids,
            "hidden_states_input": self._no_hidden(tree.token_ids, self.config.base_model_hidden_size),
            "hidden_states_from_draft": tree.draft_hidden,
            "attention_pos_id": self._by_axes(positions if tree.deltas is None else positions + tree.deltas[:, None]),
            "last_token_ids": selected,
            MASK: mask[:, None],
            **self._shown(tree.token_ids, None),
        }
        outputs = self.stages.run(EngineStage.PROPOSAL, tree.kv_rows, tree.starts, inputs)
        return DraftOutput(outputs["logits"], outputs["hidden_states"])

    def _commit(self, stage: EngineStage, pairs: KnownPairs) -> DraftOutput:
        check_batch(len(pairs.kv_rows), pairs.parts())
        self._check_context(pairs.kv_rows, pairs.starts)
        starts, counts = upload([pairs.starts, pairs.counts], self._device)
        positions = starts[:, None] + self._keys[: pairs.token_ids.shape[1]]
        inputs = self._known_inputs(pairs, positions)
        rotated = self._by_axes(positions if pairs.rotated is None else pairs.rotated)
        inputs |= {"attention_pos_id": rotated, "last_token_ids": (counts - 1)[:, None]}
        outputs = self.stages.run(stage, pairs.kv_rows, pairs.starts, inputs)
        for row, start, count in zip(pairs.kv_rows, pairs.starts, pairs.counts, strict=True):
            self.committed[row] = start + count
        return DraftOutput(outputs["logits"][:, 0], outputs["hidden_states"][:, 0])

    def _known_inputs(self, pairs: KnownPairs, positions: Tensor) -> dict[str, Tensor]:
        """Graph inputs for committing pairs at positions int64 [num_seqs, num_padded]."""
        return {
            "input_ids": pairs.token_ids,
            "hidden_states_input": pairs.base_hidden,
            "hidden_states_from_draft": self._no_hidden(pairs.token_ids, self.config.draft_model_hidden_size),
            MASK: (self._keys <= positions[..., None])[:, None],
            **self._shown(pairs.token_ids, pairs.shown),
        }

    def _by_axes(self, rotated: Tensor) -> Tensor:
        """Converts RoPE positions int64 [num_seqs, num_padded] or [num_seqs, 3, num_padded] to the graph's input shape.

        A head with one axis uses the first axis, time.
        """
        if not self.config.num_axes:
            return rotated if rotated.dim() == 2 else rotated[:, 0].contiguous()
        return (rotated if rotated.dim() == 3 else rotated[:, None].expand(-1, self.config.num_axes, -1)).contiguous()

    def _shown(self, token_ids: Tensor, shown: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
        """Image inputs of the graph by name; empty if the head has none."""
        width = self.config.media_width
        if not width:
            return {}
        if shown is None:
            shown = torch.zeros_like(token_ids, dtype=torch.bool), self._no_hidden(token_ids, width)
        return dict(zip((SHOWN, EMBEDDINGS), shown, strict=True))

    def _no_hidden(self, token_ids: Tensor, size: int) -> Tensor:
        """Zeros [num_seqs, num_padded, size], a view of a shared buffer to which nothing may be written."""
        shape = (*token_ids.shape, size)
        needed = token_ids.numel() * size
        if needed > self._zeros.numel():
            self._zeros = self._zeros.new_zeros(needed)
        return self._zeros[:needed].view(shape)

    def _check_context(self, rows: list[int], starts: list[int]) -> None:
        """Raises an error unless all positions before a step are committed."""
        check_batch(len(rows), {"starts": starts})
        for row, start in zip(rows, starts, strict=True):
            if start > self.committed[row]:
                raise WrongInputError(
                    f"KV row {row} continues at position {start}: {self.committed[row]} of its pairs are committed"
                )
