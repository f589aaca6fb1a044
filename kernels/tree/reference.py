"""Draft trees as tensors: ancestor masks, paths and the acceptance walk. Torch reference and CPU path.

A tree is `token_ids` and `parents` [num_reqs, num_nodes]: node 0 is the root (parent -1), every other node's parent has
a smaller index, and nodes from num_valid on are padding. No function loops over nodes or requests, has data-dependent
shapes or waits for the device, so all can be captured in a CUDA graph. CUDA tensors use the kernels of
`kernels.gpu.tree.walk`. Independent of models and caches.
"""

import torch
from torch import Tensor

from wingbeat.kernels import choice
from wingbeat.kernels.tree.results import WalkResult

_WORD_BITS = 64


def ancestor_mask(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """Mask of the nodes that each node sees: itself and its ancestors.

    A padding node may have any parent below its own index. The padding node sees itself, this parent and the parent's
    ancestors; no valid node sees a padding node.

    Args:
        parents: int64 [num_reqs, num_nodes].
        max_depth: depth of the deepest node, which bounds the loop; None means num_nodes - 1.

    Returns:
        bool [num_reqs, num_nodes, num_nodes]: row node sees column node.
    """
    if kernels := choice.compiled("ancestors", parents):
        return kernels.ancestors(parents, max_depth, pack=False)
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
    """Packs the last dimension of a bool mask into words: bit b of word w is column 64 * w + b.

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
    """`ancestor_mask`, packed as by `pack_mask`: int64 [num_reqs, num_nodes, ceil(num_nodes / 64)]."""
    if kernels := choice.compiled("ancestors", parents):
        return kernels.ancestors(parents, max_depth, pack=True)
    return pack_mask(ancestor_mask(parents, max_depth))


def path_token_ids(token_ids: Tensor, parents: Tensor, max_depth: int) -> Tensor:
    """Tokens from each node up to the root's child, which extend the root's history at that node.

    Args:
        token_ids: int64 [num_reqs, num_nodes].
        parents: int64 [num_reqs, num_nodes].
        max_depth: depth of the deepest node.

    Returns:
        int64 [num_reqs, num_nodes, max_depth]: the node's own token, its parent's and so on; -1 from the root on.
    """
    if kernels := choice.compiled("path_token_ids", parents):
        return kernels.path_token_ids(token_ids, parents, max_depth)
    up = parents.clamp(min=0)
    path = torch.empty(*token_ids.shape, max_depth, dtype=torch.int64, device=token_ids.device)
    node = torch.arange(token_ids.shape[1], device=token_ids.device).expand(token_ids.shape)
    for step in range(max_depth):
        path[:, :, step] = torch.where(node > 0, token_ids.gather(1, node), -1)
        node = up.gather(1, node)
    return path


def unpack_mask(words: Tensor, num_nodes: int) -> Tensor:
    """Unpacks words of `pack_mask` into a bool mask.

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
    """Follows the target's choices from the root.

    If several children carry the chosen token, the lowest index is taken.

    The emitted tokens are the target's own choices, hence exactly the tokens that the target would emit without a tree.

    Args:
        token_ids: int64 [num_reqs, num_nodes].
        parents: int64 [num_reqs, num_nodes].
        num_valid: int64 [num_reqs]: nodes that count, root included; the root always counts.
        target_token_ids: int64 [num_reqs, num_nodes]: the token the target chooses after each node.
        max_path: maximum number of tokens a walk may emit, at least 1.
    """
    if kernels := choice.compiled("walk_tree", token_ids):
        return kernels.walk_tree(token_ids, parents, num_valid, target_token_ids, max_path)
    num_reqs, num_nodes = token_ids.shape
    index = torch.arange(num_nodes, device=token_ids.device)
    up = parents.clamp(min=0)
    follows = (token_ids == target_token_ids.gather(1, up)) & (index < num_valid[:, None]) & (index > 0)
    # Each node has at most one chosen child, computed for all nodes at once; num_nodes means none.
    chosen_child = torch.full_like(parents, num_nodes)
    chosen_child.scatter_reduce_(1, up, torch.where(follows, index, num_nodes), reduce="amin")
    node = torch.zeros(num_reqs, 1, dtype=torch.int64, device=token_ids.device)
    path, walking = [node], [torch.ones_like(node, dtype=torch.bool)]
    for _ in range(max_path - 1):
        child = chosen_child.gather(1, node)
        # Once a node has no chosen child, the walk stays at this node in all later steps, so the walk has ended.
        moved = child < num_nodes
        node = torch.where(moved, child, node)
        path.append(node)
        walking.append(moved)
    nodes, emitted = torch.cat(path, dim=1), torch.cat(walking, dim=1)
    return WalkResult(nodes, emitted.sum(dim=1), target_token_ids.gather(1, nodes).masked_fill_(~emitted, 0))
