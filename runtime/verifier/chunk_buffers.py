"""What captured rounds read of prompt chunks, and what they leave for them, at addresses that never change."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.protocol.transfer import upload_into
from wingbeat.runtime.scheduling.scheduler import Chunk
from wingbeat.runtime.verifier.model import ModelOutput
from wingbeat.runtime.verifier.prompt_chunks import PIECE_ROWS, ChunkPieces, Pieces
from wingbeat.runtime.verifier.slots import SlotState

_PER_ROW, _PER_PIECE = 4, 3


class ChunkBuffers:
    """The pieces of one round at a time, padded by pieces of the spare slot, of which nothing is stored.

    Args:
        most_pieces: of a round.
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
        """Make room for results like this one's rows, and let all pieces be padding: nothing may be stored again."""
        self._inputs.zero_()
        if self._results is None:
            logits, taps = sample
            room = None if taps is None else taps.new_zeros(self._most * PIECE_ROWS, taps.shape[1])
            self._results = ModelOutput(logits.new_zeros(self._most, logits.shape[1]), room)

    def put(self, pieces: ChunkPieces, chunks: Sequence[Chunk], num_pieces: int) -> None:
        """Bring a round's chunks to the device as one copy.

        Args:
            num_pieces: with padding.
        """
        rows, slots, contexts = pieces
        per_row, per_piece = self._places(np.zeros(self._size(num_pieces), np.int64), num_pieces)
        per_row[1] = np.tile(np.arange(PIECE_ROWS), num_pieces)
        for place, part in zip(per_row, (rows.token_ids, rows.positions, rows.stores, rows.real), strict=True):
            place[: len(part)] = part
        per_piece[0] = self._spare
        for place, part in zip(per_piece, (slots, contexts, rows.logits_rows(chunks, 0)), strict=True):
            place[: len(part)] = part
        upload_into(self._inputs[: self._size(num_pieces)], per_row.base)

    def pieces(self, num_pieces: int) -> tuple[Pieces, Tensor]:
        """The pieces, and int64 [num_pieces]: rows whose logits are needed, first those of the chunks that sample."""
        (token_ids, positions, stores, _), (slots, contexts, wanted) = self._places(
            self._inputs[: self._size(num_pieces)], num_pieces
        )
        return Pieces(token_ids, positions, stores, slots, contexts), wanted

    def keep(self, output: ModelOutput) -> None:
        """Leave what a pass says of its pieces."""
        for into, part in zip(self._results, output, strict=True):
            if part is not None:
                into[: len(part)].copy_(part)

    def take(self, num_pieces: int, num_samples: int, num_tokens: int) -> ModelOutput:
        """Logits [num_samples, vocab_size] of the chunks that sample, and taps [num_tokens, taps_size]: until the next
        round.

        Args:
            num_pieces: as they were put.
        """
        logits, taps = self._results
        if taps is not None:
            (*_, real), _ = self._places(self._inputs[: self._size(num_pieces)], num_pieces)
            taps = taps.index_select(0, real[:num_tokens])
        return ModelOutput(logits[:num_samples], taps)

    @staticmethod
    def _size(num_pieces: int) -> int:
        return num_pieces * (_PER_ROW * PIECE_ROWS + _PER_PIECE)

    @staticmethod
    def _places(flat, num_pieces: int):
        """[_PER_ROW, num_rows] and [_PER_PIECE, num_pieces] of memory on either side."""
        end = _PER_ROW * PIECE_ROWS * num_pieces
        return flat[:end].reshape(_PER_ROW, -1), flat[end:].reshape(_PER_PIECE, num_pieces)
