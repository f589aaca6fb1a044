"""Adapters on top of products: tiles and the Triton kernels against the formula, row by row."""

import pytest
import torch

from wingbeat.kernels.lora.adapters import add_adapters
from wingbeat.kernels.lora.stacked_adapters import TILE_ROWS, AdapterRows, StackedAdapters, tiles_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
DTYPES = list(LIMITS) if DEVICE == "cuda" else [torch.float32, torch.float16]
"""Triton's interpreter multiplies no matrices of bfloat16."""
MIXED = [0, 2, 2, 0, 1, 3, 3, 3, 1, 2, 0, 4]
ROWS = {
    "one": [2],
    "none": [0, 0, 0],
    "mixed": MIXED,
    "many": [1] * 19 + [0] * 5 + [3] * 33 + MIXED + [1] * 4,
}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = DEVICE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device).to(dtype)


def stacked(
    inputs: int, parts: tuple[int, ...], rank: int, dtype: torch.dtype, device: str = DEVICE
) -> StackedAdapters:
    """Adapters 1 to 4: of the highest rank, of rank 1, of a rank for the last part alone, and none."""
    made = StackedAdapters.empty(4, rank, inputs, parts, dtype, torch.device(device))
    for part, columns in enumerate(parts):
        for adapter_id, own in ((1, rank), (2, 1)):
            made.put(adapter_id, part, draw(own, inputs, seed=adapter_id), draw(columns, own, seed=part + 5) * 0.3)
    made.put(3, len(parts) - 1, draw(2, inputs, seed=8), draw(parts[-1], 2, seed=9))
    return made


def by_formula(out: torch.Tensor, x: torch.Tensor, adapters: StackedAdapters, ids: list[int]) -> torch.Tensor:
    """Row by row, in double."""
    rows = []
    for row, adapter_id in enumerate(ids):
        total = out[row].double()
        if adapter_id:
            low = (x[row].double() @ adapters.a[adapter_id - 1].double()).unflatten(0, (len(adapters.parts), -1))
            b = adapters.b[adapter_id - 1].double().split(adapters.parts, dim=1)
            total = total + torch.cat([own @ columns for own, columns in zip(low, b, strict=True)])
        rows.append(total)
    return torch.stack(rows)


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    limit = LIMITS[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit * 10)


@pytest.mark.parametrize("parts", [(7,), (24, 10, 33), (70, 70)], ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("on_host", [True, False], ids=["runs", "nobody looks"])
def test_the_reference_is_the_formula(name, parts, on_host):
    if DEVICE == "cuda" and on_host:
        pytest.skip("runs are of hosts")
    adapters, ids = stacked(41, parts, 4, torch.float32), ROWS[name]
    out, x = draw(len(ids), sum(parts), seed=3), draw(len(ids), 41, seed=4)
    expected = by_formula(out, x, adapters, ids)
    rows = AdapterRows.of(torch.tensor(ids, device=DEVICE), 4, on_host)
    check(add_adapters(out, x, adapters, rows), expected)


@pytest.mark.few(6)
@pytest.mark.parametrize("inputs", [70, 1100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [(7,), (24, 10, 33), (70, 70)], ids=str)
@pytest.mark.parametrize("rank", [1, 8, 20])
@pytest.mark.parametrize("name", ROWS)
def test_the_kernels_of_gpus_are_the_formula(name, rank, parts, dtype, inputs, poisoned_memory):
    kernels = pytest.importorskip("wingbeat.kernels.lora.adapters_triton")
    adapters, ids = stacked(inputs, parts, max(rank, 2), dtype), ROWS[name]
    x = draw(len(ids), inputs, dtype=dtype, seed=4) / inputs**0.5
    out = draw(len(ids), sum(parts), dtype=dtype, seed=3)
    expected = by_formula(out, x, adapters, ids)
    tiles = tiles_of(torch.tensor(ids, device=DEVICE), 4)
    check(kernels.add_adapters(out, x, adapters, tiles), expected)


@pytest.mark.parametrize(
    ("inputs", "num_programs", "steps"), [(4096, 1, 4), (4096, 3, 4), (14336, 1, 7), (4096, 300, 64), (70, 1, 2)]
)
def test_programs_that_are_few_share_their_inputs(inputs, num_programs, steps):
    """A product of few rows is one program or three; alone each would walk all inputs in turn, 64 at once."""
    kernels = pytest.importorskip("wingbeat.kernels.lora.adapters_triton")
    of_split, splits = kernels.shares(inputs, num_programs)
    assert of_split == 64 * steps
    assert of_split * (splits - 1) < inputs <= of_split * splits


@pytest.mark.parametrize("part", [0, 2])
def test_the_kernels_of_gpus_take_one_part_of_products_that_are_joined(part):
    kernels = pytest.importorskip("wingbeat.kernels.lora.adapters_triton")
    adapters = stacked(70, (24, 10, 33), 8, torch.float32).part(part)
    out, x = draw(len(MIXED), *adapters.parts, seed=3), draw(len(MIXED), 70, seed=4)
    expected = by_formula(out, x, adapters, MIXED)
    check(kernels.add_adapters(out, x, adapters, tiles_of(torch.tensor(MIXED, device=DEVICE), 4)), expected)


@pytest.mark.parametrize("name", ROWS)
def test_tiles_hold_every_row_with_an_adapter_once_and_rows_of_one_adapter_each(name):
    ids = torch.tensor(ROWS[name])
    tiles = tiles_of(ids, 4)
    assert len(tiles.ids) == -(-len(ids) // TILE_ROWS) + 4
    seen = []
    for adapter_id, begin, end in zip(*(part.tolist() for part in tiles[1:]), strict=True):
        rows = tiles.order[begin:end].tolist()
        assert len(rows) <= TILE_ROWS
        assert (not rows) == (adapter_id == 0)
        assert all(ids[row] == adapter_id for row in rows)
        seen += rows
    assert sorted(seen) == [row for row, adapter_id in enumerate(ROWS[name]) if adapter_id]


def test_a_product_of_other_rows_than_the_batchs_is_refused():
    adapters = stacked(8, (4,), 2, torch.float32)
    rows = AdapterRows.of(torch.tensor([1, 0], device=DEVICE), 4, False)
    with pytest.raises(ValueError, match="an adapted product has 3 rows: the batch has 2"):
        add_adapters(draw(3, 4), draw(3, 8), adapters, rows)


def test_a_place_that_was_cleared_does_nothing():
    adapters = stacked(8, (4, 4), 2, torch.float32)
    adapters.clear(1)
    out, x = draw(2, 8, seed=1), draw(2, 8, seed=2)
    rows = AdapterRows.of(torch.tensor([1, 1], device=DEVICE), 4, DEVICE == "cpu")
    assert torch.equal(add_adapters(out.clone(), x, adapters, rows), out)
    assert not adapters.a[0].any()


@pytest.mark.parametrize("place", [0, 1, 19])
def test_a_row_has_the_same_bits_beside_any_others(place):
    kernels = pytest.importorskip("wingbeat.kernels.lora.adapters_triton")
    adapters, others = stacked(70, (24, 10, 33), 8, DTYPES[-1]), ROWS["many"][:20]
    row, x = draw(1, 70, dtype=DTYPES[-1], seed=5), draw(1, 67, dtype=DTYPES[-1], seed=6)
    alone = kernels.add_adapters(x.clone(), row, adapters, tiles_of(torch.tensor([1], device=DEVICE), 4))
    rows, out = draw(20, 70, dtype=DTYPES[-1], seed=7), draw(20, 67, dtype=DTYPES[-1], seed=8)
    rows[place], out[place], others[place] = row[0], x[0], 1
    added = kernels.add_adapters(out, rows, adapters, tiles_of(torch.tensor(others, device=DEVICE), 4))
    assert torch.equal(added[place], alone[0])
