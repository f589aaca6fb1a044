"""Decodes whose trees of unequal sizes lie side by side as rows, without padding."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from wingbeat.kernels.cpu.drafted import TakenTrees
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.round.rows import Decodes, Segment


class Packing(NamedTuple):
    """Where the nodes of padded trees lie as rows: trees follow one another in their order."""

    rows: Tensor
    """int64 [num_reqs, num_nodes]: row of each node; any row for padding."""
    nodes: Tensor
    """int64 [num_rows]: index of each row among the padded nodes."""


@dataclass
class PackedDecodes(Decodes):
    """Decodes as the C++ has laid them out."""

    packing: Packing | None
    """None where no tree is padded."""
    flat: tuple[Tensor, Tensor, Tensor]
    """Tokens, positions and slot mapping as `packed` gives them."""
    segment: Segment
    """Of its rows."""

    @classmethod
    def of(cls, slots: Tensor, taken: TakenTrees, *, bare: bool = False) -> "PackedDecodes":
        """Decodes of trees that are laid out.

        Args:
            bare: they are roots alone.
        """
        token_ids, (nodes, *flat), packing, starts = taken.trees[0], taken.flat, None, None
        if len(nodes) < token_ids.numel():
            packing, starts = Packing(taken.rows, nodes), taken.starts
        tables, roots, positions = taken.block_tables, taken.roots, taken.positions
        segment = Segment(0, *token_ids.shape, tables, roots, positions, None if bare else taken.ancestors, starts)
        tree = None if bare else TokenTree(*taken.trees)
        return cls(slots, roots, token_ids, tree, positions, taken.mapping, packing, tuple(flat), segment)

    def packed(self, padded: Tensor) -> Tensor:
        """See `Decodes.packed`."""
        rows = super().packed(padded)
        return rows if self.packing is None else rows[self.packing.nodes]

    def padded(self, rows: Tensor) -> Tensor:
        """See `Decodes.padded`."""
        return super().padded(rows) if self.packing is None else rows[self.packing.rows]

    def rows_of(self, nodes: Tensor) -> Tensor:
        """See `Decodes.rows_of`."""
        return super().rows_of(nodes) if self.packing is None else self.packing.rows.gather(1, nodes)

    @property
    def num_rows(self) -> int:
        """See `Decodes.num_rows`."""
        return len(self.flat[0])
