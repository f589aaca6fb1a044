"""Draft trees whose shape a user has drawn."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wingbeat.runtime.drawn_trees.static_table import StaticTable
    from wingbeat.runtime.drawn_trees.static_tree import StaticTree


def drawn_tree(given: Any) -> "StaticTree":
    """Tree of these paths. Raises ValueError for paths that are no tree."""
    from wingbeat.runtime.drawn_trees.static_tree import StaticTree

    return StaticTree.parse(given)


def tree_table(tree: "StaticTree", num_reqs: int, top_k: int, device: "torch.device") -> "StaticTable":
    """Growth of such trees, for one batch size."""
    from wingbeat.runtime.drawn_trees.static_table import StaticTable

    return StaticTable(tree, num_reqs, top_k, device)
