"""A row's attention has the same bits whatever else is in the batch: splits go by the request's own length, whichever
program does them."""

import pytest
import torch

from tests.kernels.attention_cases import NAN, Case, Inputs, build

pytest.importorskip("triton")

from wingbeat.kernels.gpu.attention import launch as triton_attention
from wingbeat.kernels.gpu.attention.splits import Splits
from wingbeat.kernels.gpu.attention.tiles import TileConfig

CONTEXTS = (97, 3, 0, 61, 130, 15, 48, 33)
KINDS = {
    "plain": Case(CONTEXTS, 1, mask="causal"),
    "tree": Case(CONTEXTS, 6),
    "chunk": Case(CONTEXTS, 19, mask="causal"),
    "window": Case(CONTEXTS, 3, window=50, sinks=True),
    "chunk-window": Case(CONTEXTS, 19, mask="causal", window=21),
    "half": Case(CONTEXTS, 2, dtype=torch.float16),
}


def attend(inputs: Inputs, reqs: slice, width: int | None = None) -> torch.Tensor:
    """Rows of some requests, whose block tables may be cut to the used entries."""
    arguments = [
        tensor if tensor is None or at in (1, 2) else tensor[reqs] for at, tensor in enumerate(inputs.arguments[:-1])
    ]
    arguments[3] = arguments[3][:, :width]
    out = torch.full_like(arguments[0], NAN)
    options = {"config": TileConfig(16, 16, 4, 2, 0), "splits": Splits(4, 32)}
    return triton_attention.tree_attention(*arguments, inputs.arguments[-1], **inputs.options, out=out, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_the_bits_that_it_has_beside_others(kind, monkeypatch):
    """Alone in a batch and in the shortest table, where a short one is not split at all; beside others, a program does
    one split, or all splits but the first ones."""
    inputs = build(KINDS[kind], poison=NAN)
    together = attend(inputs, slice(None))
    with monkeypatch.context() as patch:
        patch.setattr(Splits, "launched", lambda self, num_reqs, *_: num_reqs + 1)
        assert torch.equal(attend(inputs, slice(None)).view(torch.uint8), together.view(torch.uint8))
    block_size, num_new = inputs.arguments[1].shape[1], inputs.positions.shape[1]
    for req, context in enumerate(CONTEXTS):
        alone = attend(inputs, slice(req, req + 1), -(-(context + num_new) // block_size))
        assert torch.equal(alone[0].view(torch.uint8), together[req].view(torch.uint8)), context
