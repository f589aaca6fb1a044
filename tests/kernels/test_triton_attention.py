"""Tree attention, both the torch reference and the Triton kernel, against the softmax formula in double precision.

Without a GPU the kernel runs in Triton's interpreter, at tiny odd shapes.
"""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from wingbeat.kernels.attention import tree_attention

triton_attention = pytest.importorskip("wingbeat.kernels.triton_attention")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = triton_attention.TileConfig(16, 16, 4, 2, 1)
NAN = float("nan")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    contexts: tuple[int, ...]
    num_query: int = 1
    num_new: int | None = None
    """More than num_query where the queries are the last of them."""
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    block_size: int = 4
    mask: str = "tree"
    """tree, chain (a tree whose words say so) or causal (no words)."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False
    dtype: torch.dtype = torch.float32
    spare_blocks: int = 0
    """Table entries behind the last key: what a bucket of longer contexts looks like."""

    def __str__(self) -> str:
        new = "" if self.num_new is None else f"of{self.num_new}"
        extras = [f"W{self.window}"] if self.window else []
        extras += [name for name in ("softcap", "sinks", "fp8") if getattr(self, name)]
        dtype = str(self.dtype).removeprefix("torch.")
        heads, dims = ("-".join(map(str, pair)) for pair in (self.heads, self.dims))
        parts = [f"B{len(self.contexts)}", f"T{self.num_query}{new}", f"C{max(self.contexts)}", f"H{heads}", f"D{dims}"]
        return "-".join([*parts, f"S{self.block_size}", self.mask, *extras, dtype])


@dataclass
class Inputs:
    """Arguments of `tree_attention`, and what the formula needs instead of the mask words."""

    arguments: list
    options: dict
    visible: torch.Tensor
    positions: torch.Tensor


def ancestors(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


def words_of(visible: torch.Tensor) -> torch.Tensor:
    """Mask words by their definition: bit b of word w is column 64 w + b."""
    num_words = math.ceil(visible.shape[-1] / 64)
    words = torch.zeros(*visible.shape[:-1], num_words, dtype=torch.int64)
    for req, row, column in visible.nonzero().tolist():
        bit = 1 << column % 64
        words[req, row, column // 64] |= bit - (1 << 64) if bit >> 63 else bit
    return words


def build(case: Case, poison: float, seed: int = 0) -> Inputs:
    """Random inputs; `poison` fills every slot of the pool that no query may read."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_reqs, num_query = len(case.contexts), case.num_query
    num_new = case.num_new or num_query
    num_heads, num_kv_heads = case.heads
    visible = torch.zeros(num_reqs, num_new, num_new, dtype=torch.bool)
    positions = torch.zeros(num_reqs, num_new, dtype=torch.int64)
    for req, context in enumerate(case.contexts):
        parents = [-1] + [rng.randrange(node) if case.mask == "tree" else node - 1 for node in range(1, num_new)]
        for node in range(num_new):
            path = ancestors(parents, node)
            visible[req, node, path] = True
            positions[req, node] = context + len(path) - 1
    visible = visible[:, num_new - num_query :]

    width = math.ceil((max(case.contexts) + num_new) / case.block_size)
    num_blocks = 1 + num_reqs * width
    tables = (torch.randperm(num_blocks - 1, generator=generator) + 1).view(num_reqs, width)
    caches = []
    for dim in case.dims:
        cache = torch.full((num_blocks * case.block_size, num_kv_heads, dim), poison, dtype=torch.float32)
        for req, context in enumerate(case.contexts):
            index = torch.arange(context + num_new)
            slots = tables[req, index // case.block_size] * case.block_size + index % case.block_size
            cache[slots] = torch.randn(len(index), num_kv_heads, dim, generator=generator)
        dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
        caches.append(cache.view(num_blocks, case.block_size, num_kv_heads, dim).to(DEVICE).to(dtype))
    # Block 0 is poisoned as well: that is where the spare entries point.
    tables = torch.nn.functional.pad(tables, (0, case.spare_blocks))
    query = torch.randn(num_reqs, num_query, num_heads, case.dims[0], generator=generator).to(case.dtype)
    scales = [torch.rand(num_kv_heads, generator=generator).to(DEVICE) + 0.5 if case.fp8 else None for _ in range(2)]
    options = {
        "sliding_window": case.window,
        "softcap": case.softcap,
        "sinks": torch.randn(num_heads, generator=generator).to(DEVICE) if case.sinks else None,
        "key_scale": scales[0],
        "value_scale": scales[1],
    }
    words = None if case.mask == "causal" else words_of(visible).to(DEVICE)
    contexts = torch.tensor(case.contexts)
    arguments = [tensor.to(DEVICE) for tensor in (query, *caches, tables, contexts, positions)]
    return Inputs([*arguments, words, 0.37], options, visible.to(DEVICE), positions.to(DEVICE))


def by_formula(inputs: Inputs) -> torch.Tensor:
    """softmax(logits) @ values of every request in double precision: [num_reqs, num_query, num_heads, value_dim]."""
    query, key_cache, value_cache, tables, contexts, _, _, scaling = inputs.arguments
    options, block_size, num_new = inputs.options, key_cache.shape[1], inputs.positions.shape[1]
    group, num_query = query.shape[2] // key_cache.shape[2], query.shape[1]
    results = []
    for req, context in enumerate(contexts.tolist()):
        index = torch.arange(context + num_new, device=query.device)
        blocks, offsets = tables[req, index // block_size], index % block_size
        key, value = (cache.view(cache.dtype)[blocks, offsets].double() for cache in (key_cache, value_cache))
        if options["key_scale"] is not None:
            key, value = key * options["key_scale"].double()[:, None], value * options["value_scale"].double()[:, None]
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        logits = torch.einsum("qhd,khd->hqk", query[req].double(), key) * scaling
        if options["softcap"] is not None:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        shown = torch.ones(num_query, context + num_new, dtype=torch.bool, device=query.device)
        shown[:, context:] = inputs.visible[req]
        if options["sliding_window"] is not None:
            key_positions = torch.cat([index[:context], inputs.positions[req]])
            distance = inputs.positions[req, num_new - num_query :, None] - key_positions[None, :]
            shown &= distance < options["sliding_window"]
        weights = logits.masked_fill(~shown, -math.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if options["sinks"] is not None:
            total = total + options["sinks"].double().exp()[:, None, None]
        results.append(torch.einsum("hqk,khd->qhd", weights / total, value))
    return torch.stack(results)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative error of the whole result, by what the dtype's products and rounding allow; NaN never passes."""
    limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[out.dtype]
    error = (out.double() - expected).norm() / expected.norm()
    assert error < limit, f"relative error {error:.2e}"


def run_kernel(inputs: Inputs, **options) -> torch.Tensor:
    """The kernel's result in memory that began as NaN."""
    query, value_cache = inputs.arguments[0], inputs.arguments[2]
    out = query.new_full((*query.shape[:3], value_cache.shape[3]), NAN)
    return triton_attention.tree_attention(*inputs.arguments, **inputs.options, out=out, **options)


TREES = [
    Case((5,), 7),
    Case((0, 33), 5, heads=(6, 2), dims=(24, 11), block_size=5),
    Case((17, 3, 40), 1, heads=(3, 3)),
    Case((37, 64), 9, heads=(4, 1), dims=(20, 40), block_size=3),
    Case((9,), 70, heads=(1, 1), dims=(16, 8)),
    Case((31, 48), 11, heads=(2, 1), window=5),
    Case((31, 60), 13, window=40, softcap=2.5, sinks=True),
    Case((12, 30), 13, mask="chain", window=1),
    Case((9, 22), 6, sinks=True),
    Case((9, 22), 6, softcap=1.5),
    Case((29, 8), 6, fp8=True, sinks=True),
    Case((29, 70), 7, dtype=torch.float16),
    Case((18, 35), 3, num_new=9, window=24),
    Case((50, 1), 4, num_new=67),
    Case((3, 20), 5, spare_blocks=9),
]
CAUSAL = [
    Case((0, 19), 37, mask="causal", heads=(2, 2)),
    Case((45, 7), 23, mask="causal", heads=(2, 1), window=9, dims=(24, 11)),
    Case((45, 7), 1, mask="causal", window=16, spare_blocks=7),
    Case((21,), 18, mask="causal", softcap=2.0, sinks=True, heads=(6, 2), block_size=16),
    Case((33, 2), 5, mask="causal", fp8=True),
]


@pytest.mark.parametrize("case", TREES + CAUSAL, ids=str)
def test_reference_is_the_formula(case):
    """Memory that nobody wrote is finite in a pool, but large: whatever leaks through the mask shows."""
    if DEVICE != "cpu":
        pytest.skip("the front runs the kernel here")
    inputs = build(case, poison=448.0 if case.fp8 else 1e4)
    assert_close(tree_attention(*inputs.arguments, **inputs.options), by_formula(inputs))


SPLIT = [(case, 3) for case in TREES] + [(case, 1) for case in (*CAUSAL, *TREES[:3], TREES[6], TREES[10])]


@pytest.mark.parametrize(("case", "num_splits"), SPLIT, ids=str)
def test_kernel_is_the_formula(case, num_splits):
    inputs = build(case, poison=NAN)
    assert_close(run_kernel(inputs, config=TINY, num_splits=num_splits), by_formula(inputs))


@pytest.mark.parametrize("config", [(16, 32), (32, 16), (16, 128)], ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_tile_sizes_change_nothing(mask, window, config):
    """Mask words meet the tiles at any offset, and tiles of 128 keys end in tiles of 64."""
    queries = {"num_query": 19} if mask == "causal" else {"num_query": 3, "num_new": 69}
    inputs = build(Case((130, 41), heads=(2, 1), mask=mask, window=window, **queries), poison=NAN)
    config = triton_attention.TileConfig(*config, 4, 2, 1)
    assert_close(run_kernel(inputs, config=config, num_splits=2), by_formula(inputs))


@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_splits_without_keys_add_nothing(mask):
    """A captured launch keeps the splits of its longest context: short ones leave most of them empty."""
    inputs = build(Case((0, 2, 60), 3, heads=(2, 1), mask=mask, sinks=True, window=30), poison=NAN)
    workspace = torch.full((triton_attention.workspace_size(9, 3, 3, 2, 16),), NAN, device=DEVICE)
    assert_close(run_kernel(inputs, config=TINY, num_splits=9, workspace=workspace), by_formula(inputs))


def test_a_short_workspace_is_refused():
    inputs = build(Case((5,), 3), poison=NAN)
    workspace = torch.zeros(triton_attention.workspace_size(2, 1, 3, 4, 16) - 1, device=DEVICE)
    with pytest.raises(ValueError, match="workspace"):
        run_kernel(inputs, config=TINY, num_splits=2, workspace=workspace)
    assert triton_attention.workspace_size(1, 8, 60, 32, 128) == 0


def test_the_same_launch_serves_other_lengths():
    """Lengths and tables are read on the device: what a replayed graph relies on."""
    inputs = build(Case((40, 11), 5), poison=NAN)
    other = build(Case((7, 40), 5), poison=NAN, seed=1)
    out = run_kernel(inputs, config=TINY, num_splits=2)
    for place, source in zip(inputs.arguments[:7], other.arguments[:7], strict=True):
        place.copy_(source)
    again = triton_attention.tree_attention(*inputs.arguments, **inputs.options, out=out, config=TINY, num_splits=2)
    assert again is out
    assert_close(out, by_formula(other))


def test_strided_rows_are_read_and_written_in_place():
    """transformers hands over [num_heads, num_tokens, dim] seen as [num_tokens, num_heads, dim]."""
    inputs = build(Case((13, 29), 5), poison=NAN)
    query = inputs.arguments[0]
    heads_first = query.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.full((2, 5, 4, 40), NAN, device=DEVICE)
    out = wide[..., 3:19]
    inputs.arguments[0] = heads_first
    triton_attention.tree_attention(*inputs.arguments, **inputs.options, out=out, config=TINY, num_splits=2)
    assert_close(out, by_formula(inputs))
    assert wide[..., :3].isnan().all()
    assert wide[..., 19:].isnan().all()


def test_no_requests_need_no_launch():
    inputs = build(Case((5,), 3), poison=NAN)
    arguments = [tensor[:0] if at in (0, 3, 4, 5, 6) else tensor for at, tensor in enumerate(inputs.arguments)]
    assert triton_attention.tree_attention(*arguments, **inputs.options).shape == (0, 3, 4, 16)


REFUSED = {
    "query": {0: lambda query: query.double()},
    "do not fit": {1: lambda cache: cache[..., :8]},
    "caches are": {2: lambda cache: cache.half()},
    "block_tables": {3: lambda tables: tables.int()},
    "num_context": {4: lambda contexts: contexts[:1]},
    "positions": {5: lambda positions: positions[:, :2]},
    "mask_words": {6: lambda words: words[:, :2]},
    "scaling -1": {7: lambda scaling: -1.0},
    "sliding_window 0": {"sliding_window": 0},
    "softcap -2": {"softcap": -2.0},
    "sinks": {"sinks": torch.zeros(3, device=DEVICE)},
    "key_scale is given": {"key_scale": torch.ones(2, device=DEVICE)},
    "out": {"out": torch.zeros(2, 3, 4, 15, device=DEVICE)},
}


@pytest.mark.parametrize("named", REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(named):
    inputs = build(Case((5, 9), 3), poison=0.0)
    for place, change in REFUSED[named].items():
        if isinstance(place, int):
            inputs.arguments[place] = change(inputs.arguments[place])
        else:
            inputs.options[place] = change
    with pytest.raises(ValueError, match=named):
        tree_attention(*inputs.arguments, **inputs.options)


def test_fp8_caches_need_their_scales():
    inputs = build(Case((5, 9), 3, fp8=True), poison=0.0)
    with pytest.raises(ValueError, match="value_scale is missing"):
        tree_attention(*inputs.arguments, **inputs.options | {"value_scale": None})


@pytest.mark.parametrize("device_programs", [1, 132, 396])
def test_splits_fill_the_device_and_no_more(device_programs):
    for num_programs in (1, 8, 100, 128, 5000):
        for num_tiles in (1, 2, 9, 128, 4096):
            splits = triton_attention.choose_num_splits(num_programs, num_tiles, device_programs)
            most = min(max(num_tiles // 2, 1), triton_attention.MAX_SPLITS)
            assert 1 <= splits <= most
            assert num_programs * splits >= 0.68 * min(device_programs, num_programs * most)
            assert splits == 1 or num_programs < device_programs


def test_one_request_fills_the_device():
    """Llama-3.1-8B at batch 1 and 8k context: 8 KV heads, on the 132 multiprocessors of an H200."""
    config = triton_attention.tile_config(torch.bfloat16, 128, 4)
    programs = 132 * config.programs_per_sm
    splits = triton_attention.choose_num_splits(8, 8192 // config.block_keys, programs)
    assert 0.8 * programs <= 8 * splits <= programs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim_has_a_tile_for_any_number_of_rows(head_dim, dtype):
    heights = [triton_attention.tile_config(dtype, head_dim, rows).block_rows for rows in range(1, 300)]
    assert heights == sorted(heights)
    largest = heights[-1]
    assert all(rows <= height < max(2 * rows, 17) or height == largest for rows, height in enumerate(heights, start=1))


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
