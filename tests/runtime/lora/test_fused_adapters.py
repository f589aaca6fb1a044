"""Adapters of fused layers."""

import pytest

from tests.runtime.hybrids import needs_states
from tests.runtime.lora import test_hybrid_adapters as hybrids
from tests.runtime.lora.test_adapters_lossless import KINDS, TREE, LoraWorld, check_mixed, engine_of
from wingbeat.runtime.fused.attention import FusedAttention, LayerOps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"], ids=["layers", "attention alone", "sinks"])
def test_layers_that_join_their_products_join_their_adapters(monkeypatch, name):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    world = LoraWorld(name, kinds={"all": KINDS["all"], "patterned": KINDS["patterned"]})
    with engine_of(world, TREE, on_host=False) as engine:
        check_mixed(engine, world)


@needs_states
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "falcon_h1"])
def test_fused_attention_has_the_adapters_of_its_projections(name, monkeypatch):
    """LFM2 has an output projection of another name, Qwen3.5 gates behind its queries, Falcon-H1 scaled keys."""
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    here = hybrids.World(name)
    assert any(isinstance(module, FusedAttention) for module in here.loaded.model.modules())
    hybrids.check(here, "right", "roomy")
