"""The flattened batch of a CPU's round, whose decodes the C++ has laid out."""

from torch import Tensor

from wingbeat.kernels.cpu.drafted import DraftIntake
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.round.host_trees import VerifiedTrees
from wingbeat.runtime.cpu.round.packed_decodes import PackedDecodes
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.rows import Feature, Rows, Segment
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.sequence import Sequence


class PackedBuilder(BatchBuilder):
    """Builds forward passes of trees that lie side by side.

    Args:
        intake: of the same slots.
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
