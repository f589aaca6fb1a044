"""Which tokens a round may choose behind each node, where the host says so: found while the forward pass runs."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.processors import ProcessorTables

_ROOT = np.zeros(1, np.int64), np.full(1, -1, np.int64)


class TokenMasks:
    """Fills the masks of `ProcessorTables` for the masked sequences of a round, on a thread of its own."""

    def __init__(self, tables: ProcessorTables) -> None:
        self._tables = tables
        self._thread: ThreadPoolExecutor | None = None

    def start(self, plan: SchedulerOutput, trees: TokenTree | None) -> "Future[list[int]] | None":
        """Begin; None where no sequence of the round is masked.

        Returns:
            The decodes of whose trees only the root's mask was found in time: the others' nodes must not count.
        """
        decodes = [(row, seq) for row, seq in enumerate(plan.decodes) if seq.masker is not None]
        roots = [chunk.seq for chunk in plan.chunks if chunk.samples and chunk.seq.masker is not None]
        if not decodes and not roots:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="wingbeat-masks")
        drafted = None
        if trees is not None:
            rows = [row for row, _ in decodes]
            # Copies: the round goes on with the tensors meanwhile.
            drafted = [field[rows].cpu().numpy() for field in (trees.token_ids, trees.parents, trees.num_valid)]
        return self._thread.submit(self._fill, decodes, roots, drafted)

    def draft_forced(self, plan: SchedulerOutput, trees: TokenTree | None, max_depth: int) -> TokenTree | None:
        """Draft what a grammar leaves no choice about: a chain of probability one, where no tree has it already."""
        wanted = plan.with_trees()
        masked = [row for row, seq in enumerate(plan.decodes) if seq.masker is not None and wanted[row]]
        if trees is None or not masked:
            return trees
        most = min(max_depth, trees.token_ids.shape[1] - 1)
        chains = {row: plan.decodes[row].masker.forced(most) for row in masked}
        chains = {row: chain for row, chain in chains.items() if chain}
        if not chains:
            return trees
        trees = TokenTree(*(field.clone() for field in trees))
        for row, chain in chains.items():
            self._draft(trees, row, chain)
        return trees

    @staticmethod
    def _draft(trees: TokenTree, row: int, chain: list[int]) -> None:
        """Put a chain in the place of a row's tree, unless the tree begins with it and goes on."""
        num_nodes = len(chain) + 1
        own = trees.token_ids[row, 1:num_nodes].tolist(), trees.parents[row, 1:num_nodes].tolist()
        if trees.num_valid[row] >= num_nodes and own == (chain, list(range(len(chain)))):
            return
        steps = torch.arange(num_nodes, device=trees.parents.device)
        trees.token_ids[row, 1:num_nodes] = torch.tensor(chain, device=steps.device)
        trees.parents[row, :num_nodes] = steps - 1
        trees.depths[row, :num_nodes] = steps
        trees.scores[row, :num_nodes] = 0.0
        trees.num_valid[row] = num_nodes

    @torch.inference_mode()
    def _fill(
        self, decodes: list[tuple[int, Sequence]], roots: list[Sequence], drafted: list[np.ndarray] | None
    ) -> list[int]:
        late = []
        for index, (row, seq) in enumerate(decodes):
            token_ids, parents = _ROOT
            if drafted is not None:
                num_valid = drafted[2][index]
                token_ids, parents = (field[index, :num_valid] for field in drafted[:2])
            if not self._fill_one(seq, token_ids, parents):
                late.append(row)
        for seq in roots:
            self._fill_one(seq, *_ROOT)
        return late

    def _fill_one(self, seq: Sequence, token_ids: np.ndarray, parents: np.ndarray) -> bool:
        table = self._tables.masks[seq.slot]
        masks = np.zeros((len(token_ids), table.shape[1]), np.int32)
        in_time = seq.masker.fill(token_ids, parents, masks)
        table[: len(masks)] = torch.from_numpy(masks).to(table.device)
        return in_time
