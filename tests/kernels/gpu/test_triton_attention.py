"""The attention kernel against the softmax formula in double precision.

Without a GPU it runs in Triton's interpreter, at tiny odd shapes.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernels.attention_cases import (
    CAUSAL,
    DEVICE,
    NAN,
    SHORT,
    TREES,
    Case,
    Inputs,
    assert_close,
    build,
    by_formula,
    moved_before_the_beginning,
)

pytest.importorskip("triton")

from wingbeat.kernels.attention.reference import tree_attention
from wingbeat.kernels.gpu.attention import launch as triton_attention
from wingbeat.kernels.gpu.attention.splits import Splits, workspace_size
from wingbeat.kernels.gpu.attention.tiles import TileConfig

pytestmark = pytest.mark.few(3)

TINY = TileConfig(16, 16, 4, 2, 0)


def run_kernel(inputs: Inputs, **options) -> torch.Tensor:
    """The kernel's result in memory that began as NaN."""
    query, value_cache = inputs.arguments[0], inputs.arguments[2]
    out = query.new_full((*query.shape[:3], value_cache.shape[3]), NAN)
    return triton_attention.tree_attention(*inputs.arguments, **inputs.options, out=out, **options)


SPLIT = [(case, 3) for case in TREES] + [(case, 1) for case in (*CAUSAL, *TREES[:3], TREES[6], TREES[10])]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_splits"), SPLIT, ids=str)
def test_kernel_is_the_formula(case, num_splits):
    inputs = build(case, poison=NAN)
    assert_close(run_kernel(inputs, config=TINY, splits=Splits(num_splits, 16)), by_formula(inputs))


@pytest.mark.few(1)
@pytest.mark.parametrize("config", [(16, 32), (32, 16), (16, 128)], ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_tile_sizes_change_nothing(mask, window, config):
    """Mask words meet the tiles at any offset, and tiles of 128 keys end in tiles of 64."""
    queries = {"num_query": 19} if mask == "causal" else {"num_query": 3, "num_new": 69}
    inputs = build(Case((130, 41), heads=(2, 1), mask=mask, window=window, **queries), poison=NAN)
    config = TileConfig(*config, 4, 2, 0)
    assert_close(run_kernel(inputs, config=config, splits=Splits(2, config.block_keys)), by_formula(inputs))


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_splits_without_keys_add_nothing(mask):
    """A captured launch keeps the splits of its longest context: short ones leave most of them empty."""
    inputs = build(Case((0, 2, 60), 3, heads=(2, 1), mask=mask, sinks=True, window=30), poison=NAN)
    workspace = torch.full((workspace_size(9, 3, 3, 2, 16),), NAN, device=DEVICE)
    assert_close(run_kernel(inputs, config=TINY, splits=Splits(9, 16), workspace=workspace), by_formula(inputs))


@pytest.mark.few(2)
@pytest.mark.parametrize(("count", "num_splits"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("case", SHORT, ids=str)
def test_rows_before_the_beginning_are_nobodys_keys(case, count, num_splits):
    """Such rows occur if a module drafts further ahead than its sequence is long; their outputs must be finite."""
    inputs = build(case, poison=NAN)
    out = run_kernel(moved_before_the_beginning(inputs, count), config=TINY, splits=Splits(num_splits, 16))
    assert_close(out[:, count:], by_formula(inputs))
    assert out.isfinite().all()


MANY = (0, 41, 130, 0, 7, 64, 15, 16, 17, 99, 0, 33)
SHARED = {
    "plain": Case(MANY, mask="causal"),
    "tree": Case(MANY, 5, sinks=True),
    "newest level": Case(MANY, 3, num_new=9, window=24),
    "tree-window": Case(MANY, 5, window=30, softcap=2.5, sinks=True),
    "chunk": Case(MANY, 19, mask="causal", heads=(2, 1)),
    "chunk-window": Case(MANY, 19, mask="causal", heads=(2, 1), window=21, sinks=True),
    "spare": Case(MANY, 2, spare_blocks=200, dtype=torch.float16),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED)
def test_programs_share_the_splits_of_requests_of_any_length(kind, monkeypatch):
    """Slots of padding have no context; one program does all splits but the first one of each request."""
    monkeypatch.setattr(Splits, "launched", lambda self, num_reqs, *_: num_reqs + 1)
    inputs = build(SHARED[kind], poison=NAN)
    num_query, num_heads = inputs.arguments[0].shape[1:3]
    workspace = torch.full((workspace_size(8, len(MANY), num_query, num_heads, 16),), NAN, device=DEVICE)
    out = run_kernel(inputs, config=TINY, splits=Splits(8, 16), workspace=workspace)
    assert_close(out, by_formula(inputs))


def test_a_short_workspace_is_refused():
    inputs = build(Case((40,), 3), poison=NAN)
    workspace = torch.zeros(workspace_size(2, 1, 3, 4, 16) - 1, device=DEVICE)
    with pytest.raises(ValueError, match="workspace"):
        run_kernel(inputs, config=TINY, splits=Splits(2, 16), workspace=workspace)
    assert workspace_size(1, 8, 60, 32, 128) == 0


@pytest.mark.slow
def test_the_same_launch_serves_other_lengths():
    """Lengths and tables are read on the device, as a replayed graph requires."""
    inputs = build(Case((40, 11), 5), poison=NAN)
    other = build(Case((7, 40), 5), poison=NAN, seed=1)
    out = run_kernel(inputs, config=TINY, splits=Splits(2, 16))
    for place, source in zip(inputs.arguments[:7], other.arguments[:7], strict=True):
        place.copy_(source)
    halves = Splits(2, 16)
    again = triton_attention.tree_attention(*inputs.arguments, **inputs.options, out=out, config=TINY, splits=halves)
    assert again is out
    assert_close(out, by_formula(other))


@pytest.mark.slow
def test_strided_rows_are_read_and_written_in_place():
    """transformers hands over [num_heads, num_tokens, dim] seen as [num_tokens, num_heads, dim]."""
    inputs = build(Case((13, 29), 5), poison=NAN)
    query = inputs.arguments[0]
    heads_first = query.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.full((2, 5, 4, 40), NAN, device=DEVICE)
    out = wide[..., 3:19]
    inputs.arguments[0] = heads_first
    halves = Splits(2, 16)
    triton_attention.tree_attention(*inputs.arguments, **inputs.options, out=out, config=TINY, splits=halves)
    assert_close(out, by_formula(inputs))
    assert wide[..., :3].isnan().all()
    assert wide[..., 19:].isnan().all()


def test_no_requests_need_no_launch():
    inputs = build(Case((5,), 3), poison=NAN)
    arguments = [tensor[:0] if at in (0, 3, 4, 5, 6) else tensor for at, tensor in enumerate(inputs.arguments)]
    assert triton_attention.tree_attention(*arguments, **inputs.options).shape == (0, 3, 4, 16)


BF16 = torch.bfloat16

REAL = [
    Case((8192 - 60,) * 8, 60, heads=(32, 8), dims=(128, 128), block_size=16, dtype=BF16),
    Case((8000,), 60, heads=(32, 8), dims=(128, 128), block_size=16, dtype=BF16),
    Case((8000,), 1, mask="causal", heads=(32, 8), dims=(128, 128), block_size=16, dtype=BF16),
    Case((1, 513, 4000), 33, heads=(32, 8), dims=(128, 128), block_size=16, dtype=torch.float16),
    Case((700, 64), 16, heads=(32, 8), dims=(128, 128), block_size=16, dtype=torch.float32),
    Case((1500,), 1024, mask="causal", heads=(32, 8), dims=(128, 128), block_size=16, dtype=BF16),
    Case((0,), 777, mask="causal", heads=(16, 2), dims=(128, 128), block_size=16, dtype=BF16),
    Case((3000, 90), 512, mask="causal", heads=(8, 4), dims=(256, 256), window=1024, softcap=50.0, dtype=BF16),
    Case((3000, 90), 60, heads=(64, 8), dims=(64, 64), window=128, sinks=True, block_size=16, dtype=BF16),
    Case((900, 1400), 24, heads=(32, 32), dims=(80, 80), block_size=16, dtype=BF16),
    Case((900, 1400), 24, heads=(32, 8), dims=(96, 96), block_size=16, dtype=BF16),
    Case((900, 1400), 24, heads=(32, 8), dims=(112, 112), block_size=16, dtype=torch.float16),
    Case((900, 1400), 24, heads=(16, 16), dims=(192, 128), block_size=32, dtype=BF16),
    Case((900, 1400), 24, heads=(8, 1), dims=(256, 256), block_size=32, dtype=BF16),
    Case((900, 1400), 24, heads=(8, 2), dims=(256, 256), block_size=32, dtype=torch.float32),
    Case((900, 1400), 130, heads=(8, 2), dims=(64, 64), block_size=16, dtype=torch.float32),
    Case((2000, 77), 60, heads=(32, 8), dims=(128, 128), block_size=16, fp8=True, dtype=BF16),
    Case((2000, 77), 10, num_new=60, heads=(32, 8), dims=(128, 128), block_size=16, dtype=BF16),
    Case((2000, 77), 1, mask="causal", heads=(32, 8), dims=(128, 128), block_size=16, spare_blocks=400, dtype=BF16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL, ids=str)
def test_kernel_is_the_formula_at_real_shapes(case):
    inputs = build(case, poison=NAN)
    query, value_cache = inputs.arguments[0], inputs.arguments[2]
    out = query.new_full((*query.shape[:3], value_cache.shape[3]), NAN)
    tree_attention(*inputs.arguments, **inputs.options, out=out)
    assert_close(out, by_formula(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_a_captured_launch_serves_other_lengths(mask):
    case = Case((4000, 100), 24, mask=mask, heads=(32, 8), dims=(128, 128), block_size=16, dtype=BF16)
    inputs = build(case, poison=0.0)
    other = build(replace(case, contexts=(300, 4000)), poison=0.0, seed=1)
    out = tree_attention(*inputs.arguments, **inputs.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention(*inputs.arguments, **inputs.options, out=out)
    for current in (inputs, other):
        for place, source in zip(inputs.arguments[:7], current.arguments[:7], strict=True):
            if place is not None:
                place.copy_(source)
        out.fill_(NAN)
        graph.replay()
        assert_close(out, by_formula(current))
