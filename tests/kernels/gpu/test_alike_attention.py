"""Batch-invariant attention: a row has equal bits alone, in a chunk, and at the end of its path in a tree."""

import os

import pytest
import torch

from tests.kernels.attention_cases import NAN, Case, Inputs, assert_close, build, by_formula

pytest.importorskip("triton")

from wingbeat.kernels.gpu.attention.launch import tree_attention
from wingbeat.kernels.gpu.attention.splits import Splits

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="needs --ptx or a GPU: numpy's products depend on a row's place"
)

CONTEXTS = (97, 3, 0, 61, 130, 15, 48, 33)
SHORT = Splits(8, 64)
"""So that short contexts have several."""
KINDS = {
    "tree": Case(CONTEXTS, 9, dtype=torch.bfloat16),
    "chain": Case(CONTEXTS, 8, mask="causal", dtype=torch.bfloat16),
    "window": Case(CONTEXTS, 9, window=50, sinks=True, dtype=torch.bfloat16),
    "softcap": Case(
        (60, 5), 20, window=70, softcap=2.0, heads=(6, 2), dims=(24, 11), block_size=5, dtype=torch.float16
    ),
    "float32": Case((63, 5), 7),
    "wide": Case((60, 130), 7, heads=(8, 1), dims=(128, 128), block_size=16, dtype=torch.bfloat16),
}


def alone(inputs: Inputs, req: int, row: int) -> torch.Tensor:
    """Attention of a row whose path is its context, with the shortest possible block table."""
    query, key_cache, value_cache, tables, contexts, _, _, scaling = inputs.arguments
    block_size, context = key_cache.shape[1], int(contexts[req])
    path = inputs.visible[req, row].nonzero().flatten()
    stored = torch.cat([torch.arange(context), context + path])
    width = -(-len(stored) // block_size)
    pools = []
    for cache in (key_cache, value_cache):
        pool = torch.full((1 + width, *cache.shape[1:]), NAN).to(cache.dtype)
        pool.flatten(0, 1)[block_size : block_size + len(stored)] = cache[
            tables[req, stored // block_size], stored % block_size
        ]
        pools.append(pool)
    table = torch.arange(1, 1 + width)[None]
    own = (query[req : req + 1, row : row + 1], *pools, table, torch.tensor([len(stored) - 1]))
    return tree_attention(*own, None, None, scaling, **inputs.options, alike=True, splits=SHORT)[0, 0]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "tree" else pytest.mark.slow) for kind in KINDS]
)
def test_a_row_has_the_bits_that_it_has_alone(kind, poisoned_memory):
    inputs = build(KINDS[kind], poison=NAN)
    together = tree_attention(*inputs.arguments, **inputs.options, alike=True, splits=SHORT)
    assert_close(together, by_formula(inputs))
    for req in range(len(together)):
        for row in range(together.shape[1]):
            apart = alone(inputs, req, row).view(torch.uint8) != together[req, row].view(torch.uint8)
            assert not apart.any(), (req, row)
