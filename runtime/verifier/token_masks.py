"""Which tokens a round may choose behind each node, where the host says so: found while the forward pass runs."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.processors import ProcessorTables

_ROOT = np.zeros(1, np.int64), np.full(1, -1, np.int64)


class TokenMasks:
    """Fills the masks of `ProcessorTables` for the masked sequences of a round, on a thread of its own.

    Args:
        chains: trees have no branches.
    """

    def __init__(self, tables: ProcessorTables, *, chains: bool) -> None:
        self._tables, self._chains = tables, chains
        self._thread: ThreadPoolExecutor | None = None

    def wanted(self, plan: SchedulerOutput) -> bool:
        """Whether a sequence of the round is masked."""
        seqs = (*plan.decodes, *(chunk.seq for chunk in plan.chunks if chunk.samples))
        return any(seq.masker is not None for seq in seqs)

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
            rows = upload([row for row, _ in decodes], trees.parents.device)
            # Copies: the round goes on with the tensors meanwhile.
            drafted = [field[rows].cpu().numpy() for field in (trees.token_ids, trees.parents, trees.num_valid)]
        return self._thread.submit(self._fill, decodes, roots, drafted)

    def draft_forced(self, plan: SchedulerOutput, trees: TokenTree | None, max_depth: int) -> TokenTree | None:
        """Draft what grammars leave no choice about, beside what the drafter drafted."""
        masked = [row for row, seq in enumerate(plan.decodes) if seq.masker is not None]
        if trees is None or not masked:
            return trees
        wanted = plan.with_trees()
        masked = [row for row in masked if wanted[row]]
        chains = {row: plan.decodes[row].masker.forced(max_depth) for row in masked}
        if not any(chains.values()):
            return trees
        trees = TokenTree(*(field.clone() for field in trees))
        for row, chain in chains.items():
            if chain:
                _add_chain(trees, row, chain, self._chains)
        return trees

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


def _add_chain(trees: TokenTree, row: int, chain: list[int], chains: bool) -> None:
    """Make a tree hold a path, in place: as a branch where there is room, else alone.

    Args:
        chains: trees have no branches.
    """
    num_nodes, num_valid = trees.token_ids.shape[1], int(trees.num_valid[row])
    token_ids, parents = (field[row, :num_valid].tolist() for field in (trees.token_ids, trees.parents))
    chain, node, num_known = chain[: num_nodes - 1], 0, 0
    for token_id in chain:
        children = (child for child in range(node + 1, num_valid) if parents[child] == node)
        child = next((child for child in children if token_ids[child] == token_id), None)
        if child is None:
            break
        node, num_known = child, num_known + 1
    rest = chain[num_known:]
    if not rest:
        return
    if (chains and node != num_valid - 1) or num_valid + len(rest) > num_nodes:
        node, rest, num_valid = 0, chain, 1
    depth, end = int(trees.depths[row, node]), num_valid + len(rest)
    steps = torch.arange(len(rest), device=trees.parents.device)
    trees.token_ids[row, num_valid:end] = torch.tensor(rest, device=steps.device)
    trees.parents[row, num_valid:end] = num_valid + steps - 1
    trees.parents[row, num_valid] = node
    trees.depths[row, num_valid:end] = depth + 1 + steps
    trees.scores[row, num_valid:end] = 0.0
    trees.num_valid[row] = end
