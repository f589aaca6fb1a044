"""Token trees as tensors: ancestor masks, the acceptance walk and EAGLE-2 growth; the torch reference and the CPU path.

A tree is `token_ids` and `parents` [num_reqs, num_nodes]: node 0 is the root (parent -1), every other node's parent has
a smaller index, and nodes from num_valid on are padding. Nothing here loops over nodes or requests, changes shape with
the data or waits for the device, so all of it can be captured in a CUDA graph. CUDA tensors go to the kernels of
`triton_tree`. Knows nothing of models or caches.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.noise import gumbel_noise

_WORD_BITS = 64


class WalkResult(NamedTuple):
    """The accepted path of each tree and the tokens it emits."""

    nodes: Tensor
    """int64 [num_reqs, max_path]: node 0, then the accepted nodes; the last one repeated to the end."""
    num_tokens: Tensor
    """int64 [num_reqs]: 1 + accepted nodes, 1..max_path."""
    token_ids: Tensor
    """int64 [num_reqs, max_path]: the target's choice at nodes[j] for j < num_tokens, then 0."""


class Frontier(NamedTuple):
    """The nodes of one level that are expanded next, best first."""

    token_ids: Tensor
    """int64 [num_reqs, top_k]"""
    table_index: Tensor
    """int64 [num_reqs, top_k]: their entries in the table."""
    scores: Tensor
    """float32 [num_reqs, top_k]: cumulative log-probability; -inf where there was no candidate."""
    frontier_parent: Tensor
    """int64 [num_reqs, top_k]: index into the previous frontier (0 after the root's level)."""


class GrownTree(NamedTuple):
    """A finished tree; node 0 is the root and padding has token 0, parent 0, depth 0 and score -inf."""

    token_ids: Tensor
    """int64 [num_reqs, num_nodes]"""
    parents: Tensor
    """int64 [num_reqs, num_nodes]: below the node's own index; -1 for the root."""
    depths: Tensor
    """int64 [num_reqs, num_nodes]; 0 for the root."""
    scores: Tensor
    """float32 [num_reqs, num_nodes]: cumulative log-probability; 0 for the root."""
    num_valid: Tensor
    """int64 [num_reqs]: nodes that count, root included."""


class PackedTree(NamedTuple):
    """A finished tree and what its verification needs of it."""

    tree: GrownTree
    ancestor_words: Tensor
    """int64 [num_reqs, num_nodes, ceil(num_nodes / 64)], as `ancestor_words`; padding sees itself and the root."""
    positions: Tensor
    """int64 [num_reqs, num_nodes]: root position + depth; the root's for padding."""


class Coupling(NamedTuple):
    """The noise the target will choose with, to rank candidates by; [num_reqs] each."""

    temperatures: Tensor
    """float32; at 0 candidates are ranked by their logits."""
    seeds: Tensor
    """int64"""
    positions: Tensor
    """int64: position the candidates will have."""


class Candidates(NamedTuple):
    """Continuations of some nodes, best first."""

    token_ids: Tensor
    """int64 [num_reqs, width, top_k]: in the target's vocabulary."""
    log_probs: Tensor
    """float32 [num_reqs, width, top_k]"""


def ancestor_mask(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """Which nodes each node sees: itself and its ancestors.

    Padding may have any parent below its own index: it sees itself and that chain, and no valid node sees it.

    Args:
        parents: int64 [num_reqs, num_nodes].
        max_depth: depth of the deepest node, the loop bound; num_nodes - 1 when not given.

    Returns:
        bool [num_reqs, num_nodes, num_nodes]: row node sees column node.
    """
    if parents.is_cuda:
        from wingbeat.kernels import triton_tree

        return triton_tree.ancestors(parents, max_depth, pack=False)
    num_reqs, num_nodes = parents.shape
    up = parents.clamp(min=0)
    ancestor = torch.arange(num_nodes, device=parents.device).expand(num_reqs, num_nodes)
    mask = torch.zeros(num_reqs, num_nodes, num_nodes, dtype=torch.bool, device=parents.device)
    mask.scatter_(2, ancestor[..., None], True)
    for _ in range(num_nodes - 1 if max_depth is None else max_depth):
        ancestor = up.gather(1, ancestor)
        mask.scatter_(2, ancestor[..., None], True)
    return mask


def pack_mask(mask: Tensor) -> Tensor:
    """Pack the last dimension of a bool mask into words: bit b of word w is column 64 * w + b.

    Args:
        mask: bool [num_reqs, num_nodes, num_nodes].

    Returns:
        int64 [num_reqs, num_nodes, ceil(num_nodes / 64)]; column 63 of a word is its sign bit.
    """
    num_columns = mask.shape[-1]
    num_words = -(-num_columns // _WORD_BITS)
    padded = torch.nn.functional.pad(mask, (0, num_words * _WORD_BITS - num_columns))
    bits = torch.arange(_WORD_BITS, device=mask.device)
    return (padded.unflatten(-1, (num_words, _WORD_BITS)).to(torch.int64) << bits).sum(dim=-1)


def ancestor_words(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """`ancestor_mask`, packed as `pack_mask` does: int64 [num_reqs, num_nodes, ceil(num_nodes / 64)]."""
    if parents.is_cuda:
        from wingbeat.kernels import triton_tree

        return triton_tree.ancestors(parents, max_depth, pack=True)
    return pack_mask(ancestor_mask(parents, max_depth))


def path_token_ids(token_ids: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    """Tokens from each node up to the root's child: the history a node has beyond the root's.

    Args:
        token_ids: int64 [num_reqs, num_nodes].
        parents: int64 [num_reqs, num_nodes].
        max_depth: depth of the deepest node.

    Returns:
        int64 [num_reqs, num_nodes, max_depth]: the node's own token, its parent's and so on; -1 from the root on.
    """
    if parents.is_cuda:
        from wingbeat.kernels import triton_tree

        return triton_tree.path_token_ids(token_ids, parents, max_depth)
    up = parents.clamp(min=0)
    path = torch.empty(*token_ids.shape, max_depth, dtype=torch.int64, device=token_ids.device)
    node = torch.arange(token_ids.shape[1], device=token_ids.device).expand(token_ids.shape)
    for step in range(max_depth):
        path[:, :, step] = torch.where(node > 0, token_ids.gather(1, node), -1)
        node = up.gather(1, node)
    return path


def unpack_mask(words: Tensor, num_nodes: int) -> Tensor:
    """Undo `pack_mask`.

    Args:
        words: int64 [num_reqs, num_nodes, num_words].
        num_nodes: columns of the mask, at most 64 * num_words.

    Returns:
        bool [num_reqs, num_nodes, num_nodes].
    """
    bits = torch.arange(_WORD_BITS, device=words.device)
    return ((words[..., None] >> bits) & 1).flatten(-2)[..., :num_nodes].to(torch.bool)


def walk_tree(
    token_ids: Tensor, parents: Tensor, num_valid: Tensor, target_token_ids: Tensor, max_path: int
) -> WalkResult:
    """Follow the target's choices from the root; of equal children the one with the lowest index is taken.

    Following the child that equals the target's own choice emits exactly what the target would emit without a tree.

    Args:
        token_ids: int64 [num_reqs, num_nodes].
        parents: int64 [num_reqs, num_nodes].
        num_valid: int64 [num_reqs]: nodes that count, root included; the root always counts.
        target_token_ids: int64 [num_reqs, num_nodes]: the token the target chooses after each node.
        max_path: most tokens a walk may emit, at least 1.
    """
    if token_ids.is_cuda:
        from wingbeat.kernels import triton_tree

        return triton_tree.walk_tree(token_ids, parents, num_valid, target_token_ids, max_path)
    num_reqs, num_nodes = token_ids.shape
    index = torch.arange(num_nodes, device=token_ids.device)
    up = parents.clamp(min=0)
    follows = (token_ids == target_token_ids.gather(1, up)) & (index < num_valid[:, None]) & (index > 0)
    # Each node has at most one chosen child, found for all nodes at once; num_nodes stands for none.
    chosen_child = torch.full_like(parents, num_nodes)
    chosen_child.scatter_reduce_(1, up, torch.where(follows, index, num_nodes), reduce="amin")
    node = torch.zeros(num_reqs, 1, dtype=torch.int64, device=token_ids.device)
    path, walking = [node], [torch.ones_like(node, dtype=torch.bool)]
    for _ in range(max_path - 1):
        child = chosen_child.gather(1, node)
        # A node without a chosen child stays without one: the walk cannot resume.
        moved = child < num_nodes
        node = torch.where(moved, child, node)
        path.append(node)
        walking.append(moved)
    nodes, emitted = torch.cat(path, dim=1), torch.cat(walking, dim=1)
    return WalkResult(nodes, emitted.sum(dim=1), target_token_ids.gather(1, nodes).masked_fill_(~emitted, 0))


def top_candidates(logits: Tensor, draft_token_ids: Tensor, top_k: int, coupling: Coupling | None = None) -> Candidates:
    """The likeliest continuations of each node and their log-probabilities.

    With a coupling the scores are logits / temperature + Gumbel noise, and so are what the log-softmax is of: the best
    of them is likeliest to equal the target's own choice (Daliri et al., arXiv:2408.07978). Of equal scores the kernel
    takes the lower draft index, and the CPU path any.

    Args:
        logits: [num_reqs, width, draft_vocab_size], any float type.
        draft_token_ids: int64 [draft_vocab_size]: the target's id of each draft token.
        top_k: candidates of a node, 1 to draft_vocab_size.

    Raises:
        ValueError: top_k is out of range, or draft_token_ids does not have the logits' vocabulary.
    """
    vocab_size = logits.shape[-1]
    if not 1 <= top_k <= vocab_size:
        raise ValueError(f"top_k is {top_k}: it must be 1 to {vocab_size}, the size of the draft vocabulary")
    if draft_token_ids.shape != (vocab_size,):
        raise ValueError(f"draft_token_ids is {list(draft_token_ids.shape)} and the logits have {vocab_size} columns")
    if logits.is_cuda:
        from wingbeat.kernels import triton_tree

        return triton_tree.top_candidates(logits, draft_token_ids, top_k, coupling)
    scores = logits.to(torch.float32)
    if coupling is not None:
        sampled = (coupling.temperatures > 0)[:, None]
        noise = gumbel_noise(coupling.seeds, coupling.positions, draft_token_ids).masked_fill_(~sampled, 0.0)
        scores = scores / torch.where(sampled, coupling.temperatures[:, None], 1.0)[..., None] + noise[:, None]
    if top_k == 1:  # three passes over the vocabulary where the general form needs five
        likeliest = scores.softmax(dim=-1).max(dim=-1, keepdim=True)
        return Candidates(draft_token_ids[likeliest.indices], likeliest.values.log())
    best = torch.topk(scores, top_k, dim=-1)
    return Candidates(draft_token_ids[best.indices], best.values - torch.logsumexp(scores, dim=-1, keepdim=True))


def select_frontier(scores: Tensor, count: int) -> Tensor:
    """Indices of the best `count` scores, best first; of equal scores the lower index comes first.

    Args:
        scores: float32 [num_reqs, num_candidates].

    Returns:
        int64 [num_reqs, count].
    """
    return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]


class TreeTable:
    """Every candidate of a growing EAGLE-2 tree, level by level (EAGLE-2, arXiv:2406.16858, section 4).

    The root has top_k children; then each level expands the top_k best nodes of the level before by cumulative
    log-probability, each into top_k children. Entry 0 is the root, entries 1..top_k its children, then top_k**2 a
    level. A table is reusable: level 0 starts the next tree in the same memory. top_k = 1 grows a chain.
    """

    def __init__(self, num_reqs: int, top_k: int, steps: int, device: torch.device | str) -> None:
        if top_k < 1 or steps < 1:
            raise ValueError(f"top_k is {top_k} and steps is {steps}: both must be at least 1")
        self.num_reqs, self.top_k, self.steps = num_reqs, top_k, steps
        self.size = 1 + top_k + (steps - 1) * top_k * top_k
        self._token_ids = torch.zeros(num_reqs, self.size, dtype=torch.int64, device=device)
        self._parents = torch.zeros(num_reqs, self.size, dtype=torch.int64, device=device)
        self._scores = torch.full((num_reqs, self.size), float("-inf"), dtype=torch.float32, device=device)
        widths = torch.tensor([1, top_k] + [top_k * top_k] * (steps - 1), device=device)
        self._depths = torch.repeat_interleave(torch.arange(steps + 1, device=device), widths, output_size=self.size)
        self._frontier: Frontier | None = None

    def add_level(self, level: int, candidate_token_ids: Tensor, candidate_log_probs: Tensor) -> Frontier:
        """Enter the children of the current frontier and choose the next one.

        Args:
            level: 0 for the root's children, then one more each call, below `steps`.
            candidate_token_ids: int64 [num_reqs, frontier, top_k]; frontier is 1 at level 0 and top_k afterwards.
            candidate_log_probs: float [num_reqs, frontier, top_k]; -inf marks a missing candidate.

        Raises:
            ValueError: the candidates do not have the level's shape, or the level before it was never added.
        """
        width = 1 if level == 0 else self.top_k
        expected = (self.num_reqs, width, self.top_k)
        if tuple(candidate_token_ids.shape) != expected or candidate_log_probs.shape != candidate_token_ids.shape:
            raise ValueError(f"level {level} wants candidates of shape {expected}, got {candidate_token_ids.shape}")
        if level > 0 and (self._frontier is None or level >= self.steps):
            raise ValueError(f"level {level} of {self.steps} added without the level before it")
        if self._scores.is_cuda:
            from wingbeat.kernels import triton_tree

            previous = None if level == 0 else self._frontier
            table = (self._token_ids, self._parents, self._scores)
            self._frontier = triton_tree.add_level(
                candidate_token_ids, candidate_log_probs, previous, table, self.level_start(level)
            )
            return self._frontier
        if level == 0:
            # Levels of an earlier tree that this one may not reach must not be kept.
            self._scores[:, 1:].fill_(float("-inf"))
            log_probs, parents = candidate_log_probs, torch.zeros_like(candidate_token_ids)
        else:
            log_probs = candidate_log_probs
            parents = self._frontier.table_index[..., None].expand(expected)
        # A child never beats its parent: with NaN as "no candidate" and no log-probability above 0, float addition is
        # monotone, and equal scores are settled by table order. So the best entries are always closed under parents.
        log_probs = torch.nan_to_num(log_probs.to(torch.float32), nan=float("-inf"), neginf=float("-inf")).clamp(
            max=0.0
        )
        scores = log_probs if level == 0 else self._frontier.scores[..., None] + log_probs
        return self._enter(level, candidate_token_ids.flatten(1), parents.flatten(1), scores.flatten(1))

    def level_start(self, level: int) -> int:
        """Index of a level's first entry; its children of frontier node f begin top_k * f later."""
        return 1 if level == 0 else 1 + self.top_k + (level - 1) * self.top_k * self.top_k

    def _enter(self, level: int, token_ids: Tensor, parents: Tensor, scores: Tensor) -> Frontier:
        """Write a level [num_reqs, width * top_k] into the table and keep its best top_k as the frontier."""
        begin = self.level_start(level)
        entries = slice(begin, begin + token_ids.shape[1])
        self._token_ids[:, entries] = token_ids
        self._parents[:, entries] = parents
        self._scores[:, entries] = scores
        best = select_frontier(scores, self.top_k)
        parent = torch.zeros_like(best) if level == 0 else best // self.top_k
        self._frontier = Frontier(token_ids.gather(1, best), best + begin, scores.gather(1, best), parent)
        return self._frontier

    def finalize(self, root_token_ids: Tensor, num_nodes: int) -> GrownTree:
        """The best num_nodes - 1 entries and the root, renumbered in table order (so by depth, parents first).

        Args:
            root_token_ids: int64 [num_reqs].
            num_nodes: nodes of the tree, at least 1; a smaller table is padded.

        Raises:
            ValueError: num_nodes is below 1.
        """
        if num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes}: a tree has at least its root")
        if self._scores.is_cuda:
            return self._finalize_on_gpu(root_token_ids, num_nodes, None).tree
        scores = self._scores[:, 1:]
        best = select_frontier(scores, min(num_nodes, self.size) - 1)
        # Missing candidates sort behind every real one, so that valid nodes come first.
        missing = scores.gather(1, best) == float("-inf")
        order = (best + missing * self.size).sort(dim=1).values
        valid = order < self.size
        kept = torch.where(valid, order, order - self.size) + 1
        # Renumbered by a scatter over the table; entry 0 is the root and keeps number 0.
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

    def finalize_packed(self, root_token_ids: Tensor, num_nodes: int, root_positions: Tensor) -> PackedTree:
        """`finalize`, with the tree's ancestor words and positions.

        Args:
            root_token_ids: int64 [num_reqs].
            num_nodes: as for `finalize`.
            root_positions: int64 [num_reqs].

        Raises:
            ValueError: num_nodes is below 1.
        """
        if self._scores.is_cuda and num_nodes >= 1:
            return self._finalize_on_gpu(root_token_ids, num_nodes, root_positions)
        tree = self.finalize(root_token_ids, num_nodes)
        return PackedTree(tree, ancestor_words(tree.parents, self.steps), root_positions[:, None] + tree.depths)

    def _finalize_on_gpu(self, root_token_ids: Tensor, num_nodes: int, root_positions: Tensor | None) -> PackedTree:
        from wingbeat.kernels import triton_tree

        table = (self._token_ids, self._parents, self._scores)
        return triton_tree.finalize(table, self._depths, root_token_ids, num_nodes, self.steps, root_positions)
