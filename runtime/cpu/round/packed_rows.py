"""Rows of a round on a CPU: trees of unequal sizes, which C++ code has concatenated without padding."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from wingbeat.kernels.cpu.drafted import DraftIntake, TakenTrees
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.rows import Decodes, Feature, Rows, Segment
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.sequence import Sequence


class Packing(NamedTuple):
    """Mapping between padded trees and concatenated rows; the rows have the order of the trees."""

    rows: Tensor
    """int64 [num_reqs, num_nodes]: row of each node; for a padding node any valid row."""
    nodes: Tensor
    """int64 [num_rows]: for each row, the node's flat index among the padded nodes."""


@dataclass
class PackedDecodes(Decodes):
    """Decodes in the layout that C++ has produced."""

    packing: Packing | None
    """Mapping from padded trees to rows; None if no tree is padded."""
    flat: tuple[Tensor, Tensor, Tensor]
    """Tokens, positions and slot mapping, in the layout of `packed`."""
    segment: Segment
    """Attention segment of the rows."""

    @classmethod
    def of(cls, slots: Tensor, taken: TakenTrees, *, bare: bool = False) -> "PackedDecodes":
        """Builds decodes from trees that C++ code has laid out.

        Args:
            bare: whether each tree consists of its root alone.
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


class VerifiedTrees(TokenTree):
    """Trees of a round, with their layout."""

    decodes: PackedDecodes


class PackedBuilder(BatchBuilder):
    """Builds forward passes over concatenated trees.

    Args:
        intake: the C++ object that takes in trees, over the same slots.
    """

    def __init__(
        self,
        intake: DraftIntake,
        cache: KVCache,
        slots: SlotState,
        config: EngineConfig,
        last_position: int,
        features: tuple[Feature, ...],
    ) -> None:
        super().__init__(cache, slots, config, last_position, on_host=True, features=features)
        self._intake = intake

    def decodes(self, slots: Tensor, tree: VerifiedTrees | None) -> PackedDecodes:
        """See `BatchBuilder.decodes`."""
        return PackedDecodes.of(slots, self._intake.roots(slots), bare=True) if tree is None else tree.decodes

    def _decode_rows(self, decodes: PackedDecodes, segment: Segment) -> Rows:
        return self._rows(*decodes.flat, [segment])

    def _decode_segment(self, seqs: list[Sequence], decodes: PackedDecodes) -> Segment:
        return decodes.segment
