"""Committed pairs of EAGLE-3 heads of several layers: keys and values of each, paged under the verifier's block ids.

Of L settled tokens pairs 0..L - 2 are stored, in every layer; the last one's hidden state says what follows the last
settled token. What is drafted lies behind the pairs while it is run, and is overwritten by the next draft's.
"""

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, DrafterNeeds
from wingbeat.runtime.drafters.draft_pool import DraftPool, grown
from wingbeat.runtime.drafters.draft_stages import DecidedRows
from wingbeat.runtime.drafters.growth import Growth
from wingbeat.runtime.drafters.kernel_drafter import KernelDrafter
from wingbeat.runtime.drafters.paged_layers import PagedLayer
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.kv.pool import LayerAttention, slot_mapping
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.linears import lay_out_linears


class LayeredEagleDrafter(KernelDrafter):
    """A head of several layers and its KV; who builds upon it drafts behind the pairs.

    Args:
        head: weights, on the device to draft on.
        speculation: shape of the trees.
        num_drafted: rows that a draft stores behind a sequence's pairs.
        growth: of the trees.
        graph_device: see `StagedDrafter`.
        fixed_shapes: run what other devices run on the CPU too; a graph device implies it.
    """

    head: EagleHead

    def __init__(
        self,
        head: EagleHead,
        speculation: SpeculationConfig,
        num_drafted: int,
        growth: Growth,
        graph_device: GraphDevice | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        self.head = head.eval().requires_grad_(False)
        lay_out_linears(self.head)
        self.trained_positions = head.max_position_embeddings
        heads, size = head.num_key_value_heads, head.head_dim
        layers = [LayerAttention(heads, heads, size, size, None)] * head.config.num_layers
        fixed_shapes = fixed_shapes or graph_device is not None
        pool = DraftPool(layers, num_drafted, head.dtype, head.device, fixed_shapes)
        super().__init__(speculation, pool, growth, graph_device)
        self.needs = DrafterNeeds(
            head.tap_layers, keeps_context=True, token_bytes=pool.token_bytes, media_width=head.media_width
        )

    def read_as(self, convention: HeadConvention) -> None:
        """See `Drafter.read_as`."""
        self.head = self.head.with_convention(convention)
        self.needs = self.needs._replace(tap_layers=convention.tap_layers)

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
        features, tokens = self.head.fuse(batch.chunk_taps.to(self.dtype)), batch.chunk_tokens(self.head)
        out = self._run(tokens, features, batch.chunk_rotations(positions), torch.cat(mappings), segments)
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
        out = self._run(rows.token_ids.flatten(), features, rows.rotated(positions).flatten(), mapping, [segment])
        last = (rows.num_tokens - 1).clamp_min(0)
        hidden = out.unflatten(0, (num_reqs, width))[torch.arange(num_reqs, device=self.device), last]
        self._hidden[rows.slots] = hidden.to(self._hidden.dtype)

    def _run(
        self, tokens: Tensor, features: Tensor, rotated: Tensor, mapping: Tensor, segments: list[Segment]
    ) -> Tensor:
        """Hidden states [n, H] of rows side by side, whose keys and values are stored.

        Args:
            tokens: int64 [n], or their embeddings.
            rotated: int64 [n] or [3, n]: by what they are rotated.
        """
        scaling = self.head.scaling
        attends = [PagedLayer(cache, mapping, segments, scaling) for cache in self.pool.caches]
        return self.head.run_layers(tokens, features, self.head.turned(rotated), attends)
