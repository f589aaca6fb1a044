"""Results of forward passes, and the fixed-address buffers through which CUDA graphs exchange them."""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import copy_all
from wingbeat.runtime.round.rows import Decodes, ModelOutput


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
