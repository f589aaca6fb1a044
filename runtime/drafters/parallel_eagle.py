"""Drafting with a P-EAGLE head: committed pairs as EAGLE has them, and all drafted tokens in one pass behind them.

Of L settled tokens pairs 0..L - 2 are stored, in every layer; the last one's hidden state says what follows the last
settled token. The masked slots lie behind the pairs while they are run, and are dropped.
"""

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, DrafterNeeds
from wingbeat.runtime.drafters.draft_pool import DraftPool, grown
from wingbeat.runtime.drafters.draft_stages import DecidedRows
from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules
from wingbeat.runtime.drafters.kernel_drafter import KernelDrafter
from wingbeat.runtime.drafters.paged_layers import PagedLayer
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.kernel_head import KernelHead
from wingbeat.runtime.heads.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.heads.one_pass.walks import MarginalWalk
from wingbeat.runtime.kv.pool import LayerAttention, slot_mapping
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.linears import lay_out_linears


class ParallelEagleDrafter(KernelDrafter):
    """A P-EAGLE head and its KV.

    Args:
        head: weights, on the device to draft on.
        speculation: shape of the trees.
        graph_device: see `StagedDrafter`.
        fixed_shapes: run what other devices run on the CPU too; a graph device implies it.
    """

    def __init__(
        self,
        head: ParallelEagleHead,
        speculation: SpeculationConfig,
        graph_device: GraphDevice | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        self.head = head.eval().requires_grad_(False)
        lay_out_linears(self.head)
        self.trained_positions = head.max_position_embeddings
        self.num_masked = speculation.max_path - 2
        heads, size = head.num_key_value_heads, head.head_dim
        layers = [LayerAttention(heads, heads, size, size, None)] * head.num_layers
        fixed_shapes = fixed_shapes or graph_device is not None
        pool = DraftPool(layers, self.num_masked, head.dtype, head.device, fixed_shapes)
        growth = Growth(speculation, head.draft_token_ids, packed=True, whole=True)
        super().__init__(speculation, pool, growth, graph_device)
        self.needs = DrafterNeeds(head.tap_layers, keeps_context=True, token_bytes=pool.token_bytes)

    def _kernel_head(self) -> KernelHead | None:
        return KernelHead.of(self.head)

    def _resize_state(self, num_rows: int) -> None:
        """[num_slots + 1, hidden_size]: the head's output at each sequence's last committed pair."""
        self._hidden = grown(self._hidden, (num_rows, self.head.hidden_size), self.dtype, self.device)

    def _commit_chunks(self, batch: DraftBatch) -> None:
        """Chunks of prompts, in shapes that follow the data."""
        positions, mappings, segments, last_rows, begin = [], [], [], [], 0
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            rows = torch.arange(start, start + length, device=self.device)[None]
            tables = self.pool.reaching(batch.block_tables[slot : slot + 1], start + length)
            segments.append(self.pool.causal_segment(begin, rows, rows[:, 0].contiguous(), tables))
            mappings.append(slot_mapping(tables, rows, self.pool.block_size)[0])
            positions.append(rows[0])
            begin += length
            last_rows.append(begin - 1)
        taps, token_ids = batch.chunk_taps.to(self.dtype), batch.chunk_next_token_ids
        out = self._run(token_ids, self.head.fuse(taps), torch.cat(positions), torch.cat(mappings), segments)
        slots, last = upload([batch.chunk_slots, last_rows], self.device)
        self._hidden[slots] = out[last].to(self._hidden.dtype)

    def _commit_decodes(self, rows: DecidedRows, block_tables: Tensor) -> None:
        """Every layer over decided pairs: the ones above read what the ones below make of all of them."""
        num_reqs, width = rows.token_ids.shape
        steps = torch.arange(width, device=self.device)
        tables = block_tables[rows.slots]
        positions, counted = rows.positions[:, None] + steps, steps < rows.num_tokens[:, None]
        mapping = slot_mapping(tables, positions, self.pool.block_size, counted).flatten()
        # What does not count must be finite: its key is stored where masked rows read.
        features = self.head.fuse(rows.taps.masked_fill(~counted[..., None], 0).flatten(0, 1).to(self.dtype))
        segment = self.pool.causal_segment(0, positions, rows.positions, tables)
        out = self._run(rows.token_ids.flatten(), features, positions.flatten(), mapping, [segment])
        last = (rows.num_tokens - 1).clamp_min(0)
        hidden = out.unflatten(0, (num_reqs, width))[torch.arange(num_reqs, device=self.device), last]
        self._hidden[rows.slots] = hidden.to(self._hidden.dtype)

    def _run(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, mapping: Tensor, segments: list[Segment]
    ) -> Tensor:
        """Hidden states [n, H] of rows side by side, whose keys and values are stored."""
        scaling = self.head.scaling
        attends = [PagedLayer(cache, mapping, segments, scaling) for cache in self.pool.caches]
        return self.head.run_layers(token_ids, features, self.head.rotary(positions), attends)

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
        return self._run(token_ids, features, positions.flatten(), mapping, [segment]).unflatten(0, shape)
