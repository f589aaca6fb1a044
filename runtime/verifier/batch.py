"""The flattened batch of a round: decodes and trees first, prompt chunks behind them.

Lengths, roots and block tables come from the slot state on the device; what the host knows of them are upper bounds.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.kernels.tree.reference import ancestor_words
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache, slot_mapping
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.decodes import Decodes
from wingbeat.runtime.verifier.features import Feature, Placed, columns_of
from wingbeat.runtime.verifier.layers.attention import AttentionMetadata, AttentionSegment
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.packing import pack
from wingbeat.runtime.verifier.model import ForwardBatch
from wingbeat.runtime.verifier.prompt_chunks import PIECE_ROWS, Pieces, in_pieces, side_by_side
from wingbeat.runtime.verifier.slots import SlotState


class BatchBuilder:
    """Builds forward passes over one engine's sequences.

    Args:
        slots: device state by slot, shared with the model runner.
        on_host: whether the device is the host itself, so that looking at what it computed is no wait.
        pieces: prompt chunks are one segment, of pieces of equal height; else each is a segment of its own.
        features: what else this engine's batches have.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        slots: SlotState,
        config: EngineConfig,
        on_host: bool,
        pieces: bool = False,
        features: tuple[Feature, ...] = (),
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.config = config
        self.device = slots.device
        self.on_host = on_host
        self.features = features
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
        placed = Placed(plan, decodes, chunk_slots, starts, self.on_host)
        return self._with_features(token_ids, positions, mapping, segments, logits_rows, real, placed)

    def _with_features(
        self,
        token_ids: Tensor,
        positions: Tensor,
        mapping: Tensor,
        segments: list[AttentionSegment],
        logits_rows: Tensor | None,
        chunk_rows: Tensor | None,
        placed: Placed,
    ) -> ForwardBatch:
        positions = positions[None]
        for feature in self.features:
            positions = feature.positions(positions, placed)
        columns = columns_of(self.features, placed)
        metadata = AttentionMetadata(self.cache.layers, mapping, segments, columns=columns)
        return ForwardBatch(token_ids[None], positions, logits_rows, metadata, chunk_rows, self.features)

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
        fields, starts = (token_ids, positions, mapping), [begin + start for start in rows.starts]

        def slots() -> Tensor:
            return upload([chunk.seq.slot for chunk in chunks for _ in range(chunk.length)], self.device)

        return _FlatChunks(rows.logits_rows(chunks, begin), fields, None, segments, slots, starts)

    def _chunks_in_pieces(self, chunks: list[Chunk], begin: int) -> "_FlatChunks":
        """One segment of all chunks, brought to the device as one copy."""
        rows, slots, contexts = in_pieces(chunks, self._last_position)
        parts = (rows.token_ids, rows.positions, rows.stores, slots, contexts, begin + rows.real)
        arrived = upload(np.concatenate(parts), self.device).split([len(part) for part in parts])
        longest = max(chunk.start + chunk.length for chunk in chunks)
        fields, segment = self._piece_rows(Pieces(*arrived[:-1]), begin, -(-longest // self.config.block_size))
        row_slots = partial(arrived[3].repeat_interleave, PIECE_ROWS)
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
        num_rows = decodes.num_rows
        fields = [part.flatten() for part in (decodes.token_ids, decodes.positions, decodes.slot_mapping)]
        logits_rows = slots = None
        if pieces is not None:
            own, segment = self._piece_rows(pieces, num_rows)
            segments.append(segment)
            fields = [torch.cat(parts) for parts in zip(fields, own, strict=True)]
            logits_rows = torch.cat([torch.arange(num_rows, device=self.device), wanted + num_rows])
            slots = partial(pieces.slots.repeat_interleave, PIECE_ROWS)
        placed = Placed(None, decodes, slots, [], self.on_host)
        return self._with_features(*fields, segments, logits_rows, None, placed)

    def _visible(self, chunk: Chunk) -> Tensor | None:
        return next((seen for feature in self.features if (seen := feature.visible(chunk)) is not None), None)

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
    slots: Callable[[], Tensor]
    """Makes int64 [num_rows]: of each row's sequence."""
    starts: list[int]
    """By chunk: row of the batch of its first token."""
