"""Deterministic mode beside products: a row has the same bits alone, and at any place among 3 to 512 rows."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_cases import DEVICE, NAN, Case, build
from wingbeat.kernels.gpu import layer
from wingbeat.kernels.gpu.attention.launch import tree_attention
from wingbeat.kernels.gpu.attention.splits import Splits
from wingbeat.kernels.gpu.sampling import launch as sampling
from wingbeat.kernels.gpu.sampling import scratch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="needs --ptx or a GPU: numpy's products depend on a row's place"
)

COUNTS = (3, 16, 64, 512)
BF16 = torch.bfloat16
VOCAB_SIZE = 300


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16).to(DEVICE)


WEIGHT = draw(200, seed=1)
EPSILON = 1e-5


def heads(qkv: Tensor, angles: Tensor, norm: Tensor | None) -> Tensor:
    """Rotated queries, and keys and values where they were stored."""
    count = len(qkv)
    caches = [torch.full((2 + count // 16, 16, 2, 16), NAN, dtype=BF16, device=DEVICE) for _ in range(2)]
    slots = torch.arange(16, 16 + count, device=DEVICE)
    query = layer.rotate_and_store(qkv, angles.cos(), angles.sin(), *caches, slots, norm, norm, EPSILON)
    return torch.cat([query, *(cache.flatten(0, 1)[slots] for cache in caches)], dim=1)


def tokens(logits: Tensor, numbers: Tensor, temperature: float, top_p: float) -> Tensor:
    """A token for each row; each row has its own seed and position."""
    ones, zeros = torch.ones(len(logits), device=DEVICE), torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
    columns = (ones * temperature, zeros, ones * top_p, zeros.float(), numbers, numbers + 7)
    filtered = top_p < 1
    return sampling.choose_tokens(logits, *columns, any_filtered=filtered, processors=None, workspace=None)[:, None]


KINDS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "norm": (lambda rows: layer.add_rms_norm(rows, None, WEIGHT, EPSILON)[0], [(200,)]),
    "norm of a sum": (
        lambda rows, others: torch.cat(layer.add_rms_norm(rows, others, WEIGHT, EPSILON), 1),
        [(200,), (200,)],
    ),
    "heads": (lambda qkv, angles: heads(qkv, angles, None), [(8, 16), (8,)]),
    "normed heads": (lambda qkv, angles: heads(qkv, angles, WEIGHT[:16]), [(8, 16), (8,)]),
    "gated activation": (layer.silu_mul, [(192,)]),
    "greedy": (lambda logits: sampling.best_tokens(logits, None)[:, None], [(VOCAB_SIZE,)]),
    "sampled": (lambda logits, numbers: tokens(logits, numbers, 0.9, 1.0), [(VOCAB_SIZE,), ()]),
    "filtered": (lambda logits, numbers: tokens(logits, numbers, 0.9, 0.8), [(VOCAB_SIZE,), ()]),
}
"""Each kernel, as a function of rows, and the shapes of a row's inputs; a row without elements is its number."""


def inputs_of(shapes: list[tuple[int, ...]], count: int, seed: int) -> list[Tensor]:
    return [
        draw(count, *shape, seed=seed + at) if shape else torch.arange(count, device=DEVICE) + seed
        for at, shape in enumerate(shapes)
    ]


@pytest.fixture
def short_shares(monkeypatch):
    """Several programs share a row of few tokens, and fewer do where rows are many."""
    for name, value in {"_TILE": 64, "_SEARCH_TILE": 32, "_MAX_SPLITS": 4, "_LISTED": 128}.items():
        monkeypatch.setattr(scratch, name, value)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "norm" else pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.usefixtures("short_shares", "poisoned_memory")
def test_a_row_has_the_same_bits_alone_and_among_others(kind):
    compute, shapes = KINDS[kind]
    row = inputs_of(shapes, 1, seed=2)
    alone = compute(*row).view(torch.uint8)
    for count in COUNTS:
        among, places = inputs_of(shapes, count, seed=count), sorted({0, count // 3, count - 1})
        for inputs, own in zip(among, row, strict=True):
            inputs[places] = own
        found = compute(*among)
        assert not found.isnan().any()
        for place in places:
            assert torch.equal(found[place].view(torch.uint8), alone[0]), (count, place)


@pytest.mark.slow
def test_attention_of_a_row_has_the_same_bits_among_512(poisoned_memory):
    """Requests of eight rows each; a request alone is at the first place."""
    inputs = build(Case(tuple(3 + 5 * (index % 7) for index in range(64)), 8, dtype=BF16), poison=NAN)

    def attend(reqs: slice) -> Tensor:
        query, keys, values, *by_request, scaling = inputs.arguments
        own = (query[reqs], keys, values, *(tensor[reqs] for tensor in by_request), scaling)
        return tree_attention(*own, **inputs.options, alike=True, splits=Splits(8, 16)).view(torch.uint8)

    together = attend(slice(None))
    assert len(together.flatten(0, 1)) == 512
    for first, count in ((0, 1), (41, 1), (63, 1), (5, 2), (30, 8)):
        assert torch.equal(attend(slice(first, first + count)), together[first : first + count]), (first, count)
