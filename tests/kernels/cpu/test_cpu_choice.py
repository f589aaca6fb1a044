"""The target's choice by the CPU's kernels is the reference's, token for token: ties, edges and odd numbers too."""

import platform

import pytest
import torch

from wingbeat.kernels.cpu import library
from wingbeat.kernels.cpu.choice import SamplingRows
from wingbeat.kernels.cpu.ops import CpuKernels, cpu_kernels
from wingbeat.kernels.sampling.reference import choose_tokens

pytestmark = [pytest.mark.few(4), pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")]
NUM_ROWS = 64
BUILDS = {"x86-64": "sse2", "x86-64-v3": "avx2", "native": "sse2"}
"""Processor feature that a build needs, by its `-march`."""


def rows_of(generator, temperature, top_k, top_p, min_p):
    """Parameters of rows, each with about half of the filters that are given."""

    def some(value, off, dtype):
        kept = torch.rand(NUM_ROWS, generator=generator) < 0.5
        return torch.where(kept, torch.tensor(value, dtype=dtype), torch.tensor(off, dtype=dtype))

    return SamplingRows(
        torch.where(torch.rand(NUM_ROWS, generator=generator) < 0.2, 0.0, temperature),
        some(top_k, 0, torch.int64),
        some(top_p, 1.0, torch.float32),
        some(min_p, 0.0, torch.float32),
        torch.randint(-(2**62), 2**62, (NUM_ROWS,), generator=generator),
        torch.randint(0, 4000, (NUM_ROWS,), generator=generator),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [3, 100, 1000])
@pytest.mark.parametrize("temperature", [0.1, 0.8, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (40, 0.5, 0.05)]
)
def test_random_rows(temperature, top_k, top_p, min_p, vocab_size, dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    for _ in range(4):
        logits = (4 * torch.randn(NUM_ROWS, vocab_size, generator=generator)).to(dtype)
        rows = rows_of(generator, temperature, top_k, top_p, min_p)
        expected = choose_tokens(logits, *rows, any_sampled=True, any_filtered=True)
        assert torch.equal(cpu_kernels().native_choice().choose(logits, rows), expected)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.6, 0.0), (7, 0.9, 0.3)])
def test_equal_logits(top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        logits = torch.randint(0, 3, (NUM_ROWS, 50), generator=generator).float()
        rows = rows_of(generator, 1.0, top_k, top_p, min_p)
        expected = choose_tokens(logits, *rows, any_sampled=True, any_filtered=True)
        assert torch.equal(cpu_kernels().native_choice().choose(logits, rows), expected)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number(odd):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(NUM_ROWS, 200, generator=generator)
    logits[torch.rand(NUM_ROWS, 200, generator=generator) < 0.3] = odd
    logits[::7] = odd
    rows = rows_of(generator, 0.9, 10, 0.8, 0.02)
    expected = choose_tokens(logits, *rows, any_sampled=True, any_filtered=True)
    assert torch.equal(cpu_kernels().native_choice().choose(logits, rows), expected)


def test_hardly_any_row_is_left_to_torch(monkeypatch):
    """Otherwise tokens would mostly be chosen by torch, not by the single C++ call."""
    left = []
    monkeypatch.setattr(
        "wingbeat.kernels.cpu.choice.choose_tokens",
        lambda logits, *rows, **flags: left.append(len(logits)) or choose_tokens(logits, *rows, **flags),
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = 4 * torch.randn(NUM_ROWS, 1000, generator=generator)
        cpu_kernels().native_choice().choose(logits, rows_of(generator, 0.8, 40, 0.9, 0.05))
    assert sum(left) < 20 * NUM_ROWS / 50


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (0, 0.95, 0.0), (200, 1.0, 0.0), (50, 0.99, 0.01)]
)
def test_flat_rows_of_a_large_vocabulary_are_chosen_at_once_too(top_k, top_p, min_p, spread, monkeypatch):
    """Each token has so little mass that thousands of them are within float32's rounding of each other."""
    left = []
    monkeypatch.setattr(
        "wingbeat.kernels.cpu.choice.choose_tokens",
        lambda logits, *rows, **flags: left.append(len(logits)) or choose_tokens(logits, *rows, **flags),
    )
    generator = torch.Generator().manual_seed(5)
    logits = spread * torch.randn(NUM_ROWS, 30_001, generator=generator)
    rows = rows_of(generator, 1.0, top_k, top_p, min_p)
    expected = choose_tokens(logits, *rows, any_sampled=True, any_filtered=True)
    assert torch.equal(cpu_kernels().native_choice().choose(logits, rows), expected)
    assert sum(left) <= 1


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="builds of x86 processors")
@pytest.mark.parametrize("march", BUILDS)
def test_builds_for_narrower_registers_choose_likewise(march, tmp_path, monkeypatch):
    if BUILDS[march] not in library._processor():
        pytest.skip(f"this processor has no {BUILDS[march]}")
    monkeypatch.setenv(library.ARCHITECTURE, march)
    native, generator = CpuKernels(tmp_path).native_choice(), torch.Generator().manual_seed(4)
    for vocab_size in (3, 100, 1000):
        for filters in ((0, 1.0, 0.0), (40, 0.9, 0.05)):
            logits = 4 * torch.randn(NUM_ROWS, vocab_size, generator=generator)
            rows = rows_of(generator, 0.8, *filters)
            expected = choose_tokens(logits, *rows, any_sampled=True, any_filtered=True)
            assert torch.equal(native.choose(logits, rows), expected)
