"""Arguments and results of the operations on draft trees, on every device."""

from typing import NamedTuple

from torch import Tensor


class WalkResult(NamedTuple):
    """Accepted path of each tree, and the tokens it emits."""

    nodes: Tensor
    """int64 [num_reqs, max_path]: node 0, then the accepted nodes; the last node is repeated to the end."""
    num_tokens: Tensor
    """int64 [num_reqs]: 1 + accepted nodes, 1..max_path."""
    token_ids: Tensor
    """int64 [num_reqs, max_path]: the target's choice at nodes[j] for j < num_tokens, then 0."""


class Frontier(NamedTuple):
    """Nodes of one level that are expanded next, best first."""

    token_ids: Tensor
    """int64 [num_reqs, top_k]."""
    table_index: Tensor
    """int64 [num_reqs, top_k]: entries of the nodes in the table."""
    scores: Tensor
    """float32 [num_reqs, top_k]: cumulative log-probability; -inf for missing candidates."""
    frontier_parent: Tensor
    """int64 [num_reqs, top_k]: index into the previous frontier (0 after the root's level)."""
    visible: Tensor | None = None
    """[num_reqs, top_k, n]: each node's mask, which is its parent's and its own; None if no masks are asked for."""


class GrownTree(NamedTuple):
    """Finished draft tree; node 0 is the root. Padding has token 0, parent 0, depth 0 and score -inf."""

    token_ids: Tensor
    """int64 [num_reqs, num_nodes]."""
    parents: Tensor
    """int64 [num_reqs, num_nodes]: below the node's own index; -1 for the root."""
    depths: Tensor
    """int64 [num_reqs, num_nodes]; 0 for the root."""
    scores: Tensor
    """float32 [num_reqs, num_nodes]: cumulative log-probability; 0 for the root."""
    num_valid: Tensor
    """int64 [num_reqs]: nodes that count, root included."""


class Coupling(NamedTuple):
    """Parameters of the noise by which the target will choose, for ranking candidates; [num_reqs] each."""

    temperatures: Tensor
    """float32; at 0 candidates are ranked by their logits."""
    seeds: Tensor
    """int64."""
    positions: Tensor
    """int64: position that the candidates will have."""

    def tempered(self) -> "Coupling":
        """Coupling for logits that are already divided by the temperatures."""
        return self._replace(temperatures=self.temperatures.sign())


class Candidates(NamedTuple):
    """Continuations of some nodes, best first."""

    token_ids: Tensor
    """int64 [num_reqs, width, top_k], in the target's vocabulary."""
    log_probs: Tensor
    """float32 [num_reqs, width, top_k]."""
