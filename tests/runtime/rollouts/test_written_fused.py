"""Weights that are written into fused layers."""

import pytest

from tests.runtime.models import noisy
from tests.runtime.rollouts.test_served_weights import check_written
from wingbeat.runtime.fused import layers as fused
from wingbeat.runtime.fused.attention import LayerOps


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma2", "qwen3_moe"])
def test_fused_layers_of_gpus_write_by_what_was_written(monkeypatch: pytest.MonkeyPatch, name: str):
    """By the reference of their steps: joined products, and norms whose weights are copies."""
    monkeypatch.setitem(fused.OPS, "cpu", LayerOps())
    check_written(noisy(name))
