"""The decodes of a round on the device."""

from typing import NamedTuple

from torch import Tensor

from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.verifier.layers.packing import Packing, packed, rows_of


class Decodes(NamedTuple):
    """Device inputs of a round's decodes: [num_reqs] or [num_reqs, num_nodes]."""

    slots: Tensor
    roots: Tensor
    token_ids: Tensor
    tree: TokenTree | None
    """None where all are bare roots."""
    positions: Tensor
    slot_mapping: Tensor
    packing: Packing | None = None
    """Where the trees lie side by side without padding."""

    def packed(self, padded: Tensor) -> Tensor:
        """[num_reqs, num_nodes] as rows of the flattened batch."""
        return packed(padded, self.packing)

    def rows_of(self, nodes: Tensor) -> Tensor:
        """Row of the flattened batch of each node [num_reqs, n]."""
        return rows_of(nodes, self.token_ids.shape[1], self.packing)

    @property
    def num_rows(self) -> int:
        """Rows of the flattened batch."""
        return self.token_ids.numel() if self.packing is None else len(self.packing.nodes)
