"""Builds a round's flattened batch: first the rows of decodes with their trees, then the rows of prompt chunks.

Lengths, roots and block tables are read from the slot state on the device; lengths known to the host are upper bounds.
"""

from functools import partial

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.kernels.round.reference import place_nodes
from wingbeat.kernels.tree.reference import ancestor_words
from wingbeat.kernels.tree.results import GrownTree
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS, ChunkRows, in_pieces, row_starts, side_by_side
from wingbeat.runtime.round.rows import Decodes, Feature, Placed, Rows, Segment, columns_of, joined
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


class BatchBuilder:
    """Builds the batches of one engine's forward passes.

    Args:
        slots: device state by slot, shared with the model runner.
        last_position: last position that the model supports.
        on_host: whether tensors are on the CPU, so that features can read them without waiting for a device.
        pieces: True puts the prompt chunks of a round into one segment of equally long pieces; False gives each chunk
            its own segment.
        features: features that add columns to this engine's batches.
    """

    def __init__(
        self,
        cache: KVCache,
        slots: SlotState,
        config: EngineConfig,
        last_position: int,
        on_host: bool = False,
        pieces: bool = False,
        features: tuple[Feature, ...] = (),
    ) -> None:
        self.cache = cache
        self.slots = slots
        self.config = config
        self.device = slots.device
        self.on_host = on_host
        self.features = features
        self.of_decodes = tuple(feature for feature in features if not feature.of_chunks)
        self._optional = tuple(feature for feature in features if feature.can_be_absent)
        self.may_be_lean = True
        """Whether rounds are built without features that none of their sequences uses, see `is_lean`."""
        self._pieces = pieces
        self._stores_replays = any(feature.stores_replays for feature in features)
        self._last_position = last_position
        self._max_depth = config.speculation.max_path - 1

    def is_lean(self, plan: SchedulerOutput) -> bool:
        """Whether a round is computed without the features that can be absent, because no sequence uses them."""
        return self.may_be_lean and not any(feature.is_used(plan) for feature in self._optional)

    def decodes(self, slots: Tensor, tree: TokenTree | None) -> Decodes:
        """Returns a round's decode inputs; writes the root tokens into the trees.

        Args:
            slots: int64 [num_reqs].
            tree: one tree per sequence; None for bare roots.
        """
        drafted = None if tree is None else GrownTree(*tree)
        placed = place_nodes(slots, self.slots.columns, drafted, self._last_position, self.config.block_size)
        positions, mapping, tables = placed[2:]
        return Decodes(slots, placed.roots, placed.token_ids, tree, positions, mapping, tables=tables)

    def slot_mapping(self, slots: Tensor | slice, stored: Tensor) -> Tensor:
        """Returns the KV pool address of each position in `stored` [num_reqs, n].

        Row i belongs to the sequence in slots[i].
        """
        return slot_mapping(self.slots.block_tables[slots], stored, self.config.block_size)

    def flatten(self, plan: SchedulerOutput, decodes: Decodes | None) -> Rows:
        """Joins decodes and prompt chunks into one batch.

        Logits are computed for three kinds of rows: all rows of decodes, the last row of each chunk that samples, and
        each prompt token for whose successor a log-probability is reported.
        """
        begin = 0 if decodes is None else decodes.num_rows
        parts = [] if decodes is None else [self._decode_rows(decodes, self._decode_segment(plan.decodes, decodes))]
        chunk_slots = chunk_rows = logits_rows = None
        starts: list[int] = []
        if plan.chunks:
            in_one = self._pieces and all(self._visible(chunk) is None for chunk in plan.chunks)
            rows = in_pieces(plan.chunks, self._last_position) if in_one else side_by_side(plan.chunks)
            logits_rows = upload([*range(begin), *(begin + rows.wanted).tolist()] or [0], self.device)
            rows = rows._replace(real=begin + rows.real).to(self.device)
            if in_one:
                parts.append(self._piece_rows(rows, begin, self._num_blocks(plan.chunks)))
            else:
                parts.append(self._apart(plan.chunks, rows, begin))
            chunk_slots = partial(_slots_of, rows, plan.chunks, in_one)
            chunk_rows = rows.real if in_one else None
            starts = [begin + start for start in row_starts(plan.chunks, PIECE_ROWS if in_one else 1)]
        flat = joined(parts)._replace(logits_rows=logits_rows, chunk_rows=chunk_rows)
        lean = bool(self._optional) and self.is_lean(plan)
        return self._with_features(flat, Placed(plan, decodes, chunk_slots, starts, self.on_host, lean))

    def fixed(self, decodes: Decodes | None, chunks: ChunkRows | None = None, lean: bool = False) -> Rows:
        """Returns a batch of decodes, then prompt chunks in pieces, in the shapes that CUDA graphs capture.

        The batch's shapes depend on the arguments' shapes alone.

        Args:
            decodes: decode inputs; None for a batch of chunks alone.
            chunks: prompt chunks in pieces, of sequences without media spans; None for a batch of decodes alone.
            lean: whether features that can be absent are left out.
        """
        parts, begin, logits_rows, slots = [], 0, None, None
        if decodes is not None:
            begin = decodes.num_rows
            tables = self.slots.block_tables[decodes.slots] if decodes.tables is None else decodes.tables
            segment = self._tree_segment(decodes, tables)
            parts.append(self._decode_rows(decodes, segment))
        if chunks is not None:
            logits_rows = chunks.wanted
            if begin:
                logits_rows = torch.cat([torch.arange(begin, device=self.device), logits_rows + begin])
            parts.append(self._piece_rows(chunks, begin))
            slots = partial(chunks.slots.repeat_interleave, PIECE_ROWS)
        flat = joined(parts)._replace(logits_rows=logits_rows)
        return self._with_features(flat, Placed(None, decodes, slots, [], self.on_host, lean))

    def took(self, accepted: AcceptedPaths) -> None:
        """Passes the accepted paths of the latest pass's decodes to the features."""
        for feature in self.of_decodes:
            feature.took(accepted)

    def _with_features(self, rows: Rows, placed: Placed) -> Rows:
        features = self.features if placed.starts else self.of_decodes
        if placed.lean:
            features = tuple(feature for feature in features if not feature.can_be_absent)
        positions, columns = rows.positions, columns_of(features, placed)
        for feature in features:
            positions = feature.positions(positions, placed)
        present = (feature for feature in features if feature.kind in columns or not feature.of_chunks)
        around = tuple(partial(feature.entered, columns.get(feature.kind)) for feature in present)
        rows = rows._replace(positions=positions, columns=columns, around=around)
        for feature in features:
            rows = feature.relocated(rows)
        return rows

    def _decode_rows(self, decodes: Decodes, segment: Segment) -> Rows:
        fields = map(decodes.packed, (decodes.token_ids, decodes.positions, decodes.slot_mapping))
        return self._rows(*fields, [segment])

    def _rows(self, token_ids: Tensor, positions: Tensor, mapping: Tensor, segments: list[Segment]) -> Rows:
        return Rows(token_ids[None], positions[None], mapping, segments, self.cache.layers)

    def _apart(self, chunks: list[Chunk], rows: ChunkRows, begin: int) -> Rows:
        """Returns the rows of the chunks, with one segment for each chunk."""
        positions = rows.positions.split([chunk.length for chunk in chunks])
        starts, segments, mapping = row_starts(chunks), [], []
        for index, (chunk, start) in enumerate(zip(chunks, starts, strict=True)):
            own, context, visible = positions[index][None], rows.contexts[index : index + 1], self._visible(chunk)
            table = self.slots.block_tables[chunk.seq.slot : chunk.seq.slot + 1]
            visible = None if visible is None else visible.to(self.device)
            segments.append(Segment.of(begin + start, own, context, visible, table[:, : self._num_blocks([chunk])]))
            mapping.append(slot_mapping(table, own, self.config.block_size)[0])
        addresses = torch.cat(mapping)
        replayed = torch.where(rows.stores < 0, addresses, 0) if self._stores_replays else None
        mapping = torch.where(rows.stores > 0, addresses, 0)
        return self._rows(rows.token_ids, rows.positions, mapping, segments)._replace(replayed=replayed)

    def _piece_rows(self, rows: ChunkRows, begin: int, num_blocks: int | None = None) -> Rows:
        """Returns the rows of chunks that are cut into pieces, as one segment.

        Args:
            begin: first row of the chunks in the batch.
            num_blocks: width of the block tables that attention reads; None for as many blocks as a sequence may have.
        """
        shape, size = (len(rows.slots), PIECE_ROWS), self.config.block_size
        tables, positions = self.slots.block_tables[rows.slots], rows.positions.view(shape)
        stores = rows.stores.view(shape)
        mapping = slot_mapping(tables, positions, size, stores > 0).flatten()
        segment = Segment.of(begin, positions, rows.contexts, None, tables[:, :num_blocks])
        replayed = slot_mapping(tables, positions, size, stores < 0).flatten() if self._stores_replays else None
        return self._rows(rows.token_ids, rows.positions, mapping, [segment])._replace(replayed=replayed)

    def _num_blocks(self, chunks: list[Chunk]) -> int:
        """Number of blocks of the longest context to which these chunks attend."""
        return -(-max(chunk.start + chunk.length for chunk in chunks) // self.config.block_size)

    def _visible(self, chunk: Chunk) -> Tensor | None:
        return next((seen for feature in self.features if (seen := feature.visible(chunk)) is not None), None)

    def _decode_segment(self, seqs: list[Sequence], decodes: Decodes) -> Segment:
        longest = max(seq.max_len for seq in seqs) - 1 + decodes.token_ids.shape[1]
        return self._tree_segment(
            decodes, self.slots.block_tables[decodes.slots, : -(-longest // self.config.block_size)]
        )

    def _tree_segment(self, decodes: Decodes, tables: Tensor) -> Segment:
        """Returns a segment in which each node attends to its ancestors. Chains are causal and need no mask words."""
        num_reqs, num_nodes = decodes.token_ids.shape
        words = None
        if decodes.tree is not None and self.config.speculation.draft_top_k > 1:
            words = ancestor_words(decodes.tree.parents, min(self._max_depth, num_nodes - 1))
        return Segment(0, num_reqs, num_nodes, tables, decodes.roots, decodes.positions, words)


def _slots_of(rows: ChunkRows, chunks: list[Chunk], in_pieces: bool) -> Tensor:
    """Slot of each chunk row's sequence, int64 [num_rows]."""
    if in_pieces:
        return rows.slots.repeat_interleave(PIECE_ROWS)
    return rows.slots.repeat_interleave(upload([chunk.length for chunk in chunks], rows.slots.device))


def dummy_decode_batch(
    cache: KVCache,
    num_reqs: int,
    num_nodes: int,
    width: int,
) -> Rows:
    """Returns a batch of `num_reqs` chains of `num_nodes` rows.

    The rows are written to block 0 of the KV cache, which no sequence owns. The context is read from other blocks,
    because passes that read one block again and again find it in the processor's caches and are faster than any real
    pass. The contents of these blocks stay as they are.

    Args:
        width: number of blocks of context per sequence.
    """
    device = cache.layers[0][0].device
    tables = torch.zeros(num_reqs, width, dtype=torch.int64, device=device)
    read = tables[:, : max(width - -(-num_nodes // cache.block_size), 0)]
    read.copy_(torch.arange(read.numel(), device=device).view_as(read) % cache.num_blocks)
    cache.occupy(read.numel())
    context = torch.full((num_reqs,), max(width * cache.block_size - num_nodes, 0), dtype=torch.int64, device=device)
    positions = context[:, None] + torch.arange(num_nodes, device=device)
    segment = Segment.of(0, positions, context, None, tables)
    positions = positions.flatten()
    nothing = torch.zeros_like(positions)
    return Rows(nothing[None], positions[None], nothing, [segment], cache.layers)
