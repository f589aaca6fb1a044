"""A drafter's pass over prompt chunks as a captured stage: chunks of any lengths, cut into pieces of equal length.

The pieces of a chunk are rows of `draft_accept` that are wider: each stores its keys before any key is read, so that a
piece sees the earlier pieces of its chunk. Padding pieces belong to the spare slot and store nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.decided_rows import CommitFunction, DecidedRows
from wingbeat.runtime.drafters.growth import SlotTables
from wingbeat.runtime.graphs.buckets import bucket_for
from wingbeat.runtime.graphs.graph_runner import Bucket, GraphPool, GraphRunner, Stage
from wingbeat.runtime.protocol.messages import ChannelSpec
from wingbeat.runtime.protocol.transfer import copy_all, upload_into
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS
from wingbeat.runtime.round.shapes import pieces_at_most

SIZES = (2, 8, 16, 32)
"""Numbers of pieces of the graphs. More pieces take several replays, because 1024 rows take longer to
compute than to launch."""


class Piece(NamedTuple):
    """A row of the stage, on the host."""

    slot: int
    state_slot: int
    """The slot, if the piece is the last of its chunk; else the spare slot. See `DecidedRows.state_slots`."""
    position: int
    """Position of the first token."""
    num_tokens: int
    first_row: int
    """Index of the first token among the tokens of all chunks."""


class PieceRows(NamedTuple):
    """Inputs of the captured stage; the tokens and taps of the pieces are in buffers of `PromptStage`."""

    numbers: Tensor
    """int64 [num_pieces, 5]: fields of `Piece`, with `first_row` counted from the first piece's."""
    first_token_ids: Tensor
    """int64 [num_pieces]: token at the first position, if the drafter reads it."""


class Kept(NamedTuple):
    """Output of the stage; empty, since the drafter stores the state of the prompts in its pool."""


class PromptStage:
    """Commits prompt chunks without media spans.

    Args:
        commit: see `CommitFunction`; commits pieces like decodes of `PIECE_ROWS` tokens.
        tables: tables by slot from which the stage reads blocks and offsets of positions.
        spare: slot of padding.
        reads_history: whether `commit` needs the token at each piece's first position.
    """

    def __init__(
        self,
        commit: CommitFunction,
        spec: ChannelSpec,
        tables: SlotTables,
        spare: int,
        dtype: torch.dtype,
        pool: GraphPool,
        reads_history: bool,
    ) -> None:
        self._commit_rows, self._tables, self._spare = commit, tables, spare
        self._reads_history = reads_history
        most = max(pieces_at_most(spec.max_prefill_tokens, spec.num_slots), 1)
        self.sizes = tuple(dict.fromkeys(min(size, most) for size in SIZES))
        device, num_rows = tables.committed_lens.device, self.sizes[-1] * PIECE_ROWS
        with torch.inference_mode(mode=False):
            self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
            self._taps = torch.zeros(num_rows, spec.taps_size, dtype=dtype, device=device)
            self._steps = torch.arange(PIECE_ROWS, device=device)
        buckets = [Bucket(size, PIECE_ROWS) for size in self.sizes]
        self.runner = GraphRunner(Stage.DRAFT_PREFILL, self._commit, self._padding, buckets, pool)

    def takes(self, batch: DraftBatch) -> bool:
        """Whether the chunks of a batch are committed by this stage: they have no media spans."""
        return batch.chunk_inputs is None and self.runner.has_graphs

    def commit(self, batch: DraftBatch) -> None:
        """Commits the chunks of a batch, of which there must be at least one."""
        num_slots, num_blocks = batch.block_tables.shape
        tables = [(self._tables.block_tables[:num_slots, :num_blocks], batch.block_tables)]
        deltas = self._tables.position_deltas
        if deltas is not None and batch.position_deltas is not None:
            tables.append((deltas[:num_slots], batch.position_deltas))
        pieces, most = self._cut(batch), self.sizes[-1]
        for begin in range(0, len(pieces), most):
            self._replay(pieces[begin : begin + most], batch, tables)
            tables = []

    def _cut(self, batch: DraftBatch) -> list[Piece]:
        pieces, row = [], 0
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            for at in range(0, length, PIECE_ROWS):
                count = min(PIECE_ROWS, length - at)
                state_slot = slot if at + count == length else self._spare
                pieces.append(Piece(slot, state_slot, start + at, count, row + at))
            row += length
        return pieces

    def _replay(self, pieces: list[Piece], batch: DraftBatch, tables: list[tuple[Tensor, Tensor]]) -> None:
        """Commits as many pieces as a graph holds."""
        begin, end = pieces[0].first_row, pieces[-1].first_row + pieces[-1].num_tokens
        bucket = Bucket(bucket_for(len(pieces), self.sizes), PIECE_ROWS)
        rows = self.runner.inputs(bucket)
        padding = [Piece(self._spare, self._spare, 0, 0, 0)] * (bucket.num_reqs - len(pieces))
        upload_into(rows.numbers, [piece._replace(first_row=piece.first_row - begin) for piece in pieces] + padding)
        copies = [(self._token_ids[: end - begin], batch.chunk_next_token_ids[begin:end])]
        if self._taps.shape[1]:
            copies.append((self._taps[: end - begin], batch.chunk_taps[begin:end]))
        if self._reads_history:
            own = rows.numbers[: len(pieces)]
            copies.append((rows.first_token_ids[: len(pieces)], batch.token_ids[own[:, 0], own[:, 2]]))
        copy_all(copies + tables)
        self.runner.replay(bucket, len(pieces))

    def _padding(self, size: int) -> PieceRows:
        numbers = self._token_ids.new_zeros(1, len(Piece._fields))
        numbers[:, :2] = self._spare
        return PieceRows(numbers, numbers[:, 2])

    def _commit(self, rows: PieceRows) -> Kept:
        """Runs the `draft_prefill` stage."""
        slots, state_slots, positions, counts, first_rows = rows.numbers.t().contiguous()
        # Columns past the end of a piece read other tokens, or those of an earlier pass: valid ids without effect.
        index = (first_rows[:, None] + self._steps).clamp_max_(len(self._token_ids) - 1)
        decided = DecidedRows(slots, positions, counts, self._token_ids[index], self._taps[index], rows.first_token_ids)
        deltas = self._tables.position_deltas
        decided = decided._replace(position_deltas=None if deltas is None else deltas[slots], state_slots=state_slots)
        self._commit_rows(decided, self._tables.block_tables)
        return Kept()
