"""Queries, keys and values from token ids and features: the kernel against its reference."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.drawn import draw
from wingbeat.kernels.few_rows import embedded
from wingbeat.kernels.gpu import embedded as kernels
from wingbeat.kernels.layer.draft_rows import Pairs, Projection, Stored

pytestmark = [pytest.mark.few(4), pytest.mark.usefixtures("poisoned_memory")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2}
HEADS, KV_HEADS, BLOCK_SIZE, VOCAB = 4, 2, 4, 11


def arguments(num_rows: int, size: int, dim: int, dtype: torch.dtype, *, as_tree: bool, with_norms: bool) -> tuple:
    """Pairs, projection and addresses; in trees each request has as many rows as nodes of the previous level, and some
    slots are those of rows to drop."""
    generator, num_all, angles = torch.Generator().manual_seed(size), HEADS + 2 * KV_HEADS, torch.arange(num_rows)
    features, parents = draw(num_rows, size, dtype=dtype, seed=1), None
    if as_tree:
        features = features.view(-1, 3, size)
        parents = torch.randint(0, 3, (len(features), 3), generator=generator)
    norms = tuple(1 + draw(size, dtype=dtype, seed=seed) / 4 for seed in (2, 3))
    head_norms = (*(1 + draw(dim, dtype=dtype, seed=seed) / 4 for seed in (4, 5)), 1e-5) if with_norms else ()
    weight = draw(num_all * dim, 2 * size, dtype=dtype, seed=6) / (2 * size) ** 0.5
    bias = draw(num_all * dim, dtype=dtype, seed=7) if with_norms else None
    turned = angles[:, None] * 0.8 ** torch.arange(dim // 2)
    rotary = [wave.repeat(1, 2).to(dtype) for wave in (turned.cos(), turned.sin())]
    caches = [torch.zeros(2 + num_rows, BLOCK_SIZE, KV_HEADS, dim, dtype=dtype) for _ in range(2)]
    slots = torch.where(angles % 4 == 3, angles % BLOCK_SIZE, BLOCK_SIZE + 3 * angles)
    ids = torch.randint(0, VOCAB, (num_rows,), generator=generator)
    pairs = Pairs(ids, draw(VOCAB, size, dtype=dtype, seed=8), features, parents)
    projection = Projection(weight, bias, norms, 1e-5, torch.zeros(num_all, dtype=torch.int32), head_norms)
    return pairs, projection, Stored(*rotary, *caches, slots)


def moved(given):
    """Arguments in memory of their own on the device."""

    def there(part):
        if isinstance(part, torch.Tensor):
            return part.clone().to(DEVICE)
        return tuple(map(there, part)) if isinstance(part, tuple) else part

    return type(given)(*map(there, given))


def written(stored: Stored) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values but for block 0, which rows to drop have by slot."""
    return stored.key_cache[1:], stored.value_cache[1:]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "head-norms"])
@pytest.mark.parametrize("as_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("num_rows", "size", "dim"), [(3, 70, 16), (18, 1100, 40), (63, 256, 64)])
def test_heads_of_embedded_rows_are_the_references(num_rows, size, dim, as_tree, with_norms, dtype):
    """Twice by the same counters: the first launch has left them as it found them."""
    given = arguments(num_rows, size, dim, dtype, as_tree=as_tree, with_norms=with_norms)
    copies = [tuple(map(moved, given)) for _ in range(3)]
    normed = with_norms
    expected = (*embedded.embed_to_heads(*copies[0], normed=normed), *written(copies[0][2]))
    for pairs, projection, stored in copies[1:]:
        projection = projection._replace(counters=copies[1][1].counters)  # noqa: PLW2901
        found = (*kernels.embed_to_heads(pairs, projection, stored, normed), *written(stored))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=LIMITS[dtype], atol=LIMITS[dtype])
        assert not projection.counters.any()
