"""Writes into the paged cache, torch reference and Triton kernels, against loops over rows and slots."""

import random

import pytest
import torch

from wingbeat.kernels.kv import reference as kv_cache

pytestmark = pytest.mark.few(4)

triton_kv_cache = pytest.importorskip("wingbeat.kernels.gpu.kv")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
WRITERS = {"kernel": triton_kv_cache, "front": kv_cache}


@pytest.fixture(params=WRITERS)
def writer(request):
    """The kernels, and the public functions, which are the reference on a CPU."""
    return WRITERS[request.param]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def pool(num_blocks: int, block_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple:
    """A layer's caches, every element of which is NaN."""
    return tuple(
        torch.full((num_blocks, block_size, heads, dim), float("nan"), device=DEVICE).to(dtype) for dim in dims
    )


def check_store(writer, num_tokens, heads, dims, dtype, block_size, num_blocks, strided):
    generator = torch.Generator().manual_seed(num_tokens)
    caches = pool(num_blocks, block_size, heads, dims, dtype)
    rows = []
    for dim in dims:
        row = torch.randn(heads, num_tokens, dim, generator=generator).to(DEVICE).to(dtype).transpose(0, 1)
        rows.append(row if strided else row.contiguous())
    slots = torch.randperm((num_blocks - 1) * block_size, generator=generator)[:num_tokens] + block_size
    slots[::3] = torch.arange(len(slots[::3])) % block_size
    writer.store_kv(*rows, *caches, slots.to(DEVICE))
    for row, cache in zip(rows, caches, strict=True):
        expected = pool(num_blocks, block_size, heads, (cache.shape[3],) * 2, dtype)[0].flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            expected[slot] = row[token]
        # Block 0 is the block of padding: its contents do not matter.
        assert torch.equal(as_bytes(cache[1:]), as_bytes(expected.view(cache.shape)[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["rows", "heads-first"])
@pytest.mark.parametrize(("num_tokens", "heads", "dims"), [(1, 1, (8, 8)), (9, 3, (11, 7)), (7, 2, (4, 24))], ids=str)
def test_rows_are_stored_in_their_slots(writer, num_tokens, heads, dims, dtype, strided):
    check_store(writer, num_tokens, heads, dims, dtype, 4, 5, strided)


def test_rows_longer_than_a_program_are_stored_whole(monkeypatch):
    monkeypatch.setattr(triton_kv_cache, "_CHUNK_ELEMENTS", 16)
    check_store(triton_kv_cache, 5, 3, (20, 9), torch.float32, 4, 5, True)


def test_dropped_rows_are_not_written():
    caches = pool(2, 4, 2, (8, 8), torch.float32)
    key = torch.ones(3, 2, 8, device=DEVICE)
    triton_kv_cache.store_kv(key, key, *caches, torch.tensor([0, 3, 3], device=DEVICE))
    assert all(cache.isnan().all() for cache in caches)


def test_no_rows_need_no_launch(writer):
    caches = pool(2, 4, 2, (8, 8), torch.float32)
    rows = torch.zeros(0, 2, 8, device=DEVICE)
    writer.store_kv(rows, rows, *caches, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert all(cache.isnan().all() for cache in caches)


def test_fp8_stores_the_nearest_value_and_saturates(writer):
    """Error of a rounded e4m3 value: at most 2**-4 of it, or half of the smallest subnormal step, 2**-10.

    Triton's interpreter rounds e4m3 wrongly (no carry into the exponent): there the values need no rounding.
    """
    caches = pool(3, 4, 2, (16, 16), FP8)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, 2, 16, generator=generator).to(DEVICE) * 40 for _ in range(2))
    key[0, 0, 0], key[0, 1, 0] = 1e5, -1e5
    if DEVICE == "cpu" and writer is triton_kv_cache:
        key, value = (part.clamp(-448, 448).to(FP8).float() for part in (key, value))
        key[0, :, 0] *= 300
    slots = torch.tensor([5, 4, 9], device=DEVICE)
    writer.store_kv(key, value, *caches, slots)
    for part, cache in zip((key, value), caches, strict=True):
        wanted = part.clamp(-448, 448)
        found = cache.float().flatten(0, 1)[slots]
        limit = torch.maximum(wanted.abs() * 2**-4, torch.tensor(2**-10, device=DEVICE))
        assert ((found - wanted).abs() <= limit).all()
    assert caches[0].float()[1, 1, :, 0].tolist() == [448.0, -448.0]


def test_fp8_stores_and_saturates_half_precision(writer):
    """Numbers that e4m3 has, as Triton's interpreter rounds wrongly, and some past all of them."""
    caches = pool(3, 4, 2, (16, 16), FP8)
    key, value = ((torch.arange(96).view(3, 2, 16) % 15 - 7.0).to(DEVICE, torch.bfloat16) * by for by in (1, 2**-6))
    key[0, 0, 0], key[0, 1, 0], value[1, 1, 3] = 1e5, -449.0, float("inf")
    slots = torch.tensor([5, 4, 9], device=DEVICE)
    writer.store_kv(key, value, *caches, slots)
    for part, cache in zip((key, value), caches, strict=True):
        assert torch.equal(cache.float().flatten(0, 1)[slots], part.float().clamp(-448, 448))


REFUSED = {
    "key is": {"key": torch.zeros(3, 2, 7)},
    "value is": {"value": torch.zeros(2, 2, 8)},
    "value is torch.float32, its cache torch.float16": {"value_cache": torch.zeros(3, 4, 2, 8).half()},
    "slot_mapping": {"slot_mapping": torch.tensor([4, 5, 6], dtype=torch.int32)},
}


@pytest.mark.parametrize("named", REFUSED)
def test_arguments_that_do_not_fit_are_refused_by_name(named):
    """On a CPU only float8 caches are checked: the plain path is left to torch's own checks."""
    fp8_cache = torch.zeros(3, 4, 2, 8).to(FP8)
    arguments = {
        "key": torch.zeros(3, 2, 8),
        "value": torch.zeros(3, 2, 8),
        "key_cache": fp8_cache,
        "value_cache": fp8_cache.clone(),
        "slot_mapping": torch.tensor([4, 5, 6]),
    }
    arguments |= REFUSED[named]
    with pytest.raises(ValueError, match=named):
        kv_cache.store_kv(**{name: value.to(DEVICE) for name, value in arguments.items()})


def accepted_paths(rng, num_reqs, max_path, num_nodes, block_size, num_blocks):
    """Moves of random accepted paths: node i of a path lies at or behind the place it moves to."""
    blocks_each = -(-(num_nodes + block_size) // block_size)
    blocks = rng.sample(range(1, num_blocks), num_reqs * blocks_each)
    sources, targets = [], []
    for req in range(num_reqs):
        table = blocks[req * blocks_each : (req + 1) * blocks_each]
        root = rng.randrange(block_size)
        length = rng.randrange(1, max_path + 1)
        path = [0, *sorted(rng.sample(range(1, num_nodes), length - 1))]

        def slot(node, table=table, root=root):
            return table[(root + node) // block_size] * block_size + (root + node) % block_size

        moves = [(slot(node), slot(step)) if node != step else (0, 0) for step, node in enumerate(path)]
        moves += [(0, 0)] * (max_path - length)
        sources.append([source for source, _ in moves])
        targets.append([target for _, target in moves])
    return torch.tensor(sources), torch.tensor(targets)


def check_moves(writer, shapes, num_reqs, max_path, num_nodes, block_size, num_blocks, seed, flat=False):
    """`shapes` lists (heads, (key_dim, value_dim), dtype) by layer."""
    caches = [
        tuple(
            torch.randint(0, 256, (num_blocks, block_size, heads, dim * dtype.itemsize), dtype=torch.uint8)
            .to(DEVICE)
            .view(dtype)
            for dim in dims
        )
        for heads, dims, dtype in shapes
    ]
    source, target = accepted_paths(random.Random(seed), num_reqs, max_path, num_nodes, block_size, num_blocks)
    before = [tuple(as_bytes(part).clone() for part in layer) for layer in caches]
    if flat:
        writer.move_kv(caches, source.flatten().to(DEVICE), target.flatten().to(DEVICE))
    else:
        writer.move_kv(caches, source.to(DEVICE), target.to(DEVICE))
    for layer, old_layer in zip(caches, before, strict=True):
        for part, old in zip(layer, old_layer, strict=True):
            expected = old.flatten(0, 1).clone()
            for start, end in zip(source.flatten().tolist(), target.flatten().tolist(), strict=True):
                if end >= block_size:
                    expected[end] = old.flatten(0, 1)[start]
            assert torch.equal(as_bytes(part)[1:], expected.view(old.shape)[1:])


MIXED = [(2, (8, 8), torch.float32), (1, (5, 3), torch.float16), (3, (7, 1), torch.bfloat16)]


@pytest.mark.parametrize("flat", [False, True], ids=["by-request", "flat"])
@pytest.mark.parametrize(
    ("shapes", "word_bytes"),
    [(MIXED[:1] * 2, 8), (MIXED, 2), ([(1, (3, 4), torch.float32)], 4), ([(1, (3, 8), FP8)], 1)],
    ids=["w8", "w2", "w4", "w1"],
)
def test_accepted_paths_move_into_place_in_every_layer(writer, shapes, word_bytes, flat):
    """Paths that shift by a slot overwrite their own sources, and layers differ in shape and dtype."""
    for seed in range(3):
        check_moves(writer, shapes, 3, 5, 9, 4, 14, seed, flat)
    caches = [tuple(torch.zeros(2, 4, heads, dim, dtype=dtype) for dim in dims) for heads, dims, dtype in shapes]
    assert triton_kv_cache.pool_table(caches).word_bytes == word_bytes


def test_a_chain_of_moves_reads_before_it_writes(writer):
    """9 -> 8, 10 -> 9, 13 -> 10, and moves to nowhere."""
    cache = torch.arange(24.0, device=DEVICE).view(6, 4, 1, 1).clone()
    caches = [(cache, cache.clone())]
    writer.move_kv(caches, *(torch.tensor([row], device=DEVICE) for row in ([9, 10, 13, 7, 0], [8, 9, 10, 2, 0])))
    expected = torch.arange(24.0)
    expected[[8, 9, 10]] = torch.tensor([9.0, 10.0, 13.0])
    for part in caches[0]:
        assert torch.equal(part.flatten()[4:].cpu(), expected[4:])


@pytest.mark.slow
def test_rows_longer_than_a_program_move_whole(monkeypatch):
    monkeypatch.setattr(triton_kv_cache, "_MOVE_TILE_ELEMENTS", 16)
    check_moves(triton_kv_cache, MIXED, 2, 4, 7, 4, 9, 0)


def test_a_table_says_where_its_pool_lies_and_is_its_owners():
    caches = [pool(2, 4, 2, (8, 8), torch.float32) for _ in range(3)]
    table = triton_kv_cache.pool_table(caches)
    assert table.entries[:, 0].tolist() == [part.data_ptr() for layer in caches for part in layer]
    address = table.entries.data_ptr()
    for _ in range(20):
        other = pool(2, 4, 1, (8, 8), torch.float32)
        triton_kv_cache.move_kv([other], *(torch.tensor([[4]], device=DEVICE) for _ in range(2)))
    # Captured moves read the table at its address for as long as its owner lives, however many pools come after it.
    assert triton_kv_cache.pool_table(caches).entries.data_ptr() != address
    for layer in caches:
        for part in layer:
            part.flatten(0, 1)[5] = 7.0
    triton_kv_cache.move_kv(caches, *(torch.tensor([[slot]], device=DEVICE) for slot in (5, 6)), table)
    assert all(bool((part.flatten(0, 1)[6] == 7.0).all()) for layer in caches for part in layer)


def test_a_pool_that_is_no_pool_is_refused():
    cache = torch.zeros(2, 4, 2, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"caches\[1\]"):
        triton_kv_cache.pool_table([(cache, cache), (cache[:, :, :1], cache)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_chunk_of_a_real_model_is_stored(dtype):
    check_store(kv_cache, 2048, 8, (128, 128), dtype, 16, 200, True)


@pytest.mark.gpu
@pytest.mark.parametrize("flat", [False, True], ids=["by-request", "flat"])
def test_paths_of_a_real_batch_move_in_every_layer(flat):
    """32 layers, 16 requests, paths of 8 in trees of 60: threads that raced would show in some of the repeats."""
    for seed in range(10):
        check_moves(kv_cache, [(8, (128, 128), torch.bfloat16)] * 32, 16, 8, 60, 16, 120, seed, flat)


@pytest.mark.gpu
def test_stores_and_moves_are_captured():
    caches = [pool(9, 16, 8, (128, 128), torch.bfloat16) for _ in range(2)]
    rows = torch.randn(4, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.tensor([20, 21, 22, 23], device=DEVICE)
    source, target = torch.tensor([[21, 23]], device=DEVICE), torch.tensor([[20, 21]], device=DEVICE)
    table = kv_cache.pool_table(caches)  # made before, by an upload that no graph holds

    def step() -> None:
        for layer in caches:
            kv_cache.store_kv(rows, rows, *layer, slots)
        kv_cache.move_kv(caches, source, target, table)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rows.normal_()
    slots += 64
    source += 64
    target += 64
    graph.replay()
    for layer in caches:
        for part in layer:
            assert torch.equal(part.flatten(0, 1)[84:88], rows[[1, 3, 2, 3]])
