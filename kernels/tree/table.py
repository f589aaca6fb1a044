"""Growth of EAGLE-2 trees: a table of candidates, level by level. Torch reference and CPU path.

As in `tree`, no function loops over nodes or requests, has data-dependent shapes or waits for the device. CUDA tensors
use the kernels of `kernels.gpu.tree.table`.
"""

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.tree.candidates import top_candidates
from wingbeat.kernels.tree.results import Coupling, Frontier, GrownTree


def inherited(before: Frontier | None, parents: Tensor, itself: Tensor | None) -> Tensor | None:
    """Masks of a frontier's nodes: their parents' masks and their own; `Frontier.visible`.

    Args:
        before: the previous frontier; None if the nodes are children of the root.
        parents: int64 [num_reqs, top_k], indices into the previous frontier.
        itself: [top_k, n], bool or packed as by `pack_mask`: masks in which each node sees only itself; or None.
    """
    if itself is None:
        return None
    if before is None:
        return itself.expand(len(parents), -1, -1)
    return before.visible.gather(1, parents[..., None].expand(-1, -1, itself.shape[1])) | itself


def select_frontier(scores: Tensor, count: int) -> Tensor:
    """Indices of the best `count` scores, best first; ties go to the lower index.

    Args:
        scores: float32 [num_reqs, num_candidates].

    Returns:
        int64 [num_reqs, count].
    """
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]


def _packed(itself: Tensor | None) -> Tensor | None:
    return itself if itself is not None and itself.dtype == torch.int64 else None


class TreeTable:
    """All candidates of a growing EAGLE-2 tree, level by level (EAGLE-2, arXiv:2406.16858, section 4).

    The root has top_k children; each later level expands the top_k nodes of the previous level with the best cumulative
    log-probability, into top_k children each. Entry 0 is the root, entries 1..top_k are its children, then come
    top_k**2 entries per level. A table is reusable, because level 0 starts the next tree in the same memory. top_k = 1
    grows a chain.
    """

    def __init__(self, num_reqs: int, top_k: int, steps: int, device: torch.device | str) -> None:
        if top_k < 1 or steps < 1:
            raise ValueError(f"top_k is {top_k} and steps is {steps}: both must be at least 1")
        self.num_reqs, self.top_k, self.steps = num_reqs, top_k, steps
        self.size = 1 + top_k + (steps - 1) * top_k * top_k
        self._token_ids = torch.zeros(num_reqs, self.size, dtype=torch.int64, device=device)
        self._parents = torch.zeros(num_reqs, self.size, dtype=torch.int64, device=device)
        self._scores = torch.full((num_reqs, self.size), float("-inf"), dtype=torch.float32, device=device)
        # Computed on the device, because tables are created in the middle of a round, where an upload would make the
        # host wait.
        below = torch.arange(self.size, device=device) - 1
        self._depths = (below >= 0).long() + (below >= top_k) * (1 + (below - top_k) // (top_k * top_k))
        self._frontier: Frontier | None = None

    def add_level(
        self, level: int, candidate_token_ids: Tensor, candidate_log_probs: Tensor, itself: Tensor | None = None
    ) -> Frontier:
        """Enters the children of the current frontier's nodes, and selects the next frontier.

        Args:
            level: 0 for the root's children, then one more each call, below `steps`.
            candidate_token_ids: int64 [num_reqs, frontier, top_k]; frontier is 1 at level 0 and top_k afterwards.
            candidate_log_probs: float [num_reqs, frontier, top_k]; -inf marks a missing candidate.
            itself: see `inherited`; the previous levels had masks too.

        Raises:
            ValueError: the candidates do not have the level's shape, or the level before was never added.
        """
        width = 1 if level == 0 else self.top_k
        expected = (self.num_reqs, width, self.top_k)
        if tuple(candidate_token_ids.shape) != expected or candidate_log_probs.shape != candidate_token_ids.shape:
            raise ValueError(
                f"candidates of level {level} have shape {tuple(candidate_token_ids.shape)}: {expected} needed"
            )
        if level > 0 and (self._frontier is None or level >= self.steps):
            raise ValueError(f"level {level} of {self.steps} added without the level before it")
        before = None if level == 0 else self._frontier
        if kernels := choice.compiled("grow_tree", self._scores):
            entered = kernels.Level(before, self._tensors, self.level_start(level), _packed(itself))
            return self._grown(kernels.add_level(candidate_token_ids, candidate_log_probs, entered), before, itself)
        if level == 0:
            # This tree may not reach all levels. Scores that an earlier tree left in further levels are cleared, so
            # that they are never kept.
            self._scores[:, 1:].fill_(float("-inf"))
            log_probs, parents = candidate_log_probs, torch.zeros_like(candidate_token_ids)
        else:
            log_probs = candidate_log_probs
            parents = self._frontier.table_index[..., None].expand(expected)
        # NaN, like -inf, marks a missing candidate, and log-probabilities are at most 0. Float addition is monotone, so
        # a child's score never exceeds its parent's; on ties the parent, which is earlier in the table, is taken first.
        # Therefore the parents of the best entries are always among the best entries.
        log_probs = torch.nan_to_num(log_probs.to(torch.float32), nan=float("-inf"), neginf=float("-inf")).clamp(
            max=0.0
        )
        scores = log_probs if level == 0 else self._frontier.scores[..., None] + log_probs
        frontier = self._enter(level, candidate_token_ids.flatten(1), parents.flatten(1), scores.flatten(1))
        return self._grown(frontier, before, itself)

    def add_best(
        self,
        level: int,
        logits: Tensor,
        draft_token_ids: Tensor,
        coupling: Coupling | None,
        counters: Tensor | None,
        itself: Tensor | None,
    ) -> tuple[Frontier, Tensor]:
        """Enters the likeliest children by logits [num_reqs, frontier, draft_vocab_size], in one launch on CUDA.

        Returns:
            The next frontier, and the candidates' log-probabilities.

        See `top_candidates` and `add_level`.
        """
        grows, selects = (choice.compiled(name, logits) for name in ("grow_tree", "top_candidates"))
        if not (grows and selects):
            found = top_candidates(logits, draft_token_ids, self.top_k, coupling, counters)
            return self.add_level(level, *found, itself), found.log_probs
        before = None if level == 0 else self._frontier
        entered = grows.Level(before, self._tensors, self.level_start(level), _packed(itself))
        found, frontier = selects.grown_candidates(logits, draft_token_ids, self.top_k, coupling, counters, entered)
        return self._grown(frontier, before, itself), found.log_probs

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._token_ids, self._parents, self._scores

    def _grown(self, frontier: Frontier, before: Frontier | None, itself: Tensor | None) -> Frontier:
        if frontier.visible is None:
            frontier = frontier._replace(visible=inherited(before, frontier.frontier_parent, itself))
        self._frontier = frontier
        return frontier

    def level_start(self, level: int) -> int:
        """Index of a level's first entry; the children of frontier node f begin top_k * f entries later."""
        return 1 if level == 0 else 1 + self.top_k + (level - 1) * self.top_k * self.top_k

    def _enter(self, level: int, token_ids: Tensor, parents: Tensor, scores: Tensor) -> Frontier:
        """Writes a level [num_reqs, width * top_k] to the table; returns its best top_k entries as the frontier."""
        begin = self.level_start(level)
        entries = slice(begin, begin + token_ids.shape[1])
        self._token_ids[:, entries] = token_ids
        self._parents[:, entries] = parents
        self._scores[:, entries] = scores
        best = select_frontier(scores, self.top_k)
        parent = torch.zeros_like(best) if level == 0 else best // self.top_k
        return Frontier(token_ids.gather(1, best), best + begin, scores.gather(1, best), parent)

    def finalize(self, root_token_ids: Tensor, num_nodes: int) -> GrownTree:
        """Returns the root and the best num_nodes - 1 entries, renumbered in table order (by depth, parents first).

        Args:
            root_token_ids: int64 [num_reqs].
            num_nodes: nodes of the tree, at least 1; a smaller table is padded.

        Raises:
            ValueError: num_nodes is below 1.
        """
        if num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes}: it must be at least 1, the root")
        if kernels := choice.compiled("grow_tree", self._scores):
            return kernels.finalize(self._tensors, self._depths, root_token_ids, num_nodes)
        scores = self._scores[:, 1:]
        best = select_frontier(scores, min(num_nodes, self.size) - 1)
        # Missing candidates (scores of -inf) are sorted after real ones, so that the valid nodes come first in the
        # tree.
        missing = scores.gather(1, best) == float("-inf")
        order = (best + missing * self.size).sort(dim=1).values
        valid = order < self.size
        kept = torch.where(valid, order, order - self.size) + 1
        # `number` maps table entries to nodes of the finished tree; entry 0, the root, keeps number 0.
        number = torch.zeros_like(self._parents)
        number.scatter_(1, kept, torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept))
        parents = number.gather(1, self._parents.gather(1, kept))
        columns = (
            (root_token_ids[:, None], self._token_ids.gather(1, kept), 0),
            (torch.full_like(root_token_ids, -1)[:, None], parents, 0),
            (torch.zeros_like(root_token_ids)[:, None], self._depths[kept], 0),
            (torch.zeros_like(self._scores[:, :1]), self._scores.gather(1, kept), float("-inf")),
        )
        missing_columns = num_nodes - 1 - kept.shape[1]
        padded = [
            torch.nn.functional.pad(
                torch.cat((root, body.masked_fill(~valid, fill)), 1), (0, missing_columns), value=fill
            )
            for root, body, fill in columns
        ]
        return GrownTree(*padded, num_valid=1 + valid.sum(dim=1))
