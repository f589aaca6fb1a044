"""Trees of unequal sizes side by side in a batch, without the padding that makes them equally wide.

On the host only, where a round's shapes may follow what was drafted.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Packing(NamedTuple):
    """Where the nodes of padded trees lie as rows: trees follow one another in their order."""

    rows: Tensor
    """int64 [num_reqs, num_nodes]: row of each node; any row for padding."""
    nodes: Tensor
    """int64 [num_rows]: index of each row among the padded nodes."""
    starts: Tensor
    """int64 [num_reqs + 1]: first row of each tree."""


def pack(real: Tensor) -> Packing | None:
    """Rows of the real nodes, bool [num_reqs, num_nodes], which come first in each tree; None where all are."""
    if bool(real.all()):
        return None
    flat = real.flatten()
    rows = (flat.cumsum(0) - 1).clamp_min(0).view(real.shape)
    return Packing(rows, flat.nonzero()[:, 0], F.pad(real.sum(dim=1).cumsum(0), (1, 0)))


def packed(padded: Tensor, packing: Packing | None) -> Tensor:
    """[num_reqs, num_nodes, ...] as rows of a batch, without the padding where it is taken out."""
    flat = padded.flatten(0, 1)
    return flat if packing is None else flat[packing.nodes]


def rows_of(nodes: Tensor, num_nodes: int, packing: Packing | None) -> Tensor:
    """Row of the batch of each node [num_reqs, n]; `num_nodes` of each padded tree."""
    if packing is not None:
        return packing.rows.gather(1, nodes)
    return nodes + torch.arange(len(nodes), device=nodes.device)[:, None] * num_nodes
