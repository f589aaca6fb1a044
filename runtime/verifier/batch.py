"""The flattened batch of a round: decodes and trees first, prompt chunks behind them.

Lengths, roots and block tables come from the slot state on the device; what the host knows of them are upper bounds.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.kernels.layer.stacked_adapters import AdapterRows
from wingbeat.kernels.tree.reference import ancestor_words
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache, slot_mapping
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.layers.attention import AttentionMetadata, AttentionSegment
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.packing import Packing, pack, packed, rows_of
from wingbeat.runtime.verifier.model import ForwardBatch
from wingbeat.runtime.verifier.prompt_chunks import PIECE_ROWS, Pieces, in_pieces, side_by_side
from wingbeat.runtime.verifier.slots import SlotState
from wingbeat.runtime.verifier.state_keeper import StateKeeper


class Decodes(NamedTuple):
    """Device inputs of a round's decodes: [num_reqs] or [num_reqs, num_nodes]."""

    slots: Tensor
    roots: Tensor
    token_ids: Tensor
    tree: TokenTree | None
    """None where all are bare roots."""
    positions: Tensor
    slot_mapping: Tensor
    packing: Packing | None = None
    """Where the trees lie side by side without padding."""

    def packed(self, padded: Tensor) -> Tensor:
        """[num_reqs, num_nodes] as rows of the flattened batch."""
        return packed(padded, self.packing)

    def rows_of(self, nodes: Tensor) -> Tensor:
        """Row of the flattened batch of each node [num_reqs, n]."""
        return rows_of(nodes, self.token_ids.shape[1], self.packing)

    @property
    def num_rows(self) -> int:
        """Rows of the flattened batch."""
        return self.token_ids.numel() if self.packing is None else len(self.packing.nodes)


class BatchBuilder:
    """Builds forward passes over one engine's sequences.

    Args:
        slots: device state by slot, shared with the model runner.
        on_host: whether the device is the host itself, so that looking at what it computed is no wait.
        pieces: prompt chunks are one segment, of pieces of equal height; else each is a segment of its own.
        states: of layers that keep a state of their own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        slots: SlotState,
        config: EngineConfig,
        on_host: bool,
        pieces: bool = False,
        states: StateKeeper | None = None,
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.config = config
        self.device = slots.device
        self.adapters = loaded.adapters
        self.vision = loaded.vision
        self.rotates = loaded.vision is not None and loaded.vision.rotates_in_grids
        self.on_host = on_host
        self.states = states
        self._pieces = pieces
        self._last_position = loaded.max_position_embeddings - 1
        self._max_depth = config.speculation.max_path - 1

    def decodes(self, slots: Tensor, tree: TokenTree | None) -> Decodes:
        """What a round's decodes read; the roots of the trees are filled in here.

        Args:
            slots: int64 [num_reqs].
            tree: one per sequence; None where all are bare roots.
        """
        roots = self.slots.committed_lens[slots] - 1
        root_ids = self.slots.last_token_ids[slots]
        if tree is None:
            positions = roots[:, None]
            return Decodes(slots, roots, root_ids[:, None], None, positions, self.slot_mapping(slots, positions))
        tree.token_ids[:, 0] = root_ids
        steps = torch.arange(tree.token_ids.shape[1], device=self.device)
        real = steps < tree.num_valid[:, None]
        # Nodes past the last position are never accepted, but a table of positions has no row for them.
        positions = (roots[:, None] + torch.where(real, tree.depths, 0)).clamp_max(self._last_position)
        mapping = torch.where(real, self.slot_mapping(slots, roots[:, None] + steps), 0)
        packing = pack(real) if self.on_host else None
        return Decodes(slots, roots, tree.token_ids, tree, positions, mapping, packing)

    def slot_mapping(self, slots: Tensor | slice, stored: Tensor) -> Tensor:
        """Address in the pool of each stored position [num_reqs, n] of sequences in `slots` [num_reqs]."""
        return slot_mapping(self.slots.block_tables[slots], stored, self.config.block_size)

    def flatten(self, plan: SchedulerOutput, decodes: Decodes | None) -> ForwardBatch:
        """Decodes and prompt chunks as one batch.

        Rows with logits: those of decodes, of the chunks that sample, and of prompt tokens whose next one is reported.
        """
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        segments: list[AttentionSegment] = []
        num_rows, wanted, real, chunk_slots, starts = 0, [], None, None, []
        if decodes is not None:
            segments.append(self._decode_segment(plan.decodes, decodes))
            num_rows = decodes.num_rows
            parts.append(tuple(map(decodes.packed, (decodes.token_ids, decodes.positions, decodes.slot_mapping))))
        if plan.chunks:
            causal = all(self._visible(chunk) is None for chunk in plan.chunks)
            flatten_chunks = self._chunks_in_pieces if self._pieces and causal else self._chunks_apart
            wanted, of_chunks, real, own, chunk_slots, starts = flatten_chunks(plan.chunks, num_rows)
            parts.append(of_chunks)
            segments += own
        token_ids, positions, mapping = (torch.cat(fields) for fields in zip(*parts, strict=True))
        logits_rows = None
        if plan.chunks:
            logits_rows = upload([*range(num_rows), *wanted] or [0], self.device)
        metadata = AttentionMetadata(self.cache.layers, mapping, segments)
        if self.adapters is not None and not (self.on_host and plan.is_unadapted):
            metadata = metadata._replace(adapters=self._adapter_rows(decodes, chunk_slots))
        if self.states is not None:
            tree, packing = (None, None) if decodes is None else (decodes.tree, decodes.packing)
            metadata = metadata._replace(states=self.states.round(plan, tree, num_rows, packing))
        if self.rotates:
            moved = positions + self.slots.position_deltas[self._row_slots(decodes, chunk_slots)]
            positions = self.vision.rotated(moved, plan.chunks, starts)
        else:
            positions = positions[None]
        images = None if self.vision is None else self.vision.rows(plan.chunks, starts, self.device)
        return ForwardBatch(token_ids[None], positions, logits_rows, metadata, real, images)

    def _chunks_apart(self, chunks: list[Chunk], begin: int) -> "_FlatChunks":
        """A segment for each chunk."""
        rows = side_by_side(chunks)
        token_ids, positions, stores = (
            upload(part, self.device) for part in (rows.token_ids, rows.positions, rows.stores)
        )
        segments, mapping = [], []
        for chunk, start in zip(chunks, rows.starts, strict=True):
            own = slice(start, start + chunk.length)
            segments.append(self._chunk_segment(begin + start, chunk, positions[own]))
            table = slice(chunk.seq.slot, chunk.seq.slot + 1)
            mapping.append(self.slot_mapping(table, positions[None, own])[0])
        mapping = torch.where(stores > 0, torch.cat(mapping), 0)
        slots = [chunk.seq.slot for chunk in chunks for _ in range(chunk.length)] if self._needs_slots else []
        fields, starts = (token_ids, positions, mapping), [begin + start for start in rows.starts]
        return _FlatChunks(rows.logits_rows(chunks, begin), fields, None, segments, upload(slots, self.device), starts)

    def _chunks_in_pieces(self, chunks: list[Chunk], begin: int) -> "_FlatChunks":
        """One segment of all chunks, brought to the device as one copy."""
        rows, slots, contexts = in_pieces(chunks, self._last_position)
        parts = (rows.token_ids, rows.positions, rows.stores, slots, contexts, begin + rows.real)
        arrived = upload(np.concatenate(parts), self.device).split([len(part) for part in parts])
        longest = max(chunk.start + chunk.length for chunk in chunks)
        fields, segment = self._piece_rows(Pieces(*arrived[:-1]), begin, -(-longest // self.config.block_size))
        row_slots = arrived[3].repeat_interleave(PIECE_ROWS) if self._needs_slots else arrived[3]
        starts = [begin + start for start in rows.starts]
        return _FlatChunks(rows.logits_rows(chunks, begin), fields, arrived[-1], [segment], row_slots, starts)

    def _piece_rows(
        self, pieces: Pieces, begin: int, num_blocks: int | None = None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], AttentionSegment]:
        """Token ids, positions and slot mapping of pieces, int64 [num_rows] each, and their segment.

        Args:
            begin: their first row of the batch.
            num_blocks: that attention looks at; None looks at all that a sequence may have.
        """
        shape, size = (len(pieces.slots), PIECE_ROWS), self.config.block_size
        tables, positions = self.slots.block_tables[pieces.slots], pieces.positions.view(shape)
        mapping = slot_mapping(tables, positions, size, pieces.stores.view(shape) > 0)
        segment = AttentionSegment.of(begin, positions, pieces.contexts, None, tables[:, :num_blocks])
        return (pieces.token_ids, pieces.positions, mapping.flatten()), segment

    def fixed(self, decodes: Decodes, pieces: Pieces | None = None, wanted: Tensor | None = None) -> ForwardBatch:
        """Decodes, and pieces behind them, at shapes that the arguments' shapes decide: what is captured.

        Args:
            pieces: of sequences without images.
            wanted: int64 [n]: rows among the pieces' whose logits are needed beside those of the decodes.
        """
        segments = [self._tree_segment(decodes, self.slots.block_tables[decodes.slots])]
        positions, num_rows = decodes.positions, decodes.num_rows
        if self.rotates:
            positions = positions + self.slots.position_deltas[decodes.slots][:, None]
        fields = [part.flatten() for part in (decodes.token_ids, positions, decodes.slot_mapping)]
        logits_rows = slots = None
        if pieces is not None:
            own, segment = self._piece_rows(pieces, num_rows)
            segments.append(segment)
            fields = [torch.cat(parts) for parts in zip(fields, own, strict=True)]
            logits_rows = torch.cat([torch.arange(num_rows, device=self.device), wanted + num_rows])
            slots = pieces.slots.repeat_interleave(PIECE_ROWS)
        adapters = None if self.adapters is None else self._adapter_rows(decodes, slots)
        token_ids, positions, mapping = fields
        metadata = AttentionMetadata(self.cache.layers, mapping, segments, adapters=adapters)
        return ForwardBatch(token_ids[None], positions[None], logits_rows, metadata)

    @property
    def _needs_slots(self) -> bool:
        return self.adapters is not None or self.rotates

    def _visible(self, chunk: Chunk) -> Tensor | None:
        return None if self.vision is None else self.vision.visible(chunk)

    def _adapter_rows(self, decodes: Decodes | None, chunk_slots: Tensor | None) -> AdapterRows:
        """Which adapter each row has."""
        ids = self.slots.adapter_ids[self._row_slots(decodes, chunk_slots)]
        return AdapterRows.of(ids, self.adapters.max_loras, self.on_host)

    @staticmethod
    def _row_slots(decodes: Decodes | None, chunk_slots: Tensor | None) -> Tensor:
        """The slot of each row: those of the decodes, then those of the chunks."""
        parts = []
        if decodes is not None:
            parts.append(decodes.packed(decodes.slots[:, None].expand_as(decodes.token_ids)))
        if chunk_slots is not None:
            parts.append(chunk_slots)
        return torch.cat(parts)

    def _decode_segment(self, seqs: list[Sequence], decodes: Decodes) -> AttentionSegment:
        longest = max(seq.max_len for seq in seqs) - 1 + decodes.token_ids.shape[1]
        return self._tree_segment(
            decodes, self.slots.block_tables[decodes.slots, : -(-longest // self.config.block_size)]
        )

    def _tree_segment(self, decodes: Decodes, tables: Tensor) -> AttentionSegment:
        """Each node sees its ancestors; chains need no words to say so."""
        num_reqs, num_nodes = decodes.token_ids.shape
        words = None
        if decodes.tree is not None and self.config.speculation.draft_top_k > 1:
            words = ancestor_words(decodes.tree.parents, min(self._max_depth, num_nodes - 1))
        starts = None if decodes.packing is None else decodes.packing.starts
        return AttentionSegment(0, num_reqs, num_nodes, tables, decodes.roots, decodes.positions, words, starts)

    def _chunk_segment(self, start: int, chunk: Chunk, positions: Tensor) -> AttentionSegment:
        end = chunk.start + chunk.length
        tables = self.slots.block_tables[chunk.seq.slot : chunk.seq.slot + 1, : -(-end // self.config.block_size)]
        context = torch.full((1,), chunk.start, device=self.device)
        visible = self._visible(chunk)
        visible = None if visible is None else visible.to(self.device)
        return AttentionSegment.of(start, positions[None], context, visible, tables)


class _FlatChunks(NamedTuple):
    """The chunks' part of a flattened batch."""

    wanted: list[int]
    """Rows of the batch whose logits are needed."""
    fields: tuple[Tensor, Tensor, Tensor]
    """Token ids, positions and slot mapping: int64 [num_rows]."""
    real: Tensor | None
    segments: list[AttentionSegment]
    slots: Tensor
    """int64 [num_rows]: of each row's sequence; empty where nobody asks."""
    starts: list[int]
    """By chunk: row of the batch of its first token."""
