"""Fixed-address buffers of a round's prompt pieces, through which CUDA graphs exchange them."""

import numpy as np
import torch

from wingbeat.runtime.protocol.transfer import upload_into
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS, ChunkRows
from wingbeat.runtime.round.rows import ModelOutput
from wingbeat.runtime.round.slots import SlotState

_PER_ROW, _PER_PIECE = 4, 3


class ChunkBuffers:
    """Inputs and outputs of one round's prompt pieces, at fixed addresses.

    Padding consists of pieces of the spare slot, whose KV is not stored.

    Args:
        most_pieces: largest number of pieces in a round.
    """

    def __init__(self, slots: SlotState, most_pieces: int) -> None:
        self._spare = slots.spare
        self._most = most_pieces
        size = most_pieces * (_PER_ROW * PIECE_ROWS + _PER_PIECE)
        with torch.inference_mode(mode=False):
            self._inputs = torch.zeros(size, dtype=torch.int64, device=slots.device)
        self._results: ModelOutput | None = None

    @torch.inference_mode()
    def reserve(self, sample: ModelOutput) -> None:
        """Allocates result buffers with the row shapes of `sample`, and turns all input pieces into padding.

        If the inputs were not padding, the passes that are captured next would store the latest round's KV again.
        """
        self._inputs.zero_()
        if self._results is None:
            logits, taps = sample
            room = None if taps is None else taps.new_zeros(self._most * PIECE_ROWS, taps.shape[1])
            self._results = ModelOutput(logits.new_zeros(self._most, logits.shape[1]), room)

    def put(self, rows: ChunkRows, num_pieces: int) -> None:
        """Uploads a round's chunks in one copy.

        Args:
            rows: chunks in pieces, on the host.
            num_pieces: number of pieces, including padding.
        """
        per_row, per_piece = self._places(np.zeros(self._size(num_pieces), np.int64), num_pieces)
        per_row[1] = np.tile(np.arange(PIECE_ROWS), num_pieces)
        for place, part in zip(per_row, (rows.token_ids, rows.positions, rows.stores, rows.real), strict=True):
            place[: len(part)] = part
        per_piece[0] = self._spare
        for place, part in zip(per_piece, (rows.slots, rows.contexts, rows.wanted), strict=True):
            place[: len(part)] = part
        upload_into(self._inputs[: self._size(num_pieces)], per_row.base)

    def rows(self, num_pieces: int) -> ChunkRows:
        """Returns the uploaded pieces, padding included.

        `wanted` has as many entries as there are pieces: first the rows of chunks that sample, then padding.
        """
        per_row, per_piece = self._places(self._inputs[: self._size(num_pieces)], num_pieces)
        (token_ids, positions, stores, real), (slots, contexts, wanted) = per_row, per_piece
        return ChunkRows(token_ids, positions, stores, slots, contexts, real, wanted)

    def keep(self, output: ModelOutput) -> None:
        """Stores the output of a pass over the pieces."""
        for into, part in zip(self._results, output, strict=True):
            if part is not None:
                into[: len(part)].copy_(part)

    def latest_output(self, num_pieces: int, num_samples: int, num_tokens: int) -> ModelOutput:
        """Returns logits [num_samples, vocab_size] of the chunks that sample, and taps [num_tokens, taps_size].

        The output is valid until the next round.

        Args:
            num_pieces: as passed to `put`.
        """
        logits, taps = self._results
        if taps is not None:
            taps = taps.index_select(0, self.rows(num_pieces).real[:num_tokens])
        return ModelOutput(logits[:num_samples], taps)

    @staticmethod
    def _size(num_pieces: int) -> int:
        return num_pieces * (_PER_ROW * PIECE_ROWS + _PER_PIECE)

    @staticmethod
    def _places(flat, num_pieces: int):
        """Returns views [_PER_ROW, num_rows] and [_PER_PIECE, num_pieces] of a flat host or device buffer."""
        end = _PER_ROW * PIECE_ROWS * num_pieces
        return flat[:end].reshape(_PER_ROW, -1), flat[end:].reshape(_PER_PIECE, num_pieces)
