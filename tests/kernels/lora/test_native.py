"""Adapters on top of products by the C++ of CPUs, against the formula."""

import pytest
import torch

from tests.kernels.lora.test_adapters import ROWS, by_formula, check, draw, stacked
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.kernels.lora.native import adapt
from wingbeat.kernels.lora.stacked_adapters import AdapterRows


@pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("part", [None, 1])
@pytest.mark.parametrize("name", ROWS)
def test_the_kernels_of_cpus_are_the_formula(name, part):
    adapters, ids = stacked(41, (24, 10, 33), 4, torch.float32, "cpu"), ROWS[name]
    if part is not None:
        adapters = adapters.part(part)
    out = draw(len(ids), sum(adapters.parts), seed=3, device="cpu")
    x = draw(len(ids), 41, seed=4, device="cpu")
    expected = by_formula(out, x, adapters, ids)
    adapt(cpu_kernels(), out, x, adapters, AdapterRows.of(torch.tensor(ids), 4, True))
    check(out, expected)
