"""Deterministic mode on GPUs: a model part whose sums have no fixed order is refused by name."""

import pytest
from torch import nn

from tests.runtime.models import engine_config, random_model
from wingbeat.kernels import choice
from wingbeat.kernels.layer import reference
from wingbeat.runtime.alike import model as alike
from wingbeat.runtime.alike.linears import AlikeLinear
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.fused.attention import LayerOps
from wingbeat.runtime.fused.layers import fuse
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.layers.probe import probe_attention
from wingbeat.runtime.verifier_errors import UnsupportedModelError


def fused(name: str) -> tuple[nn.Module, nn.ModuleList]:
    """Build a model whose layers are fused as on a GPU, with the kernels' references in their place."""
    model = random_model(name)
    probed = probe_attention(model, 512, frozenset())
    for linear in model.modules():
        if type(linear) is nn.Linear:
            linear.__class__ = AlikeLinear
            linear.repack()
    layers = model.model.layers
    model.set_attn_implementation(ATTENTION_NAME)
    fuse(model, layers, probed.layers, LayerOps(*(getattr(reference, name) for name in LayerOps._fields)))
    return model, layers


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_models_of_known_layers_are_served(name):
    alike.make(*fused(name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3_moe", r"its layers \(Qwen3MoeDecoderLayer\) do not run on wingbeat's kernels"),
        ("mixtral", r"its layers \(MixtralDecoderLayer\) do not run on wingbeat's kernels"),
        ("gpt_oss", r"its layers \(GptOssDecoderLayer\) do not run on wingbeat's kernels"),
    ],
)
def test_experts_are_refused_by_name(name, said):
    with pytest.raises(UnsupportedModelError, match=f"deterministic is True, but {said}"):
        alike.make(*fused(name))


def test_another_linear_layer_is_refused_by_name():
    model, layers = fused("gemma3")
    layers[1].mlp.down_proj.__class__ = type("Scaled", (nn.Linear,), {})
    with pytest.raises(UnsupportedModelError, match=r"its mlp.down_proj \(Scaled\) does not run on wingbeat's kernels"):
        alike.make(model, layers)
    model, layers = fused("llama")
    model.lm_head.__class__ = nn.Linear
    with pytest.raises(UnsupportedModelError, match=r"its lm_head \(Linear\) does not run on wingbeat's kernels"):
        alike.make(model, layers)


def test_products_that_depend_on_the_rows_beside_are_found(monkeypatch):
    model, layers = fused("llama")
    product = AlikeLinear.product
    monkeypatch.setattr(AlikeLinear, "product", lambda linear, rows: product(linear, rows) + len(rows) * 2**-20)
    with pytest.raises(UnsupportedModelError, match="a product of 64 by 64 depends on the rows beside here"):
        alike.make(model, layers)


def test_a_device_whose_kernels_are_replaced_is_refused(monkeypatch):
    monkeypatch.setattr(choice, "_replaced", {"attention"})
    with pytest.raises(UnsupportedModelError, match="and there is no kernel attention on this device"):
        alike.check(random_model("llama"))


@pytest.mark.parametrize(
    ("shape", "limits", "said"),
    [
        (SpeculationConfig(draft_top_k=4, verify_tree_size=65), {}, "verify_tree_size is 65: use 64 at most on GPUs"),
        (SpeculationConfig(), {"max_model_len": 300000, "num_kv_blocks": 99999}, "max_model_len is 300000: use less"),
    ],
    ids=["tree", "length"],
)
def test_limits_of_attention_are_said(shape, limits, said):
    with pytest.raises(ValueError, match=f"deterministic is True and {said}"):
        alike.check_limits(engine_config(shape, **limits))


def test_long_chains_are_no_trees():
    alike.check_limits(engine_config(SpeculationConfig(draft_steps=70, draft_top_k=1, verify_tree_size=71)))
