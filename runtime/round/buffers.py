"""What a forward pass says; what captured ones read, and leave for the choice of tokens, at addresses that stay."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import copy_all, upload_into
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS, ChunkRows
from wingbeat.runtime.round.rows import Decodes, ModelOutput
from wingbeat.runtime.round.slots import SlotState


class ForwardResult(NamedTuple):
    """A forward pass over decodes and prompt chunks."""

    decodes: Decodes | None
    """None without any."""
    output: ModelOutput
    """Of the decodes' rows."""
    evidence: Tensor | None
    """As `AcceptedPaths.evidence`."""
    chunks: ModelOutput | None = None
    """Logits of the chunks that sample, then of prompt tokens that are reported; taps of the chunks' tokens. In a
    captured pass, of all pieces. None without chunks."""
    forward_s: float = 0.0
    """Host seconds in the model."""


class ForwardBuffers:
    """Results at addresses that never change, by nodes per sequence; one is kept at a time.

    Rows that no pass has filled hold what an earlier one of as many nodes left there: no index of it is out of range.
    """

    def __init__(self) -> None:
        self._small: dict[int, list[Tensor]] = {}
        """Of so many nodes: `_small_parts`."""
        self._large: dict[int, ModelOutput] = {}

    @torch.inference_mode()
    def reserve(self, samples: list[ForwardResult], batches: list[int]) -> None:
        """Make room; whatever of these shapes was kept is lost.

        Args:
            samples: of one sequence each.
            batches: most sequences of each sample's shape.
        """
        widths = [_num_nodes(sample) for sample in samples]
        num_rows = max(width * batch for width, batch in zip(widths, batches, strict=True))
        logits, taps = samples[0].output
        room = ModelOutput(
            logits.new_zeros(num_rows, logits.shape[1]),
            None if taps is None else taps.new_zeros(num_rows, taps.shape[1]),
        )
        for sample, width, batch in zip(samples, widths, batches, strict=True):
            self._small[width] = [part.repeat(batch, *[1] * (part.dim() - 1)) for part in _small_parts(sample)]
            self._large[width] = room

    def put(self, result: ForwardResult) -> None:
        """Keep a result of a shape that was reserved."""
        width, num_reqs = _num_nodes(result), len(result.decodes.slots)
        kept = self._small[width]
        copy_all([(into[:num_reqs], part) for into, part in zip(kept, _small_parts(result), strict=True)])
        for into, part in zip(self._large[width], result.output, strict=True):
            if part is not None and part.data_ptr() != into.data_ptr():
                into[: len(part)].copy_(part)

    def room(self, num_reqs: int, num_nodes: int) -> ModelOutput:
        """Where the output of a pass that is put next may be left already."""
        return ModelOutput(*(None if part is None else part[: num_reqs * num_nodes] for part in self._large[num_nodes]))

    def keep_roots(self, num_nodes: int, rows: Tensor) -> None:
        """Let only the roots count of some trees of the latest result: rows int64 [n]."""
        self._small[num_nodes][_NUM_VALID][rows] = 1

    def take(self, slots: Tensor, num_nodes: int) -> ForwardResult:
        """The latest result, for sequences in slots int64 [num_reqs]: of the pass, in its order, or nobody's."""
        num_reqs, num_rows = len(slots), len(slots) * num_nodes
        roots, positions, mapping, *rest = (part[:num_reqs] for part in self._small[num_nodes])
        logits, taps = (part if part is None else part[:num_rows] for part in self._large[num_nodes])
        fields, evidence = rest, None
        tree = None
        if len(rest) > 1:
            fields, evidence = rest[: len(TokenTree._fields)], (*rest, None)[len(TokenTree._fields)]
            tree = TokenTree(*fields)
        decodes = Decodes(slots, roots, fields[0], tree, positions, mapping)
        return ForwardResult(decodes, ModelOutput(logits, taps), evidence)


_NUM_VALID = 3 + TokenTree._fields.index("num_valid")
"""Among the parts of a result with trees."""


def _num_nodes(result: ForwardResult) -> int:
    return result.decodes.token_ids.shape[1]


def _small_parts(result: ForwardResult) -> list[Tensor]:
    """Roots, positions, slot mapping; then the tokens of bare roots, or trees and perhaps evidence of them."""
    decodes = result.decodes
    parts = [decodes.roots, decodes.positions, decodes.slot_mapping]
    parts += [decodes.token_ids] if decodes.tree is None else decodes.tree
    return parts if result.evidence is None else [*parts, result.evidence]


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

    def put(self, rows: ChunkRows, num_pieces: int) -> None:
        """Bring a round's chunks to the device as one copy.

        Args:
            rows: on the host, in pieces.
            num_pieces: with padding.
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
        """What was put; as many `wanted` as pieces, those of the chunks that sample first."""
        per_row, per_piece = self._places(self._inputs[: self._size(num_pieces)], num_pieces)
        (token_ids, positions, stores, real), (slots, contexts, wanted) = per_row, per_piece
        return ChunkRows(token_ids, positions, stores, slots, contexts, real, wanted)

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
            taps = taps.index_select(0, self.rows(num_pieces).real[:num_tokens])
        return ModelOutput(logits[:num_samples], taps)

    @staticmethod
    def _size(num_pieces: int) -> int:
        return num_pieces * (_PER_ROW * PIECE_ROWS + _PER_PIECE)

    @staticmethod
    def _places(flat, num_pieces: int):
        """[_PER_ROW, num_rows] and [_PER_PIECE, num_pieces] of memory on either side."""
        end = _PER_ROW * PIECE_ROWS * num_pieces
        return flat[:end].reshape(_PER_ROW, -1), flat[end:].reshape(_PER_PIECE, num_pieces)
