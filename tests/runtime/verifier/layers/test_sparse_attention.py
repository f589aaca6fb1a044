"""Layers that choose their keys are refused, also where few tokens leave nothing to choose."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.runtime.models import SHAPE
from wingbeat.runtime.verifier.layers.architecture_checks import CacheKinds
from wingbeat.runtime.verifier.loading import loader
from wingbeat.runtime.verifier_errors import UnsupportedModelError


@pytest.fixture
def model() -> torch.nn.Module:
    """MiniMax-M3 with blocks of 128 keys, as published."""
    layers = SHAPE["num_hidden_layers"]
    fields = {"dense_intermediate_size": 96, "index_n_heads": SHAPE["num_key_value_heads"], "index_head_dim": 8}
    kinds = {"layer_types": ["minimax_m3_sparse"] * layers, "mlp_layer_types": ["dense"] * layers}
    try:
        config = AutoConfig.for_model("minimax_m3_vl_text", **SHAPE | fields | kinds)
    except ValueError as error:
        pytest.skip(str(error))
    return AutoModelForCausalLM.from_config(config).eval()


def test_what_caches_keep_beside_keys_and_values_is_named(model):
    with pytest.raises(UnsupportedModelError, match="layer 0 keeps idx_keys beside keys and values"):
        loader.prepare_model(model, "m3")


def test_what_layers_tell_attention_in_addition_is_named(monkeypatch, model):
    monkeypatch.setattr(loader, "check_cache", lambda model: CacheKinds(None, frozenset()))
    with pytest.raises(UnsupportedModelError, match="layer 0 gives attention block_indices"):
        loader.prepare_model(model, "m3")
