"""Attention of the CPU's kernels is the softmax formula, for every row the same whatever lies beside it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.kernels import attention_cases
from tests.kernels.attention_cases import (
    CAUSAL,
    SHORT,
    TREES,
    Case,
    assert_close,
    by_formula,
    moved_before_the_beginning,
)
from wingbeat.kernels.cpu.ops import CACHE_DTYPES, cpu_kernels, pack_segments
from wingbeat.runtime.round.rows import Segment

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")

build = partial(attention_cases.build, device="cpu")
CASES = [case for case in TREES + CAUSAL if case.dtype in CACHE_DTYPES and not case.fp8]
CASES += [
    Case((300, 700), 6, heads=(5, 1), dims=(32, 32), block_size=16),
    Case((270, 20), 8, heads=(32, 2), dims=(64, 64), block_size=16, window=100),
    Case((530,), 40, mask="causal", heads=(8, 4), dims=(80, 80), block_size=16, softcap=3.0),
]
CASES += [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16) for case in CASES[::3]]


def attend(inputs, row_starts=None, query=None) -> torch.Tensor:
    """[num_reqs, num_query, num_heads, value_dim], or the packed rows of a packed query."""
    own, key_cache, value_cache, tables, contexts, positions, words, scaling = inputs.arguments
    rows = own.flatten(0, 1) if query is None else query
    causal = words is None
    positions = None if causal else positions
    made = Segment(0, *own.shape[:2], tables, contexts, positions, words, row_starts)
    options = {name: inputs.options[name] for name in ("softcap", "sinks")}
    window = inputs.options["sliding_window"] or 0
    out = cpu_kernels().attend(
        rows, key_cache, value_cache, pack_segments([made], key_cache.dtype), scaling, sliding_window=window, **options
    )
    return out.unflatten(0, own.shape[:2]) if query is None else out


@pytest.mark.few(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_formula_and_reads_nothing_else(case):
    inputs = build(case, poison=float("nan"))
    assert_close(attend(inputs), by_formula(inputs))


@pytest.mark.parametrize("count", [1, 3, 19])
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_rows_before_the_beginning_are_nobodys_keys(case, count):
    inputs = build(case, poison=float("nan"))
    out = attend(moved_before_the_beginning(inputs, count))
    assert_close(out[:, count:], by_formula(inputs))
    assert out.isfinite().all()


@pytest.mark.parametrize("case", [Case((9, 300), 7, block_size=16), Case((9, 31), 7, mask="causal")], ids=str)
def test_trees_of_unequal_sizes_need_no_padding(case):
    inputs = build(case, poison=0.0)
    padded = attend(inputs)
    query = inputs.arguments[0]
    packed = torch.cat([query[0, :3], query[1, :6]])
    out = attend(inputs, torch.tensor([0, 3, 9]), packed)
    assert torch.equal(out, torch.cat([padded[0, :3], padded[1, :6]]))


def test_a_row_has_the_same_bits_alone_and_in_a_chunk():
    inputs = build(Case((290,), 23, mask="causal", heads=(5, 1), dims=(32, 32), block_size=16), poison=0.0)
    chunk = attend(inputs)
    for row in (0, 11, 22):
        alone = build(Case((290,), 23, mask="causal", heads=(5, 1), dims=(32, 32), block_size=16), poison=0.0)
        alone.arguments[0] = alone.arguments[0][:, row : row + 1].contiguous()
        alone.arguments[4] = alone.arguments[4] + row
        assert torch.equal(attend(alone)[:, 0], chunk[:, row])


@pytest.mark.few(6)
@pytest.mark.parametrize("window", [None, 5, 100], ids=str)
@pytest.mark.parametrize("context", [9, 250, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(dtype, context, window):
    case = Case((context,), 24, heads=(5, 1), dims=(32, 32), block_size=16, window=window, dtype=dtype)
    inputs = build(case, poison=0.0)
    query, key_cache, value_cache, tables, contexts, positions, words, _ = inputs.arguments
    tree = attend(inputs)
    seen = [[node for node in range(24) if int(words[0, row, 0]) >> node & 1] for row in range(24)]
    deepest = max(range(24), key=lambda row: len(seen[row]))
    for row in (1, 12, deepest, 23):
        path = seen[row]
        alone = build(case, poison=0.0)
        keys, values = key_cache.clone(), value_cache.clone()
        where = [(int(tables[0, slot // 16]), slot % 16) for slot in (context + node for node in range(24))]
        for depth, node in enumerate(path):
            for cache, own in ((keys, key_cache), (values, value_cache)):
                cache[where[depth]] = own[where[node]]
        alone.arguments[0] = query[:, row : row + 1].contiguous()
        alone.arguments[1:3] = keys, values
        alone.arguments[4] = contexts + len(path) - 1
        alone.arguments[5], alone.arguments[6] = positions[:, row : row + 1], None
        assert torch.equal(attend(alone)[:, 0], tree[:, row])


def test_threads_change_no_bit():
    inputs = build(Case((300, 17, 45), 6, heads=(8, 4), block_size=16), poison=0.0)
    alone, kernels = attend(inputs), cpu_kernels()
    kernels.use_threads(2)
    try:
        assert all(torch.equal(attend(inputs), alone) for _ in range(20))
    finally:
        kernels.use_threads(1)
