"""Adapters of fused layers."""

import pytest

from tests.runtime.lora.test_adapters_lossless import KINDS, TREE, LoraWorld, check_mixed, engine_of
from wingbeat.runtime.fused.attention import LayerOps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_layers_that_join_their_products_join_their_adapters(monkeypatch, name):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    world = LoraWorld(name, kinds={"all": KINDS["all"], "patterned": KINDS["patterned"]})
    with engine_of(world, TREE, on_host=False) as engine:
        check_mixed(engine, world)
