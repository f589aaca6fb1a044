"""Chains and EAGLE-2 dynamic trees over any model that says what may follow each node (arXiv:2406.16858, section 4).

Knows nothing of the model: it hands it the nodes of one level and gets their logits. Shapes follow from the batch and
the depth alone; on a device that is not the host nothing is waited for.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.tree.candidates import top_candidates
from wingbeat.kernels.tree.growth import TreeTable
from wingbeat.kernels.tree.results import Candidates, Coupling
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.protocol.messages import TokenTree


class Level(NamedTuple):
    """The nodes of one depth that are expanded; `width` is the top_k of the trees."""

    depth: int
    """From 1: children of the root."""
    token_ids: Tensor
    """int64 [num_reqs, width]"""
    parents: Tensor
    """int64 [num_reqs, width]: index of each node's parent among the nodes of the level before; 0 at depth 1."""
    visible: Tensor | None
    """bool [num_reqs, width, depth * width]: nodes of all levels so far, in their order, that each node sees:
    itself and its ancestors. None in a chain, where it is all of them."""


Expand = Callable[[Level], Tensor]
"""Logits [num_reqs, width, vocab_size] of what follows each node of a level."""


class Growth:
    """Grows the trees of one drafter.

    Args:
        draft_token_ids: int64 [vocab_size], the target's id of each column of the logits.
    """

    def __init__(self, speculation: SpeculationConfig, draft_token_ids: Tensor) -> None:
        self.speculation = speculation
        self.draft_token_ids = draft_token_ids
        self.top_k = speculation.draft_top_k
        self.max_depth = speculation.max_path - 1
        self._tables: dict[int, TreeTable] = {}

    def depth(self, batch: DraftBatch) -> int:
        """Levels to grow at most."""
        return self.max_depth if batch.max_levels is None else min(self.max_depth, batch.max_levels)

    def grow(
        self, batch: DraftBatch, slots: Tensor, root_token_ids: Tensor, logits: Tensor, expand: Expand
    ) -> TokenTree:
        """One tree per proposal.

        Args:
            slots: int64 [num_reqs], the proposals' on the drafter's device.
            root_token_ids: int64 [num_reqs].
            logits: [num_reqs, 1, vocab_size] of what follows the roots.
        """
        couplings = self._couplings(batch, slots)
        if self.top_k == 1:
            return self._grow_chain(batch, root_token_ids, logits, expand, couplings)
        return self._grow_tree(batch, root_token_ids, logits, expand, couplings)

    def _grow_chain(
        self, batch: DraftBatch, roots: Tensor, logits: Tensor, expand: Expand, couplings: list[Coupling | None]
    ) -> TokenTree:
        """The likeliest token after each token: what `_grow_tree` does with top_k 1, in fewer operations."""
        token_ids, log_probs = self._candidates(logits, couplings[0])
        drafted, scores = [token_ids[:, 0]], [log_probs[:, 0]]
        only = torch.zeros(len(roots), 1, dtype=torch.int64, device=roots.device)
        for depth in range(1, self.depth(batch)):
            if not _another_level_pays(batch, log_probs, only):
                break
            logits = expand(Level(depth, drafted[-1], only, None))
            token_ids, log_probs = self._candidates(logits, couplings[depth])
            drafted.append(token_ids[:, 0])
            scores.append(log_probs[:, 0])
        depths = torch.arange(len(drafted) + 1, device=roots.device).repeat(len(roots), 1)
        return TokenTree(
            token_ids=torch.cat([roots[:, None], *drafted], dim=1),
            parents=depths - 1,
            depths=depths,
            scores=torch.cat([torch.zeros_like(scores[0]), *scores], dim=1).cumsum(dim=1),
            num_valid=torch.full_like(roots, len(drafted) + 1),
        )

    def _grow_tree(
        self, batch: DraftBatch, roots: Tensor, logits: Tensor, expand: Expand, couplings: list[Coupling | None]
    ) -> TokenTree:
        """Each level expands the top_k best nodes of the level before by cumulative log-probability."""
        table, width = self._table(len(roots), roots.device), self.top_k
        token_ids, log_probs = self._candidates(logits, couplings[0])
        frontier = table.add_level(0, token_ids, log_probs)
        own = torch.eye(width, dtype=torch.bool, device=roots.device).expand(len(roots), -1, -1)
        visible = own[:, :, :0]
        for depth in range(1, self.depth(batch)):
            chosen = frontier.table_index - table.level_start(depth - 1)
            if not _another_level_pays(batch, log_probs, chosen):
                break
            parents = frontier.frontier_parent
            seen = visible.gather(1, parents[..., None].expand(-1, -1, visible.shape[2]))
            visible = torch.cat([seen, own], dim=2)
            logits = expand(Level(depth, frontier.token_ids, parents, visible))
            token_ids, log_probs = self._candidates(logits, couplings[depth])
            frontier = table.add_level(depth, token_ids, log_probs)
        return TokenTree(*table.finalize(roots, self.speculation.num_nodes))

    def _candidates(self, logits: Tensor, coupling: Coupling | None) -> Candidates:
        return top_candidates(logits, self.draft_token_ids, self.top_k, coupling)

    def _couplings(self, batch: DraftBatch, slots: Tensor) -> list[Coupling | None]:
        """By depth of the expanded nodes; None where all requests are known to be greedy."""
        temperatures = batch.temperatures[slots]
        if temperatures.device.type == "cpu" and not bool((temperatures > 0).any()):
            return [None] * self.max_depth
        seeds, lens = batch.seeds[slots], batch.committed_lens[slots]
        return [Coupling(temperatures, seeds, lens + depth) for depth in range(self.max_depth)]

    def _table(self, num_reqs: int, device: torch.device) -> TreeTable:
        if num_reqs not in self._tables:
            self._tables[num_reqs] = TreeTable(num_reqs, self.top_k, self.max_depth, device)
        return self._tables[num_reqs]


def of_parents(hidden: Tensor, level: Level) -> Tensor:
    """[num_reqs, nodes of the level before, size] -> [num_reqs, width, size]: what each node's parent has."""
    return hidden.gather(1, level.parents[..., None].expand(-1, -1, hidden.shape[2]))


def _another_level_pays(batch: DraftBatch, log_probs: Tensor, chosen: Tensor) -> bool:
    """Whether any verifier's rule wants another level; rules are there on the CPU alone."""
    if not batch.growth_rules:
        return True
    given, expanded = log_probs.numpy(), chosen.numpy()
    # Every rule is asked: each keeps the path probabilities of its rows.
    return any([rule.pays(given[rows], expanded[rows]) for rows, rule in batch.growth_rules])
