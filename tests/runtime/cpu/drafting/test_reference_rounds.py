"""Rounds by the C++ of CPUs, held against the published algorithm."""

import pytest

from tests.runtime.engine.test_reference_round import SHAPES, check_rounds, head, model  # noqa: F401 - fixtures
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.cpu.layers import packed_linears


@pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("text", [0, 2, 4])
def test_each_round_drafts_and_accepts_what_the_algorithm_says(
    monkeypatch,
    model,  # noqa: F811
    head,  # noqa: F811
    shape,
    temperature,
    text,
):
    """Activations are not rounded here: rounding could swap two drafted tokens of nearly equal score."""
    monkeypatch.setattr(packed_linears, "rounded", lambda matrix: matrix)
    check_rounds(model, head, shape, temperature, text, lambda make: make())
