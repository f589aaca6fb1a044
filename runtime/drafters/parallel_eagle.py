"""Drafting with a P-EAGLE head: committed pairs as EAGLE has them, and all drafted tokens in one pass behind them."""

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules
from wingbeat.runtime.drafters.layered_eagle import LayeredEagleDrafter
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.kernel_head import KernelHead
from wingbeat.runtime.heads.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.heads.one_pass.walks import MarginalWalk
from wingbeat.runtime.kv.pool import slot_mapping
from wingbeat.runtime.protocol.messages import TokenTree


class ParallelEagleDrafter(LayeredEagleDrafter):
    """A P-EAGLE head and its KV; arguments as `LayeredEagleDrafter`'s."""

    head: ParallelEagleHead

    def __init__(
        self,
        head: ParallelEagleHead,
        speculation: SpeculationConfig,
        graph_device: GraphDevice | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        self.num_masked = speculation.max_path - 2
        growth = Growth(speculation, head.draft_token_ids, packed=True, whole=True)
        super().__init__(head, speculation, self.num_masked, growth, graph_device, fixed_shapes)

    def _kernel_head(self, head: ParallelEagleHead) -> KernelHead | None:
        return KernelHead.of(head)

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """One pass over the masked slots of every root, then a tree of what they say."""
        hidden = self._hidden[roots.slots][:, None].to(self.dtype)
        if self.num_masked:
            hidden = torch.cat([hidden, self._run_masked(roots, block_tables)], dim=1)
        walk = MarginalWalk(self.head.logits(hidden))

        def expand(level: Level):
            return walk.step(level.depth, level.token_ids, level.parents)

        none = torch.zeros_like(roots.token_ids)[:, None]
        return self.growth.grow(roots, walk.step(0, roots.token_ids[:, None], none), expand, rules)

    def _run_masked(self, roots: Roots, block_tables: Tensor) -> Tensor:
        """Hidden states [num_reqs, num_masked, H] of the slots behind the last pairs."""
        num_context, shape = roots.positions[0] - 1, (len(roots.slots), self.num_masked)
        tables = self.pool.tables(block_tables[roots.slots], num_context)
        positions = num_context[:, None] + torch.arange(self.num_masked, device=self.device)
        mapping = slot_mapping(tables, positions, self.pool.block_size).flatten()
        segment = self.pool.causal_segment(0, positions, num_context, tables)
        token_ids = torch.full_like(positions, self.head.mask_token_id).flatten()
        features = self.head.masked_features()[0].expand(len(token_ids), -1).contiguous()
        rotated = roots.rotated(positions, by_request=True).flatten()
        return self._run(token_ids, features, rotated, mapping, [segment]).unflatten(0, shape)
