"""Weights that are written into a served verifier: it then writes what one that was loaded with them writes."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.runtime.hybrids import CONFIGS as HYBRIDS
from tests.runtime.hybrids import random_hybrid
from tests.runtime.models import CONFIGS, engine_config, generate, greedy_params, noisy, random_model, random_prompts
from wingbeat.runtime.rollouts.served_weights import ServedWeights, WeightsRefused
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model

PROMPTS = random_prompts((5, 17, 40))


def written(loaded: LoadedModel, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return generate(loaded, engine_config(), None, prompts, greedy_params(40))[0]


def values_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """As a trainer has them."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moved(model: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """The model after some steps of a trainer."""
    other = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise).to(parameter.dtype))
    return other


def write(loaded: LoadedModel, values: dict[str, Tensor]) -> ServedWeights:
    served = ServedWeights(loaded)
    for name, value in values.items():
        served.check(name, tuple(value.shape), value.dtype)
        served.write(name, served.converted(name, value))
    served.finish()
    return served


def check_written(model: PreTrainedModel, **options) -> None:
    other = moved(model)
    values = values_of(other)
    expected = written(prepare_model(other, "fresh", **options))
    loaded = prepare_model(model, "served", **options)
    assert written(loaded) != expected
    served = write(loaded, values)
    assert written(loaded) == expected
    for name, value in values.items():
        assert torch.equal(served.read(name), value), name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_each_kind_writes_by_what_was_written(name: str):
    check_written(noisy(name))


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_writes_by_what_was_written(name: str):
    check_written(random_hybrid(name))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_tied_output_matrix_is_written_with_its_embedding(name: str):
    check_written(random_model(name, tie_word_embeddings=True))


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_half_precision_is_written_as_it_is(name: str, options: dict[str, bool]):
    check_written(noisy(name, attention_bias=name == "llama").to(torch.bfloat16), **options)


def test_float32_numbers_may_cease_to_fit_into_half_of_it():
    """Weights whose every number bfloat16 holds lie in half the memory; a trainer's next ones do not fit there."""
    check_written(noisy("llama").to(torch.bfloat16).float())


def test_one_matrix_of_a_pair_may_cease_to_fit():
    model = noisy("llama").to(torch.bfloat16).float()
    other = copy.deepcopy(model)
    name = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        other.get_parameter(name).mul_(1.001)
    values, expected = {name: other.get_parameter(name).detach().clone()}, written(prepare_model(other, "fresh"))
    loaded = prepare_model(model, "served")
    write(loaded, values)
    assert written(loaded) == expected


def test_names_of_one_tensor_are_one():
    served = ServedWeights(prepare_model(random_model("llama", tie_word_embeddings=True), "served"))
    assert "lm_head.weight" not in served.names()
    assert served.same("lm_head.weight") == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "reason"),
    [
        ("model.layers.9.mlp.up_proj.weight", (96, 64), torch.float32, "is no tensor of LlamaForCausalLM"),
        ("model.norm.weight", (63,), torch.float32, r"has shape \[63\], expected \[64\]"),
        ("model.norm.weight", (64,), torch.int8, "is int8: weights are floats"),
        ("model.norm.weight", (64,), torch.float8_e4m3fn, "is float8_e4m3fn: weights are floats"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, shape: tuple[int, ...], dtype: torch.dtype, reason: str):
    with pytest.raises(WeightsRefused, match=f"^{name} {reason}"):
        ServedWeights(prepare_model(random_model("llama"), "served")).check(name, shape, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_what_is_no_number_in_the_dtype_of_the_weights_is_refused(value: float):
    served = ServedWeights(prepare_model(random_model("llama"), "served"))
    with pytest.raises(WeightsRefused, match=r"^model.norm.weight holds (NaN|infinity) as float32"):
        served.converted("model.norm.weight", torch.full((64,), value, dtype=torch.float64))


def test_checksums_tell_weights_apart():
    loaded = prepare_model(random_model("llama"), "served")
    before = ServedWeights(loaded).checksums()
    after = write(loaded, {"model.norm.weight": torch.full((64,), 2.0)}).checksums()
    assert [name for name in before if before[name] != after[name]] == ["model.norm.weight"]
