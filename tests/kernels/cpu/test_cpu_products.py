"""Products of the CPU's kernels, and how their library is made."""

import os
import platform

import pytest
import torch

from wingbeat.kernels.cpu import library, ops
from wingbeat.kernels.cpu.library import NoLibraryError, open_library
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.cpu.structs import matrix_of

needs_compiler = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@needs_compiler
@pytest.mark.parametrize("shape", [(160, 224), (33, 97), (7, 5), (64, 16), (300, 1000)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 12, 13, 40])
def test_it_is_the_product_and_a_row_does_not_depend_on_others(draw, shape, num_rows):
    weight, x = draw(*shape), draw(num_rows, shape[0])
    out = cpu_kernels().linear(x, weight)
    torch.testing.assert_close(out, (x.double() @ weight.double()).float(), rtol=1e-5, atol=1e-4)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(cpu_kernels().linear(x[row : row + 1], weight)[0], out[row])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(160, 224), (33, 97), (7, 5)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 13, 40])
def test_halves_are_summed_in_float32_and_rounded_once(draw, dtype, shape, num_rows):
    weight, x, bias = draw(*shape).to(dtype), draw(num_rows, shape[0]).to(dtype), draw(shape[1])
    out = cpu_kernels().linear(x, weight, bias, wide=True)
    torch.testing.assert_close(out, (x.double() @ weight.double() + bias).float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(out, cpu_kernels().linear(x.float(), weight.float(), bias))
    assert torch.equal(out.to(dtype), cpu_kernels().linear(x, weight, bias))
    for row in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(cpu_kernels().linear(x[row : row + 1], weight, bias, wide=True)[0], out[row])


@needs_compiler
def test_every_half_is_read_as_it_is():
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    every = every[every.isfinite()]
    out = cpu_kernels().linear(torch.ones(1, 1).half(), every[None], wide=True)[0]
    assert torch.equal(out, every.float())


@needs_compiler
def test_rows_of_another_dtype_are_refused_before_they_are_read(draw):
    with pytest.raises(ValueError, match=r"rows are torch\.bfloat16 and weights torch\.float32"):
        cpu_kernels().linear(draw(2, 64).bfloat16(), draw(64, 16))


@needs_compiler
def test_threads_change_no_bit(draw):
    weight, x, kernels = draw(320, 640), draw(16, 320), cpu_kernels()
    alone = kernels.linear(x, weight)
    kernels.use_threads(3)
    try:
        assert all(torch.equal(kernels.linear(x, weight), alone) for _ in range(50))
    finally:
        kernels.use_threads(1)


@needs_compiler
def test_a_forked_process_works_alone(draw):
    weight, x, kernels = draw(320, 640), draw(16, 320), cpu_kernels()
    kernels.use_threads(2)
    try:
        expected = kernels.linear(x, weight)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(kernels.linear(x, weight), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        kernels.use_threads(1)


def test_weights_that_lie_otherwise_are_refused(draw):
    with pytest.raises(ValueError, match=r"weight is torch.float32 with strides \(4, 1\)"):
        matrix_of(draw(3, 4), None)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        matrix_of(draw(3, 4).double().t().contiguous().t(), None)


@needs_compiler
@pytest.mark.slow
def test_a_library_is_compiled_once(tmp_path, monkeypatch):
    open_library(tmp_path)
    [made] = tmp_path.iterdir()
    assert made.suffix == ".so"
    monkeypatch.setenv("CXX", "no-such-compiler")
    open_library(tmp_path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an architecture of x86-64")
def test_kernels_are_held_to_an_older_processor_by_name(tmp_path, monkeypatch):
    """A compiler that notes its arguments stands for a real one: another architecture is another library."""
    noted = tmp_path / "arguments"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {noted}\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    names = set()
    for architecture in ("native", "x86-64-v3", "x86-64"):
        monkeypatch.setenv(library.ARCHITECTURE, architecture)
        names.add(library.fingerprint())
        with pytest.raises(NoLibraryError, match="exit 1"):
            open_library(tmp_path)
    flags = [word for word in noted.read_text().split() if word.startswith("-march=")]
    assert flags == ["-march=native", "-march=x86-64-v3", "-march=x86-64"]
    assert len(names) == 3


@pytest.mark.parametrize(
    ("architecture", "flags", "largest"),
    [
        ("", "flags : avx2 avx512f", float("inf")),
        ("x86-64-v4", "flags : avx2 avx512f", float("inf")),
        ("x86-64-v3", "flags : avx2 avx512f", library.LARGEST_MATRIX),
        ("", "flags : avx2", library.LARGEST_MATRIX),
    ],
)
def test_matrices_are_torchs_from_a_size_on_where_registers_are_narrow(architecture, flags, largest, monkeypatch):
    monkeypatch.setenv(library.ARCHITECTURE, architecture)
    monkeypatch.setattr(library, "_processor", lambda: flags)
    assert library.largest_matrix.__wrapped__() == largest


@pytest.mark.parametrize(("command", "said"), [("no-such-compiler", "no C\\+\\+ compiler"), ("false", "exit 1")])
def test_a_compiler_that_is_missing_or_fails_is_named(tmp_path, monkeypatch, command, said):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(NoLibraryError, match=said):
        open_library(tmp_path)


def test_without_a_compiler_torch_does_the_work_and_one_line_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path))
    assert ops._opened.__wrapped__() is None
    [record] = caplog.records
    assert "no C++ compiler" in record.getMessage()
