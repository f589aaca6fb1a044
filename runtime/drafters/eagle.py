"""Drafting with an EAGLE head: chains and EAGLE-2 dynamic trees, draft KV paged under the verifier's block ids.

Pair i = (features at position i, token i + 1) has RoPE position i. Committed pairs 0..L-2 of a sequence of L tokens
come from the verifier's taps only; drafted pairs lie behind them and are overwritten by the next tree's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, DrafterNeeds, DrafterOptions
from wingbeat.runtime.drafters.deep_eagle import DeepEagleDrafter
from wingbeat.runtime.drafters.draft_pool import DraftedRows, DraftPool, PagedAttend, grown
from wingbeat.runtime.drafters.draft_stages import DecidedRows
from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules, of_parents
from wingbeat.runtime.drafters.kernel_drafter import KernelDrafter
from wingbeat.runtime.drafters.staged_drafter import graph_device_of
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.heads.contract import DraftHead, HeadConvention
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.fp8 import use_fp8
from wingbeat.runtime.heads.kernel_head import KernelHead
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.kv.pool import LayerAttention, slot_mapping
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.verifier.layers.linears import lay_out_linears


class EagleDrafter(KernelDrafter):
    """A draft head and its KV.

    Args:
        head: weights, on the device to draft on.
        speculation: shape of the trees.
        graph_device: see `StagedDrafter`.
        fixed_shapes: run what other devices run on the CPU too; a graph device implies it.
    """

    def __init__(
        self,
        head: DraftHead,
        speculation: SpeculationConfig,
        graph_device: GraphDevice | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        self.head = head.eval().requires_grad_(False)
        lay_out_linears(self.head)
        self.trained_positions = head.max_position_embeddings
        # Queries share keys however many they are: their number is nothing to a pool.
        heads, size = head.num_key_value_heads, head.head_dim
        layer = LayerAttention(heads, heads, size, head.value_dim, None)
        num_drafted = (speculation.max_path - 2) * speculation.draft_top_k
        fixed_shapes = fixed_shapes or graph_device is not None
        pool = DraftPool([layer], num_drafted, head.dtype, head.device, fixed_shapes)
        growth = Growth(speculation, head.draft_token_ids, packed=True)
        super().__init__(speculation, pool, growth, graph_device)
        self.needs = DrafterNeeds(
            head.tap_layers, keeps_context=True, token_bytes=pool.token_bytes, media_width=head.media_width
        )

    def read_as(self, convention: HeadConvention) -> None:
        """See `Drafter.read_as`."""
        self.head = self.head.with_convention(convention)
        self.needs = self.needs._replace(tap_layers=convention.tap_layers)

    def _kernel_head(self, head: DraftHead) -> KernelHead | None:
        return KernelHead.of(head)

    def _resize_state(self, num_rows: int) -> None:
        """[num_slots + 1, hidden_size]: the head's output at each sequence's last committed pair."""
        self._hidden = grown(self._hidden, (num_rows, self.head.hidden_size), self.dtype, self.device)

    def _commit_chunks(self, batch: DraftBatch) -> None:
        """Chunks of prompts, in shapes that follow the data."""
        positions, mapping, last_rows, num_rows = [], [], [], 0
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            stored = torch.arange(start, start + length, device=self.device)
            table = batch.block_tables[slot : slot + 1]
            positions.append(stored)
            mapping.append(slot_mapping(table, stored[None], self.pool.block_size)[0])
            num_rows += length
            last_rows.append(num_rows - 1)
        slots, last = upload([batch.chunk_slots, last_rows], self.device)
        pairs = _Pairs(
            batch.chunk_tokens(self.head),
            batch.chunk_taps,
            torch.cat(positions),
            batch.chunk_rotations(positions),
            torch.cat(mapping),
            slots,
            last,
        )
        self._run_commit(pairs, self.pool.reaching(batch.block_tables, batch.max_committed_len)[slots])

    def _commit_decodes(self, rows: DecidedRows, block_tables: Tensor) -> None:
        """Keys and values of all pairs that count, and the hidden state of each row's last one."""
        num_reqs, width = rows.token_ids.shape
        tables = block_tables[rows.slots]
        steps = torch.arange(width, device=self.device)
        positions = rows.positions[:, None] + steps
        counted = steps < rows.num_tokens[:, None]
        mapping = slot_mapping(tables, positions, self.pool.block_size, counted)
        real, lens = None, rows.num_tokens
        if self.pool.fixed_shapes:
            last_rows = torch.arange(num_reqs, device=self.device) * width + (lens - 1).clamp_min(0)
        else:
            real, last_rows = counted.flatten().nonzero()[:, 0], lens.cumsum(0) - 1

        def side_by_side(part: Tensor) -> Tensor:
            flat = part.flatten(0, 1)
            return flat if real is None else flat[real]

        stored, moved = side_by_side(positions), rows.rotated(positions)
        pairs = _Pairs(
            tokens=side_by_side(rows.token_ids),
            taps=side_by_side(rows.taps),
            positions=stored,
            rotated=stored if moved is positions else side_by_side(moved),
            slot_mapping=side_by_side(mapping),
            slots=rows.slots,
            last_rows=last_rows,
        )
        self._run_commit(pairs, tables)

    def _run_commit(self, pairs: "_Pairs", tables: Tensor) -> None:
        """One pass over known pairs; with a single layer, a row's key and value depend on its own inputs only.

        Nobody asks for more of a sequence than its keys, its values and the hidden state of its last row.
        """
        [cache] = self.pool.caches
        last = pairs.positions[pairs.last_rows]
        segment = self.pool.causal_segment(0, last[:, None], last, tables)
        attend = PagedAttend(cache, pairs.slot_mapping, segment, self.head.scaling)
        rotary, features = self.head.turned(pairs.rotated), self.head.fuse(pairs.taps.to(self.dtype))
        hidden = self.head(pairs.tokens, features, rotary, attend, pairs.last_rows)
        self._hidden[pairs.slots] = hidden.to(self._hidden.dtype)

    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """A tree per root, its levels run one by one from the last committed pair."""
        num_context, num_levels = roots.positions[0] - 1, len(roots.positions) - 1
        tables, width = block_tables[roots.slots], self.growth.top_k
        drafted = DraftedRows(self.pool, self.pool.tables(tables, num_context), num_context, num_levels, width)
        head, hidden = self.head, self._hidden[roots.slots][:, None].to(self.dtype)
        rotated = roots.rotated(roots.positions[:-1] - 1)[..., None].expand(-1, -1, width)
        cos, sin = head.rotary(rotated)

        def expand(level: Level) -> Tensor:
            nonlocal hidden
            parents, now = hidden, level.depth - 1
            if level.visible is not None:
                parents = of_parents(hidden, level)
            attend = drafted.attend(level, head.scaling)
            hidden = head(level.token_ids, head.feedback(parents), (cos[now], sin[now]), attend)
            return head.logits(hidden)

        return self.growth.grow(roots, head.logits(hidden), expand, rules)


class _Pairs(NamedTuple):
    """Known pairs of some sequences, side by side."""

    tokens: Tensor
    """int64 [num_pairs], or their embeddings [num_pairs, hidden_size]."""
    taps: Tensor
    """[num_pairs, taps_size]"""
    positions: Tensor
    """int64 [num_pairs]"""
    rotated: Tensor
    """int64 [num_pairs] or [3, num_pairs]: by what they are rotated."""
    slot_mapping: Tensor
    """int64 [num_pairs]"""
    slots: Tensor
    """int64 [num_reqs]"""
    last_rows: Tensor
    """int64 [num_reqs]: each sequence's last pair."""


def drafter_class(head: DraftHead) -> type[EagleDrafter] | type[DeepEagleDrafter]:
    """Which of the two drafts with a head: that of one layer, or that of several."""
    return DeepEagleDrafter if isinstance(head, EagleHead) and head.config.num_layers > 1 else EagleDrafter


def build_eagle(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> EagleDrafter | DeepEagleDrafter:
    """Load a head as the drafter of a verifier; raises as `load_eagle_head`.

    Args:
        source: folder of the head.
    """

    def load_head(folder: str) -> DraftHead:
        head = load_eagle_head(
            folder,
            target_hidden_size=target.hidden_size,
            target_num_layers=target.num_layers,
            target_vocab_size=target.vocab_size,
            target_embedding=target.embedding,
            target_lm_head=target.lm_head,
            dtype=options.dtype,
            device=options.device,
        )
        if options.fp8_weights:
            use_fp8(head)
        return head

    head = load_head(source)
    drafter = drafter_class(head)(head, speculation, graph_device_of(options, head.device))
    drafter.load_head = load_head
    return drafter
