"""Results of forward passes, and the fixed-address buffers through which CUDA graphs exchange them."""

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
    """Result of one forward pass over decodes and prompt chunks."""

    decodes: Decodes | None
    """Decodes of the pass; None in a round without decodes."""
    output: ModelOutput
    """Logits and taps of the decodes' rows."""
    evidence: Tensor | None
    """Evidence of pruned trees, see `AcceptedPaths.evidence`."""
    chunks: ModelOutput | None = None
    """Output for prompt chunks; None without chunks. The first rows of logits belong to the chunks that sample, the
    other rows to the prompt tokens that are reported; the taps belong to all chunk tokens. In a captured pass, logits
    and taps belong to all pieces, padding included.
    """
    forward_s: float = 0.0
    """Host seconds spent in the model."""


class ForwardBuffers:
    """Result of the latest forward pass, at fixed addresses that depend on the number of nodes per sequence.

    Only the latest result is kept. Rows that the latest pass did not fill hold values of an earlier pass with the same
    number of nodes per sequence, so that indices in such rows are within range.
    """

    def __init__(self) -> None:
        self._small: dict[int, list[Tensor]] = {}
        """Tensors of `_small_parts`, by nodes per sequence."""
        self._large: dict[int, ModelOutput] = {}

    @torch.inference_mode()
    def reserve(self, samples: list[ForwardResult], batches: list[int]) -> None:
        """Allocates buffers for results of the given shapes; earlier results in these shapes are lost.

        Args:
            samples: one result of a single sequence for each shape.
            batches: largest batch size of each sample's shape.
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
        """Stores a result whose shape was reserved."""
        width, num_reqs = _num_nodes(result), len(result.decodes.slots)
        kept = self._small[width]
        copy_all([(into[:num_reqs], part) for into, part in zip(kept, _small_parts(result), strict=True)])
        for into, part in zip(self._large[width], result.output, strict=True):
            if part is not None and part.data_ptr() != into.data_ptr():
                into[: len(part)].copy_(part)

    def room(self, num_reqs: int, num_nodes: int) -> ModelOutput:
        """Returns views of the logits and taps buffers, in which a pass may place its output directly before `put`."""
        return ModelOutput(*(None if part is None else part[: num_reqs * num_nodes] for part in self._large[num_nodes]))

    def keep_roots(self, num_nodes: int, rows: Tensor) -> None:
        """Reduces the trees in rows int64 [n] of the latest result to their roots."""
        self._small[num_nodes][_NUM_VALID][rows] = 1

    def latest_result(self, slots: Tensor, num_nodes: int) -> ForwardResult:
        """Returns views of the latest result. `slots`, int64 [num_reqs], must be in the order of the pass.

        Rows of padding slots hold values of earlier passes.
        """
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
"""Index of `num_valid` in `_small_parts` of a result with trees."""


def _num_nodes(result: ForwardResult) -> int:
    return result.decodes.token_ids.shape[1]


def _small_parts(result: ForwardResult) -> list[Tensor]:
    """Returns roots, positions, slot mapping, then root tokens or trees, then the evidence of pruning if there is
    any."""
    decodes = result.decodes
    parts = [decodes.roots, decodes.positions, decodes.slot_mapping]
    parts += [decodes.token_ids] if decodes.tree is None else decodes.tree
    return parts if result.evidence is None else [*parts, result.evidence]


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
