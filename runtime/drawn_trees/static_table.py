"""Grows trees of a fixed shape; used instead of `kernels.tree.table.TreeTable`, which selects nodes by score.

The node indices are the same for every sequence and are on the device from the start.
"""

import torch
from torch import Tensor

from wingbeat.kernels.tree.results import Frontier, GrownTree
from wingbeat.kernels.tree.table import TreeTable, inherited
from wingbeat.runtime.drawn_trees.static_tree import StaticTree

_LEAST_LOG_PROB = -100.0
"""Log-probability of a disallowed candidate, which keeps its position in the tree but gives its paths almost no
probability.
"""


class StaticTable:
    """Trees of one batch size. The object is reused for all drafts, since adding level 0 starts new trees.

    Args:
        tree: the shape.
        num_reqs: number of sequences.
        top_k: number of candidates per expanded node, and of expanded nodes per level: `StaticTree.width`.
        device: device of the trees.
    """

    def __init__(self, tree: StaticTree, num_reqs: int, top_k: int, device: torch.device | str) -> None:
        self.num_reqs, self.top_k = num_reqs, top_k
        self._chosen: list[Tensor] = []
        """For each level, the candidates that become nodes, int64 [nodes]. They are indices into the candidates of all
        nodes expanded at the previous level.
        """
        self._expanded: list[Tensor] = []
        """Indices, for each level, of the candidates to expand, padded with the first of these indices, int64 [top_k].
        """
        parents, depths, before, begin, place = [-1], [0], 0, 1, {0: 0}
        for depth, level in enumerate(tree.levels(), 1):
            # `place` maps an expanded node of the previous level to its index among the expanded nodes.
            chosen = [place[parent] * top_k + rank for parent, rank in zip(level.parents, level.ranks, strict=True)]
            parents += [before + parent for parent in level.parents]
            depths += [depth] * len(chosen)
            place = {node: index for index, node in enumerate(level.expanded)}
            expanded = [chosen[node] for node in level.expanded] or chosen[:1]
            expanded += expanded[:1] * (top_k - len(expanded))
            self._chosen.append(torch.tensor(chosen, device=device))
            self._expanded.append(torch.tensor(expanded, device=device))
            before, begin = begin, begin + len(chosen)
        self._parents, self._depths = (torch.tensor(given, device=device) for given in (parents, depths))
        self._token_ids: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._frontier: Frontier | None = None

    level_start = TreeTable.level_start

    def add_level(
        self, level: int, candidate_token_ids: Tensor, candidate_log_probs: Tensor, itself: Tensor | None = None
    ) -> Frontier:
        """See `TreeTable.add_level`; the candidates are int64 and float [num_reqs, 1 or top_k, top_k]."""
        scores = torch.nan_to_num(candidate_log_probs.to(torch.float32), nan=_LEAST_LOG_PROB, neginf=_LEAST_LOG_PROB)
        scores = scores.clamp(_LEAST_LOG_PROB, 0.0)
        before = None if level == 0 else self._frontier
        if before is None:
            self._token_ids, self._scores = [], []
        else:
            scores = before.scores[..., None] + scores
        token_ids, scores = candidate_token_ids.flatten(1), scores.flatten(1)
        chosen, expanded = self._chosen[level], self._expanded[level]
        self._token_ids.append(token_ids[:, chosen])
        self._scores.append(scores[:, chosen])
        index = expanded.expand(self.num_reqs, -1)
        parent = torch.zeros_like(index) if level == 0 else index // self.top_k
        self._frontier = Frontier(
            token_ids[:, expanded],
            index + self.level_start(level),
            scores[:, expanded],
            parent,
            inherited(before, parent, itself),
        )
        return self._frontier

    def finalize(self, root_token_ids: Tensor, num_nodes: int) -> GrownTree:
        """Returns the levels added so far as trees, with nodes ordered by depth; nodes of deeper levels are padding."""
        token_ids = torch.cat([root_token_ids[:, None], *self._token_ids], 1)
        scores = torch.cat([torch.zeros_like(self._scores[0][:, :1]), *self._scores], 1)
        grown = token_ids.shape[1]
        is_grown = torch.arange(num_nodes, device=token_ids.device) < grown
        pad = torch.nn.functional.pad
        return GrownTree(
            token_ids=pad(token_ids, (0, num_nodes - grown)),
            parents=torch.where(is_grown, self._parents, 0).expand(self.num_reqs, -1),
            depths=torch.where(is_grown, self._depths, 0).expand(self.num_reqs, -1),
            scores=pad(scores, (0, num_nodes - grown), value=float("-inf")),
            num_valid=torch.full_like(root_token_ids, grown),
        )
