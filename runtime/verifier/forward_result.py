"""What a forward pass says, and where a captured one leaves it for the choice of its tokens, a graph of its own."""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import copy_all
from wingbeat.runtime.verifier.decodes import Decodes
from wingbeat.runtime.verifier.model import ModelOutput


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
            if part is not None:
                into[: len(part)].copy_(part)

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


def _num_nodes(result: ForwardResult) -> int:
    return result.decodes.token_ids.shape[1]


def _small_parts(result: ForwardResult) -> list[Tensor]:
    """Roots, positions, slot mapping; then the tokens of bare roots, or trees and perhaps evidence of them."""
    decodes = result.decodes
    parts = [decodes.roots, decodes.positions, decodes.slot_mapping]
    parts += [decodes.token_ids] if decodes.tree is None else decodes.tree
    return parts if result.evidence is None else [*parts, result.evidence]
