"""Adapters of hybrids' fused attention."""

import pytest

from tests.runtime.lora.test_hybrid_adapters import World, check
from wingbeat.runtime.fused.attention import FusedAttention, LayerOps


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "falcon_h1", "nemotron_h"])
def test_fused_attention_has_the_adapters_of_its_projections(name, monkeypatch):
    """LFM2's output projection has another name, Qwen3.5 has gates, Falcon-H1 scaled keys, Nemotron-H no rotation."""
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    here = World(name)
    assert any(isinstance(module, FusedAttention) for module in here.loaded.model.modules())
    check(here, "right", "roomy")
