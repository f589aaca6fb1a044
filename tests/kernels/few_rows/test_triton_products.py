"""Products of few rows: the kernel against torch's own, shares of a tile and gated halves included."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from tests.kernels.drawn import draw
from wingbeat.kernels.few_rows.product import few_rows_product, new_counters
from wingbeat.kernels.gpu import products as kernels
from wingbeat.kernels.gpu.attention.device import KNOWN
from wingbeat.kernels.layer.reference import rms_norm, silu_mul

pytestmark = [pytest.mark.few(6), pytest.mark.usefixtures("poisoned_memory")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2}
"""Triton's interpreter multiplies no matrices of bfloat16."""


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("way", ["new", "added", "gated", "normed", "normed-gated"])
@pytest.mark.parametrize(("columns", "inputs"), [(70, 90), (130, 1100), (64, 4096)])
@pytest.mark.parametrize("num_rows", [1, 17, 64])
def test_few_rows_are_multiplied_as_by_torch(num_rows, columns, inputs, way, biased, dtype):
    """Twice by the same counters: the first product has left them as it found them."""
    rows = draw(num_rows, inputs, dtype=dtype, seed=1) / inputs**0.5
    weight = draw(columns, inputs, dtype=dtype, seed=2)
    bias = draw(columns, dtype=dtype, seed=3) if biased else None
    total = draw(num_rows, columns, dtype=dtype, seed=4) if way == "added" else None
    norm = (1 + draw(inputs, dtype=dtype, seed=5) / 4, 1e-5) if "normed" in way else None
    wide = rows.float() if norm is None else rms_norm(rows.float(), norm[0].float(), norm[1])
    expected = functional.linear(wide, weight.float(), None if bias is None else bias.float())
    if "gated" in way:
        expected = silu_mul(expected)
    elif total is not None:
        expected += total.float()
    moved = [None if part is None else part.to(DEVICE) for part in (rows, weight, bias)]
    counters, there = new_counters(moved[1]), None if norm is None else (norm[0].to(DEVICE), norm[1])
    limit = LIMITS[dtype] * (1.0 if norm is None else inputs**0.5)  # normalised rows are as much larger
    for _ in range(2):
        into = None if total is None else total.clone().to(DEVICE)
        found = kernels.few_rows_product(*moved, into, counters, "gated" in way, there)
        torch.testing.assert_close(found.float().cpu(), expected, rtol=LIMITS[dtype], atol=limit)
        assert into is None or found is into
    assert not counters.any()
    into = None if total is None else total.clone()
    by_torch = few_rows_product(rows, weight, bias, into, gated="gated" in way, norm=norm)
    torch.testing.assert_close(by_torch.float(), expected, rtol=LIMITS[dtype], atol=limit)


@pytest.mark.parametrize(
    ("columns", "inputs", "programs", "steps"),
    [(4096, 4096, 64 * 6, 6), (6144, 4096, 96 * 4, 8), (4096, 14336, 64 * 6, 19), (28672, 4096, 448, 32)],
)
def test_every_multiprocessor_has_programs(columns, inputs, programs, steps):
    """Products of an 8B Llama on an H100: 64 tiles of `o` and `down` are shared among its 132 multiprocessors."""
    of_split, splits = kernels.shares(KNOWN["H100"], columns // 64, inputs // 128)
    assert (columns // 64 * splits, of_split) == (programs, steps)


@pytest.mark.parametrize("card", KNOWN)
@pytest.mark.parametrize("height", [16, 32, 64])
def test_steps_are_read_ahead_and_two_programs_share_a_multiprocessor(card, height):
    limits = KNOWN[card]
    tile, stages = kernels.read_ahead(limits, height, 2)
    assert stages >= 2
    assert 2 * (stages * (64 + height) * tile * 2 + 1024) <= limits.sm_shared_bytes
