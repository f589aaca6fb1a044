"""Layers store latents where a trial gives the same numbers; what changes keys and values leaves them per head."""

import copy
from types import SimpleNamespace

import pytest
import torch

from tests.runtime.latent_attention.test_latent_attention import LATENT, model_of
from wingbeat.runtime.fused.layers import LayerOps
from wingbeat.runtime.latent_attention import part
from wingbeat.runtime.latent_attention.half import LatentHalf
from wingbeat.runtime.latent_attention.kept import keep_latents
from wingbeat.runtime.verifier.layers.linears import PackableLinear
from wingbeat.runtime.verifier.loading.loader import prepare_model

SIZE = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]


@pytest.fixture
def loaded(monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    return prepare_model(model_of("latent queries"), "deepseek_v3")


def test_adapters_are_served_over_keys_and_values(loaded, caplog):
    caplog.set_level("INFO")
    loaded.parts["adapters"] = SimpleNamespace()
    before = list(loaded.layers)
    keep_latents(loaded)
    assert loaded.layers == before
    assert "because adapters may change them" in caplog.text


@pytest.mark.parametrize(("device", "deterministic"), [("cpu", False), ("cuda", True)])
def test_hosts_and_deterministic_models_store_keys_and_values(monkeypatch, loaded, device, deterministic):
    monkeypatch.setattr("wingbeat.runtime.latent_attention.kept.keep_latents", pytest.fail)
    part.extend_model(
        SimpleNamespace(model=loaded.model, device=torch.device(device), deterministic=deterministic), None
    )


def test_a_layer_whose_trial_differs_stores_keys_and_values(monkeypatch, loaded):
    matrices = LatentHalf._matrices

    def wrong(half):
        first, second = matrices(half)
        return first, second if half.attn.layer_idx else second * 1.01

    monkeypatch.setattr(LatentHalf, "_matrices", wrong)
    keep_latents(loaded)
    assert [layer.kv_size == SIZE for layer in loaded.layers] == [bool(index) for index in range(len(loaded.layers))]
    assert loaded.decoder_layers[0].self_attn._half.absorbed is None


def test_matrices_follow_weights_that_are_written_packed_or_copied(loaded):
    class Rounded(PackableLinear):
        def dense_weight(self):
            return self.weight.round(decimals=2)

    loaded.decoder_layers[1].self_attn.kv_b_proj.__class__ = Rounded
    keep_latents(loaded)
    assert {layer.kv_size for layer in loaded.layers[:1]} == {SIZE}
    for index in (0, 1):
        attn = loaded.decoder_layers[index].self_attn
        attn._half.absorb()
        held = attn._half.absorbed
        attn.kv_b_proj.weight.data.mul_(3.0)
        attn.take_written()
        assert attn._half.absorbed is held
        for ours, expected in zip(held, attn._half._matrices(), strict=True):
            assert torch.equal(ours, expected)
        other = copy.deepcopy(attn)
        other.kv_b_proj.weight.data.zero_()
        other.take_written()
        assert not other._half.absorbed[0].any()
        assert held[0].any()
