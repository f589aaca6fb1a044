"""Llama 4's attention as fused steps: rotations given as complex numbers, norms behind them, scales of queries."""

import pytest

from tests.runtime.verifier.layers.test_query_scales import check_texts
from wingbeat.runtime.fused.attention import ComplexHalf, FusedAttention, LayerOps
from wingbeat.runtime.fused.halves import HalvesLayer


@pytest.mark.parametrize("floor_scale", [4, 150])
def test_the_text_is_that_of_generate(monkeypatch, floor_scale):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    loaded = check_texts(floor_scale)
    for layer in loaded.decoder_layers:
        assert isinstance(layer, HalvesLayer)
        assert isinstance(layer.self_attn, FusedAttention)
        assert isinstance(layer.self_attn._half, ComplexHalf)
