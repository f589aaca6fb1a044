"""Small models with the statistics of trained ones, whose logits half precision moves by as much."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from tests.runtime.models import random_model

DEEP = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4}
Recipe = Callable[[PreTrainedModel], None]


def outlier_channels(model: PreTrainedModel) -> None:
    """Three channels of the residual stream are a hundred times as large as the others."""
    channels = torch.tensor([3, 17, 40])
    model.get_input_embeddings().weight[:, channels] *= 100
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and weight.ndim == 2:
            weight[channels] *= 30


def large_norms(model: PreTrainedModel) -> None:
    """Norms scale by more from layer to layer, unevenly."""
    draw = torch.Generator().manual_seed(5)
    for index, layer in enumerate(model.model.layers):
        for name, weight in layer.named_parameters():
            if weight.ndim == 1 and "norm" in name and "layernorm" in name:
                weight.mul_(1 + 0.5 * index).mul_(torch.rand(weight.shape, generator=draw) * 2 + 0.2)
    model.model.norm.weight.mul_(8)


def sharp_attention(model: PreTrainedModel) -> None:
    """Attention chooses few keys."""
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight", "q_b_proj.weight")):
            weight.mul_(3)


def massive_tokens(model: PreTrainedModel) -> None:
    """Some tokens' embeddings are fifty times as long as the others'."""
    model.get_input_embeddings().weight[::7] *= 50


def heavy_tails(model: PreTrainedModel) -> None:
    """Weights are those of a distribution with heavy tails."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            spread = module.weight.std()
            cubed = module.weight**3
            module.weight.copy_(cubed / cubed.std() * spread)


def everything(model: PreTrainedModel) -> None:
    """All at once."""
    for recipe in (heavy_tails, outlier_channels, large_norms, sharp_attention):
        recipe(model)


def _full(count: int) -> dict:
    """So many layers without windows, in configs that list the kinds of their layers."""
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, Recipe, dict]] = {
    "llama-outliers": ("llama", outlier_channels, {}),
    "llama-norms-tied": ("llama", large_norms, TIED),
    "llama-sharp-deep": ("llama", sharp_attention, {"num_hidden_layers": 16}),
    "llama-massive": ("llama", massive_tokens, {"num_hidden_layers": 8}),
    "llama-everything": ("llama", everything, {"num_hidden_layers": 8}),
    "llama-one-kv-head": ("llama", everything, {"num_key_value_heads": 1, "rope_parameters": {"rope_theta": 5e5}}),
    "qwen3-outliers": ("qwen3", outlier_channels, TIED),
    "qwen3-sharp": ("qwen3", sharp_attention, _full(12)),
    "qwen3-everything": ("qwen3", everything, _full(8)),
    "mistral-norms": ("mistral", large_norms, {}),
    "mistral-heavy": ("mistral", heavy_tails, {"num_hidden_layers": 8}),
    "mistral-everything": ("mistral", everything, {"num_hidden_layers": 8}),
    "gemma2-outliers": ("gemma2", outlier_channels, {}),
    "gemma2-capped-sharp": ("gemma2", sharp_attention, {"final_logit_softcapping": 30.0}),
    "gemma3-outliers-tied": ("gemma3", outlier_channels, TIED),
    "gemma3-sharp-deep": ("gemma3", sharp_attention, DEEP),
    "gemma3-everything": ("gemma3", everything, DEEP),
    "moe-outliers": ("qwen3_moe", outlier_channels, {}),
    "moe-norms-deep": ("qwen3_moe", large_norms, {"num_hidden_layers": 8}),
    "moe-many-experts": ("qwen3_moe", sharp_attention, {"num_experts": 16, "num_experts_per_tok": 4}),
    "gpt-oss-outliers": ("gpt_oss", outlier_channels, {}),
    "gpt-oss-sinks-norms": ("gpt_oss", large_norms, {}),
    "latent-outliers": ("deepseek_v3", outlier_channels, {}),
    "latent-sharp": ("deepseek_v3", sharp_attention, {}),
}
"""By name: an architecture of `tests.runtime.models.CONFIGS`, what is done to its weights, and fields of its config."""


def trained_like(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of `MODELS`."""
    architecture, recipe, fields = MODELS[name]
    model = random_model(architecture, **fields)
    with torch.no_grad():
        recipe(model)
    return model.to(dtype)
