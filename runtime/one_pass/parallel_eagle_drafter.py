"""Drafts with a P-EAGLE head: pairs are committed as in EAGLE, and then a single pass drafts all tokens."""

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.growth import Roots, Rules
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.one_pass.walks import MarginalWalk, grow_along
from wingbeat.runtime.protocol.messages import TokenTree


class ParallelEagleDrafter(EagleDrafter):
    """Drafter with a P-EAGLE head and its KV; for the arguments see `EagleDrafter`."""

    head: ParallelEagleHead
    in_one_pass = True

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Runs one pass over the masked slots of all roots, then grows a tree per root from the slots' logits."""
        hidden = self.hidden[roots.slots][:, None].to(self.dtype)
        if self.pool.num_drafted:
            hidden = torch.cat([hidden, self._run_masked(roots, block_tables)], dim=1)
        return grow_along(self.growth, roots, MarginalWalk(self.head.logits(hidden)), rules)

    def _run_masked(self, roots: Roots, block_tables: Tensor) -> Tensor:
        """Hidden states [num_reqs, num_masked, H] of the masked slots after the last pairs."""
        num_context, num_masked = roots.positions[0] - 1, self.pool.num_drafted
        tables = self.pool.tables(block_tables[roots.slots], num_context)
        positions = num_context[:, None] + torch.arange(num_masked, device=self.device)
        mapping = slot_mapping(tables, positions, self.pool.block_size).flatten()
        segment = self.pool.causal_segment(0, positions, num_context, tables)
        token_ids = torch.full_like(positions, self.head.mask_token_id).flatten()
        features = self.head.masked_features()[0].expand(len(token_ids), -1).contiguous()
        rotary = self.head.rotary(roots.rotated(positions, by_request=True).flatten())
        attends = self.pool.attends(mapping, [segment], self.head.scaling)
        return self.head.run_layers(token_ids, features, rotary, attends).unflatten(0, positions.shape)
