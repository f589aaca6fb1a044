"""Drafting level by level with an EAGLE-3 head of several layers, each with keys and values of its own."""

from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.draft_pool import DraftedRows
from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules, of_parents
from wingbeat.runtime.drafters.layered_eagle import LayeredEagleDrafter
from wingbeat.runtime.drafters.paged_layers import PagedLayer
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.contract import Attend
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.protocol.messages import TokenTree


class DeepEagleDrafter(LayeredEagleDrafter):
    """Such a head and its KV; arguments as `LayeredEagleDrafter`'s. Kernels of the CPU run heads of one layer."""

    def __init__(
        self,
        head: EagleHead,
        speculation: SpeculationConfig,
        graph_device: GraphDevice | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        num_drafted = (speculation.max_path - 2) * speculation.draft_top_k
        growth = Growth(speculation, head.draft_token_ids, packed=True)
        super().__init__(head, speculation, num_drafted, growth, graph_device, fixed_shapes)

    def _kernel_head(self, head: EagleHead) -> None:
        return None

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """A tree per root, its levels run one by one from the last committed pair."""
        num_context, num_levels = roots.positions[0] - 1, len(roots.positions) - 1
        tables, width = block_tables[roots.slots], self.growth.top_k
        drafted = DraftedRows(self.pool, self.pool.tables(tables, num_context), num_context, num_levels, width)
        head, hidden = self.head, self._hidden[roots.slots][:, None].to(self.dtype)
        cos, sin = head.rotary(roots.rotated(roots.positions[:-1] - 1)[..., None].expand(-1, -1, width))

        def expand(level: Level) -> Tensor:
            nonlocal hidden
            parents = hidden if level.visible is None else of_parents(hidden, level)
            mapping, segments, now = drafted.slot_mapping(level), [drafted.segment(level)], level.depth - 1
            attends: list[Attend] = [PagedLayer(cache, mapping, segments, head.scaling) for cache in self.pool.caches]
            hidden = head.run_layers(level.token_ids, head.feedback(parents), (cos[now], sin[now]), attends)
            return head.logits(hidden)

        return self.growth.grow(roots, head.logits(hidden), expand, rules)
