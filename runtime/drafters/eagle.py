"""Drafts with an EAGLE head: chains and EAGLE-2 dynamic trees, with draft KV paged under the verifier's block ids.

Pair i = (features at position i, token i + 1) has RoPE position i. Committed pairs 0..L-2 of a sequence of L tokens are
computed from the verifier's taps only and are stored in every layer. Drafted pairs are stored after the committed pairs
and overwritten by the next tree. The last layer's output at pair L-2 predicts the token after the last committed token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.decided_rows import DecidedRows
from wingbeat.runtime.drafters.draft_pool import DraftedRows, DraftPool, grown
from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules
from wingbeat.runtime.drafters.head_drafter import HeadDrafter
from wingbeat.runtime.drafters.paged_attend import PagedAttend
from wingbeat.runtime.drafters.staged_drafter import graph_device_of
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.contract import DraftHead, HeadConvention, OfParents
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.rows import Segment
from wingbeat.runtime.verifier.layers.linears import lay_out_linears


class EagleDrafter(HeadDrafter):
    """Drafter with a draft head of any number of layers and one KV cache per layer.

    Args:
        head: weights, on the device to draft on.
        speculation: shape of the trees.
        graph_device: see `StagedDrafter`.
    """

    head: DraftHead
    in_one_pass = False
    """Whether one pass drafts all levels of a tree, with one row per level."""

    def __init__(
        self, head: DraftHead, speculation: SpeculationConfig, graph_device: GraphDevice | None = None
    ) -> None:
        self.head = head.eval().requires_grad_(False)
        lay_out_linears(self.head)
        self.head.fused_level = first_result("fuse_head", self.head)
        self.trained_positions = head.max_position_embeddings
        # The pool stores only keys and values and does not use num_heads, so num_heads is set to the number of KV
        # heads.
        heads = head.num_key_value_heads
        layers = [LayerAttention(heads, heads, head.head_dim, head.value_dim, None)] * head.num_layers
        num_drafted = (speculation.max_path - 2) * (1 if self.in_one_pass else speculation.draft_top_k)
        pool = DraftPool(layers, num_drafted, head.dtype, head.device)
        growth = Growth(speculation, head.draft_token_ids, packed=True, whole=self.in_one_pass)
        super().__init__(speculation, pool, growth, graph_device)
        self.needs = DrafterNeeds(
            head.tap_layers, keeps_context=True, token_bytes=pool.token_bytes, embedding_width=head.embedding_width
        )

    def read_as(self, convention: HeadConvention) -> None:
        """See `Drafter.read_as`."""
        self.head = self.head.with_convention(convention)
        self.needs = self.needs._replace(tap_layers=convention.tap_layers)

    def _resize_state(self, num_rows: int) -> None:
        """Grows `hidden` [num_slots + 1, hidden_size]: the head's output at each sequence's last committed pair."""
        self.hidden = grown(self.hidden, (num_rows, self.head.hidden_size), self.dtype, self.device)

    def _commit_chunks(self, batch: DraftBatch) -> None:
        """Commits the chunks of a batch, in shapes that depend on the data."""
        chunks = self.pool.chunks(batch)
        positions = [chunk.positions for chunk in chunks]
        slots, last_row = upload([batch.chunk_slots, [chunk.rows.stop - 1 for chunk in chunks]], self.device)
        tables = self.pool.table_columns(batch.block_tables, batch.max_committed_len)[slots]
        pairs = _Pairs(
            tokens=batch.chunk_tokens(self.head),
            taps=batch.chunk_taps,
            rotated=batch.chunk_rotations(positions),
            slot_mapping=torch.cat([chunk.slot_mapping for chunk in chunks]),
            segments=[self.pool.chunk_segment(chunk) for chunk in chunks],
            slots=slots,
            last_rows=last_row,
            last_positions=torch.cat(positions)[last_row],
        )
        self._run_committed(pairs, tables)

    def _commit_decodes(self, rows: DecidedRows, block_tables: Tensor) -> None:
        """Commits decoded pairs, one sequence per row."""
        if not self.fixed_shapes:
            rows = rows.trimmed()
        num_reqs, width = rows.token_ids.shape
        tables, (positions, counted) = block_tables[rows.slots], rows.spread()
        last = (rows.num_tokens - 1).clamp_min(0)
        pairs = _Pairs(
            tokens=rows.token_ids.flatten(),
            # Invalid rows must be finite, because their keys are stored in block 0, which masked queries read.
            taps=torch.where(counted[..., None], rows.taps, 0).flatten(0, 1),
            rotated=rows.rotated(positions).flatten(),
            slot_mapping=slot_mapping(tables, positions, self.pool.block_size, counted).flatten(),
            segments=[self.pool.causal_segment(0, positions, rows.positions, tables)],
            slots=rows.ends,
            last_rows=torch.arange(0, num_reqs * width, width, device=self.device) + last,
            last_positions=rows.positions + last,
        )
        self._run_committed(pairs, tables)

    def _run_committed(self, pairs: "_Pairs", tables: Tensor) -> None:
        """Stores keys and values of committed pairs in every layer, and the hidden state of each sequence's last pair.

        Every layer but the last computes its output at all pairs, because the next layer reads it. The last layer
        computes only the output at each sequence's last pair.

        Args:
            tables: int64 [num_reqs, num_blocks]: block tables that reach to the last pair.
        """
        last = pairs.last_positions
        ends = self.pool.causal_segment(0, last[:, None], last, tables)
        by_layer = [pairs.segments] * (self.head.num_layers - 1) + [[ends]]
        attends = [
            PagedAttend(cache, pairs.slot_mapping, segments, self.head.scaling)
            for cache, segments in zip(self.pool.caches, by_layer, strict=True)
        ]
        rotary, features = self.head.flat_rotary(pairs.rotated), self.head.fuse(pairs.taps.to(self.dtype))
        hidden = self.head.run_layers(pairs.tokens, features, rotary, attends, pairs.last_rows)
        self.hidden[pairs.slots] = hidden.to(self.hidden.dtype)

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Grows a tree per root, level by level, from the hidden state of the last committed pair."""
        num_context, num_levels = roots.positions[0] - 1, len(roots.positions) - 1
        tables, width = block_tables[roots.slots], self.growth.top_k
        drafted = DraftedRows(self.pool, self.pool.tables(tables, num_context), num_context, num_levels, width)
        head, hidden = self.head, self.hidden[roots.slots][:, None].to(self.dtype)
        rotated = roots.rotated(roots.positions[:-1] - 1)[..., None].expand(-1, -1, width)
        cos, sin = head.rotary(rotated)

        def expand(level: Level) -> Tensor:
            nonlocal hidden
            features, now = head.feedback(hidden), level.depth - 1
            if level.visible is not None:
                of_parents = OfParents(features, level.parents)
                features = of_parents if head.takes_parents else of_parents.rows()
            attends = drafted.attends(level, head.scaling)
            hidden = head.run_layers(level.token_ids, features, (cos[now], sin[now]), attends)
            return head.logits(hidden)

        return self.growth.grow(roots, head.logits(hidden), expand, rules)


class _Pairs(NamedTuple):
    """Committed pairs of several sequences, concatenated."""

    tokens: Tensor
    """Token ids int64 [num_pairs], or embeddings [num_pairs, hidden_size]."""
    taps: Tensor
    """[num_pairs, taps_size]"""
    rotated: Tensor
    """int64 [num_pairs] or [3, num_pairs]: RoPE positions."""
    slot_mapping: Tensor
    """int64 [num_pairs]"""
    segments: list[Segment]
    """Segments in which every pair attends to all pairs up to itself."""
    slots: Tensor
    """int64 [num_reqs]"""
    last_rows: Tensor
    """int64 [num_reqs]: row of each sequence's last pair."""
    last_positions: Tensor
    """int64 [num_reqs]: position of each sequence's last pair."""


def build_eagle(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> EagleDrafter:
    """Load a head as the drafter of a verifier; raises like `load_eagle_head`.

    Args:
        source: folder of the head.
    """

    fp8 = hooks("fp8_head") if options.fp8_weights else ()
    if options.fp8_weights and not fp8:
        raise ValueError(
            "drafter_weights is fp8: this installation lacks the package runtime.fp8_heads; leave drafter_weights out"
        )

    def load_head(folder: str) -> DraftHead:
        head = load_eagle_head(folder, target, options.dtype, options.device)
        for use_fp8 in fp8:
            use_fp8(head)
        return head

    head = load_head(source)
    drafter = EagleDrafter(head, speculation, graph_device_of(options, head.device))
    drafter.load_head, drafter.source, drafter.target = load_head, source, target
    return drafter
