"""The draft engine and its three steps: prefill and accept commit KV, a proposal does not.

Pair j of a sequence is (the verifier's hidden state at position j, token j + 1), stored at j. A pair is known, with the
verifier's hidden state and zeros for the head's own, or drafted, the other way round.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.tensorrt.engine_config import DraftEngineConfig
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.session import EngineSession, EngineStage, WrongInputError
from wingbeat.runtime.tensorrt.stage_runner import MASK, START, StageRunner


class DraftOutput(NamedTuple):
    """What a step yields."""

    logits: Tensor
    """[num_seqs, draft_vocab_size], of a proposal [num_seqs, top_k, draft_vocab_size]"""
    hidden: Tensor
    """[num_seqs, hidden_size], of a proposal [num_seqs, top_k, hidden_size]"""


class DraftRunner:
    """Runs the draft engine.

    Args:
        session: of `eagle_draft`.
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
        self.stages = StageRunner(session, kv, config.limits.max_batch_size, graph_device)
        self.committed = torch.zeros(kv.num_blocks, dtype=torch.int64, device=session.device)
        """int64 [num_rows]: pairs of each KV row that are committed."""
        self._device = session.device
        self._keys = torch.arange(kv.block_size, device=self._device)

    def capture(self, tree_size: int, top_k: int, max_path: int) -> bool:
        """Capture proposals of padded trees and accepts of padded paths; False if a stage has to run eagerly."""
        done = [
            self.stages.capture(EngineStage.PROPOSAL, tree_size, top_k),
            self.stages.capture(EngineStage.ACCEPT, max_path, 1),
        ]
        return all(done)

    def prefill(
        self, rows: list[int], token_ids: Tensor, base_hidden: Tensor, starts: Tensor, lengths: Tensor
    ) -> DraftOutput:
        """Pairs of a prompt; commits.

        Args:
            rows: of the KV, by sequence.
            token_ids: int64 [num_seqs, num_padded], each one position after its hidden state.
            base_hidden: [num_seqs, num_padded, base_model_hidden_size]
            starts: int64 [num_seqs], pairs there already.
            lengths: int64 [num_seqs], pairs that count.

        Returns:
            Logits and hidden state of each sequence's last pair.
        """
        most = self.config.limits.max_input_len
        if token_ids.shape[1] > most:
            raise WrongInputError(f"a prefill of {token_ids.shape[1]} tokens a sequence: max_input_len is {most}")
        return self._commit(EngineStage.PREFILL, rows, token_ids, base_hidden, starts, lengths)

    def accept(
        self, rows: list[int], token_ids: Tensor, base_hidden: Tensor, starts: Tensor, counts: Tensor
    ) -> DraftOutput:
        """Accepted tokens with the verifier's hidden states; commits.

        Args:
            token_ids: int64 [num_seqs, num_padded]
            base_hidden: [num_seqs, num_padded, base_model_hidden_size]
            starts: int64 [num_seqs]
            counts: int64 [num_seqs], accepted tokens.

        Returns:
            Logits and hidden state of each sequence's last accepted token.
        """
        return self._commit(EngineStage.ACCEPT, rows, token_ids, base_hidden, starts, counts)

    def proposal(
        self,
        rows: list[int],
        token_ids: Tensor,
        draft_hidden: Tensor,
        depths: Tensor,
        visible: Tensor,
        starts: Tensor,
        selected: Tensor,
    ) -> DraftOutput:
        """The whole tree so far, behind what is committed; does not commit.

        Args:
            token_ids: int64 [num_seqs, num_padded]
            draft_hidden: [num_seqs, num_padded, draft_model_hidden_size], of each node's parent.
            depths: int64 [num_seqs, num_padded], 0 for children of the root.
            visible: bool [num_seqs, num_padded, num_padded], nodes that each node sees, itself included.
            starts: int64 [num_seqs], pairs that are committed.
            selected: int64 [num_seqs, top_k], nodes whose outputs are wanted.

        Returns:
            Logits and hidden states of the selected nodes.

        Raises:
            WrongInputError: the tree is too large, or a sequence's context was not committed; names the value.
        """
        num_nodes, most = token_ids.shape[1], self.config.limits.max_draft_tree_size
        if num_nodes > most:
            raise WrongInputError(f"a tree of {num_nodes} drafted nodes: max_draft_tree_size is {most}")
        self._check_context(rows, starts)
        mask = (self._keys < starts[:, None]).unsqueeze(1).repeat(1, num_nodes, 1)
        columns = (starts[:, None] + torch.arange(num_nodes, device=starts.device))[:, None].expand_as(visible)
        # Where the capacity ends there are no columns left; the check of the stage names that.
        mask.scatter_(2, columns.clamp_max(self.kv.block_size - 1), visible)
        zeros = self._zeros(token_ids, self.config.base_model_hidden_size, draft_hidden.dtype)
        return self._run(
            EngineStage.PROPOSAL,
            rows,
            (token_ids, zeros, draft_hidden, starts[:, None] + depths, starts, selected),
            mask,
        )

    def _commit(
        self,
        stage: EngineStage,
        rows: list[int],
        token_ids: Tensor,
        base_hidden: Tensor,
        starts: Tensor,
        counts: Tensor,
    ) -> DraftOutput:
        self._check_batch(rows, token_ids=token_ids, base_hidden=base_hidden, starts=starts, counts=counts)
        self._check_context(rows, starts)
        positions = starts[:, None] + torch.arange(token_ids.shape[1], device=starts.device)
        mask = self._keys <= positions[..., None]
        zeros = self._zeros(token_ids, self.config.draft_model_hidden_size, base_hidden.dtype)
        selected = (counts - 1).clamp_min(0)[:, None]
        output = self._run(stage, rows, (token_ids, base_hidden, zeros, positions, starts, selected), mask)
        self.committed[rows] = starts + counts
        return DraftOutput(output.logits[:, 0], output.hidden[:, 0])

    def _run(self, stage: EngineStage, rows: list[int], tensors: tuple[Tensor, ...], mask: Tensor) -> DraftOutput:
        inputs = dict(zip(_INPUTS, tensors, strict=True)) | {MASK: mask[:, None]}
        num_selected = inputs["last_token_ids"].shape[1]
        num_out = {"logits": num_selected, "hidden_states": num_selected}
        return DraftOutput(**_renamed(self.stages.run(stage, rows, inputs, num_out)))

    def _zeros(self, token_ids: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*token_ids.shape, size, dtype=dtype, device=self._device)

    def _check_batch(self, rows: list[int], **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            if len(tensor) != len(rows):
                raise WrongInputError(f"{name} is of {len(tensor)} sequences: the batch has {len(rows)}")

    def _check_context(self, rows: list[int], starts: Tensor) -> None:
        """What lies before a step must have been committed; looked at where that is no wait."""
        self._check_batch(rows, starts=starts)
        if self._device.type != "cpu" or not rows:
            return
        missing = starts - self.committed[rows]
        if int(missing.max()) > 0:
            index = int(missing.argmax())
            start, there = int(starts[index]), int(self.committed[rows[index]])
            raise WrongInputError(f"KV row {rows[index]} goes on from {start}: {there} pairs of it are committed")


_INPUTS = (
    "input_ids",
    "hidden_states_input",
    "hidden_states_from_draft",
    "attention_pos_id",
    START,
    "last_token_ids",
)


def _renamed(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"logits": outputs["logits"], "hidden": outputs["hidden_states"]}
