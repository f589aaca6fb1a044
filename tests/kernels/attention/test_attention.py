"""Paged attention and its masks against one loop per request, query, head and key, in double precision."""

import math
import random

import pytest
import torch

from tests.kernels.slow_trees import path_to_root
from wingbeat.kernels.attention.reference import context_mask, paged_attention, read_kv
from wingbeat.kernels.kv.reference import move_kv, store_kv

pytestmark = pytest.mark.few(4)

WINDOWS = [None, 1, 5, 64]


def random_batch(rng, num_reqs, num_query):
    """Contexts, random trees, their visibility and their logical positions."""
    contexts = [rng.randrange(0, 30) for _ in range(num_reqs)]
    trees = [[-1, *(rng.randrange(node) for node in range(1, num_query))] for _ in range(num_reqs)]
    visible = torch.zeros(num_reqs, num_query, num_query, dtype=torch.bool)
    positions = torch.zeros(num_reqs, num_query, dtype=torch.int64)
    for req, parents in enumerate(trees):
        for node in range(num_query):
            path = path_to_root(parents, node)
            visible[req, node, path] = True
            positions[req, node] = contexts[req] + len(path) - 1
    return contexts, visible, positions


def seen(contexts, visible, positions, window, req, row, key):
    """Whether a query row sees the key stored at index `key`, by definition."""
    context = contexts[req]
    if key < context:
        position = key
    elif key < context + visible.shape[1] and visible[req, row, key - context]:
        position = int(positions[req, key - context])
    else:
        return False
    return window is None or int(positions[req, row]) - position < window


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("num_reqs", "num_query"), [(1, 1), (3, 7), (2, 13)])
def test_mask(num_reqs, num_query, window):
    contexts, visible, positions = random_batch(random.Random(num_query), num_reqs, num_query)
    num_keys = max(contexts) + num_query + 5
    mask = context_mask(positions, torch.tensor(contexts), visible, num_keys, window, torch.float32)
    assert mask.shape == (num_reqs, num_query, num_keys)
    for req in range(num_reqs):
        for row in range(num_query):
            expected = [seen(contexts, visible, positions, window, req, row, key) for key in range(num_keys)]
            assert (mask[req, row] == 0).tolist() == expected
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}


def attend_by_loops(query, keys, values, shown, scaling, softcap, sinks):
    """float64 [num_query, num_heads, value_dim] of one request; keys are [num_keys, num_kv_heads, dim]."""
    num_query, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    out = torch.zeros(num_query, num_heads, values.shape[2], dtype=torch.float64)
    for row in range(num_query):
        for head in range(num_heads):
            logits = {}
            for key in shown[row]:
                logit = float(query[row, head].double() @ keys[key, head // group].double()) * scaling
                logits[key] = softcap * math.tanh(logit / softcap) if softcap else logit
            weights = {key: math.exp(logit) for key, logit in logits.items()}
            total = sum(weights.values()) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for key, weight in weights.items():
                out[row, head] += weight / total * values[key, head // group].double()
    return out


@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("num_reqs", "num_query", "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size"),
    [(1, 7, 4, 2, 8, 8, 4), (3, 5, 6, 2, 11, 7, 5), (2, 1, 3, 3, 16, 16, 16), (2, 9, 4, 1, 6, 10, 3)],
    ids=["B1-T7-H4-2-D8-8-S4", "B3-T5-H6-2-D11-7-S5", "B2-T1-H3-3-D16-16-S16", "B2-T9-H4-1-D6-10-S3"],
)
def test_paged_attention(num_reqs, num_query, num_heads, num_kv_heads, key_dim, value_dim, block_size, window, extra):
    generator = torch.Generator().manual_seed(num_query)
    contexts, visible, positions = random_batch(random.Random(num_query), num_reqs, num_query)
    softcap = 2.5 if extra in ("softcap", "both") else None
    sinks = torch.randn(num_heads, generator=generator) if extra in ("sinks", "both") else None
    width = -(-(max(contexts) + num_query) // block_size)
    num_blocks = 1 + num_reqs * width
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    tables = order.view(num_reqs, width)
    # Memory nobody wrote is finite in a real pool, but large: whatever leaks through the mask shows.
    key_cache = torch.full((num_blocks, block_size, num_kv_heads, key_dim), 50.0)
    value_cache = torch.full((num_blocks, block_size, num_kv_heads, value_dim), 1e4)
    query = torch.randn(num_reqs, num_query, num_heads, key_dim, generator=generator)
    expected = []
    for req in range(num_reqs):
        length = contexts[req] + num_query
        keys = torch.randn(length, num_kv_heads, key_dim, generator=generator)
        values = torch.randn(length, num_kv_heads, value_dim, generator=generator)
        steps = torch.arange(length)
        slots = tables[req, steps // block_size] * block_size + steps % block_size
        store_kv(keys, values, key_cache, value_cache, slots)
        shown = [
            [key for key in range(length) if seen(contexts, visible, positions, window, req, row, key)]
            for row in range(num_query)
        ]
        expected.append(attend_by_loops(query[req], keys, values, shown, 0.37, softcap, sinks))
    mask = context_mask(positions, torch.tensor(contexts), visible, width * block_size, window, torch.float32)
    out = paged_attention(query, key_cache, value_cache, tables, mask, 0.37, softcap, sinks)
    torch.testing.assert_close(out.double(), torch.stack(expected), atol=2e-5, rtol=1e-5)


def test_fp8_blocks_are_widened_as_they_are_read():
    caches = [torch.randn(6, 4, 2, dim, generator=torch.Generator().manual_seed(dim)) for dim in (8, 4)]
    rounded = [cache.to(torch.float8_e4m3fn) for cache in caches]
    tables = torch.tensor([[3, 1], [4, 5]])
    expected = [cache.to(torch.bfloat16)[tables].flatten(1, 2) for cache in rounded]
    gathered = read_kv(*rounded, tables, torch.bfloat16)
    assert all(torch.equal(*pair) for pair in zip(gathered, expected, strict=True))


def test_moves_read_before_they_write():
    """A path that shifts by one slot overwrites its own sources; the dropped moves all end in block 0."""
    caches = [
        tuple(torch.arange(24.0).view(6, 4, 1, 1) + 100 * part + 1000 * layer for part in (0, 1)) for layer in (0, 1)
    ]
    before = [tuple(part.clone().flatten() for part in layer) for layer in caches]
    source, target = torch.tensor([9, 10, 13, 0, 0]), torch.tensor([8, 9, 10, 0, 0])
    move_kv(caches, source, target)
    for layer, old_layer in zip(caches, before, strict=True):
        for part, old in zip(layer, old_layer, strict=True):
            expected = old.clone()
            expected[[8, 9, 10]] = old[[9, 10, 13]]
            assert torch.equal(part.flatten()[4:], expected[4:])
