"""Weights in panels: the numbers that were packed, and the products of the same weights as they lie otherwise."""

import platform

import pytest
import torch

from wingbeat.kernels.cpu import library
from wingbeat.kernels.cpu.eight_bits import to_eight_bits
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.kernels.cpu.panels import Panels, fits_bfloat16
from wingbeat.runtime.number_formats import has_bfloat16_units

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(160, 224), (33, 97), (7, 5), (64, 16), (1, 1), (300, 1000), (128, 512)]
NUM_ROWS = (1, 2, 5, 12, 13, 40)
BUILDS = {"x86-64": "sse2", "x86-64-v3": "avx2", "native": "sse2"}
"""Processor feature that a build needs, by its `-march`."""


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.few(16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [8, 16, 32])
def test_what_was_packed_is_there(draw, dtype, shape, width):
    weight = draw(*shape).to(dtype)
    for given in (weight, weight.t().contiguous().t()):
        panels = Panels.pack(given, width)
        assert torch.equal(panels.dense(), weight)
        assert (sum(panels.parts), panels.inputs, panels.dtype) == (*shape, dtype)
    if shape[0] > 5:
        parts = (5, shape[0] - 5)
        assert torch.equal(Panels.pack(weight, width, parts).dense(), weight)


@pytest.mark.few(24)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_products_have_the_bits_of_weights_that_lie_input_by_input(draw, dtype, shape, num_rows):
    check_products(cpu_kernels(), draw, dtype, shape, num_rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_float32_that_two_bytes_hold_has_the_bits_of_four(draw, shape, num_rows):
    check_products(cpu_kernels(), draw, torch.float32, shape, num_rows, halved=True)


def test_one_number_that_two_bytes_do_not_hold_keeps_all_of_them_whole(draw):
    weight = draw(40, 30).bfloat16().float()
    assert fits_bfloat16(weight)
    weight[3, 7] = 1 + 2**-9
    assert not fits_bfloat16(weight)
    assert torch.equal(Panels.pack(weight, 16).dense(), weight)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [8, 16, 32])
def test_a_weight_is_rounded_once_and_then_held_as_it_is(draw, shape, width):
    weight = draw(*shape) * torch.logspace(-30, 30, shape[0])[:, None]
    values, scales = to_eight_bits(weight)
    rounded = to_eight_bits(weight).dense()
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= 0.502 * step).all()
    assert (values.abs().amax(dim=1) == 127).all()
    assert torch.equal(rounded.double(), values.double() * scales.double()[:, None])
    parts = (5, shape[0] - 5) if shape[0] > 5 else None
    for given in (weight, rounded):
        panels = Panels.pack(given, width, parts, held=torch.int8)
        assert panels.storage.dtype == torch.int8
        assert torch.equal(panels.dense(), rounded)


def test_channels_of_zeros_and_of_the_least_numbers_stay_finite(draw):
    weight = torch.stack([torch.zeros(9), torch.full((9,), 1e-45), draw(9) * 1e-40, draw(9)])
    rounded = to_eight_bits(weight).dense()
    assert torch.equal(rounded[0], weight[0])
    assert ((rounded - weight).abs() <= 1e-42 + 0.01 * weight.abs().amax(dim=1, keepdim=True)).all()
    assert torch.equal(Panels.pack(weight, 16, held=torch.int8).dense(), rounded)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_eight_bits_multiply_as_the_weight_that_they_are(draw, shape, num_rows):
    check_eight_bits(cpu_kernels(), draw, shape, num_rows)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="builds of x86 processors")
@pytest.mark.parametrize("march", BUILDS)
def test_builds_for_narrower_registers_multiply_likewise(draw, march, tmp_path, monkeypatch):
    if BUILDS[march] not in library._processor():
        pytest.skip(f"this processor has no {BUILDS[march]}")
    monkeypatch.setenv(library.ARCHITECTURE, march)
    kernels = CpuKernels(tmp_path)
    assert kernels.panel in {"x86-64": (8,), "x86-64-v3": (16,), "native": (8, 16, 32)}[march]
    for dtype in DTYPES:
        for shape in SHAPES:
            for num_rows in NUM_ROWS:
                check_products(kernels, draw, dtype, shape, num_rows)
    for shape in SHAPES:
        check_products(kernels, draw, torch.float32, shape, 7, halved=True)
        for num_rows in NUM_ROWS:
            check_eight_bits(kernels, draw, shape, num_rows)


def check_eight_bits(kernels, draw, shape, num_rows):
    """The product of an eight-bit weight [columns, inputs] is right, and no row depends on the others or on `cut`."""
    columns, inputs = shape
    weight, x, bias = draw(*shape) * draw(columns, 1), draw(num_rows, inputs), draw(columns)
    exact = (x.double() @ to_eight_bits(weight).dense().double().t() + bias).float()
    whole = None
    for cut in (None, (columns // 3, columns - columns // 3) if columns > 5 else (columns,)):
        panels = Panels.pack(weight, kernels.panel, cut, torch.int8, bias)
        out = kernels.packed_linear(x, panels)
        torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-4)
        whole = out if whole is None else whole
        assert torch.equal(out, whole)
        for row in {0, num_rows // 2, num_rows - 1}:
            assert torch.equal(kernels.packed_linear(x[row : row + 1], panels)[0], out[row])


def check_products(kernels, draw, dtype, shape, num_rows, halved=False):
    """A packed weight [columns, inputs] gives the plain weight's products, each row independent of the others."""
    columns, inputs = shape
    weight, x, bias = draw(*shape).to(dtype), draw(num_rows, inputs).to(dtype), draw(columns)
    parts = (columns // 3, columns - columns // 3) if columns > 5 else None
    if halved:
        weight = weight.bfloat16().to(dtype)
    for cut in (None, parts):
        panels = Panels.pack(weight, kernels.panel, cut, bias=bias)
        assert panels.storage.itemsize == (2 if halved else dtype.itemsize)
        out = kernels.packed_linear(x, panels, wide=True)
        exact = (x.double() @ weight.t().double() + bias).float()
        torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-4)
        plain = kernels.linear(x, weight.t().contiguous(), bias, wide=True)
        # Processors that multiply pairs of bfloat16 numbers sum those of a pair by rules of their own.
        assert torch.equal(out, plain) or (dtype == torch.bfloat16 and has_bfloat16_units())
        assert torch.equal(kernels.packed_linear(x, panels), out.to(dtype))
        for row in {0, num_rows // 2, num_rows - 1}:
            assert torch.equal(kernels.packed_linear(x[row : row + 1], panels, wide=True)[0], out[row])


def test_numbers_beyond_a_weight_touch_nothing(draw):
    x, weight = draw(3, 33), draw(5, 33).bfloat16()
    rows = torch.full((4, 33), float("nan"))
    rows[:3] = x
    panels = Panels.pack(weight, cpu_kernels().panel)
    found = cpu_kernels().packed_linear(rows.bfloat16()[:3], panels)
    torch.testing.assert_close(found, x.bfloat16() @ weight.t(), rtol=2e-2, atol=2e-2)


def test_threads_change_no_bit(draw):
    panels, x, kernels = Panels.pack(draw(640, 320), cpu_kernels().panel), draw(16, 320), cpu_kernels()
    alone = kernels.packed_linear(x, panels)
    kernels.use_threads(3)
    try:
        assert all(torch.equal(kernels.packed_linear(x, panels), alone) for _ in range(50))
    finally:
        kernels.use_threads(1)


def test_rows_of_another_dtype_are_refused_before_they_are_read(draw):
    with pytest.raises(ValueError, match=r"rows are torch\.bfloat16 and weights torch\.float32"):
        cpu_kernels().packed_linear(draw(2, 64).bfloat16(), Panels.pack(draw(16, 64), cpu_kernels().panel))
