"""Rounded activations: texts differ from unrounded ones, but depend neither on drafts nor on the rest of a batch."""

import pytest
import torch

from tests.runtime.models import (
    CHAIN,
    TREE,
    eagle_drafter,
    engine_config,
    generate,
    greedy_params,
    random_model,
    random_prompts,
)
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.activations.part import extend_model
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
NUM_TOKENS = 40
INT8 = EngineConfig(cpu_activations="int8")


def loaded_in_eight_bits(name, rounds):
    loaded = prepare_model(random_model(name), name, eight_bits=True)
    extend_model(loaded, INT8 if rounds else EngineConfig())
    return loaded


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_text_is_the_same_whatever_is_drafted_and_beside_it(name):
    loaded = loaded_in_eight_bits(name, rounds=True)
    prompts = random_prompts((5, 23, 40, 64))
    params = [greedy_params(NUM_TOKENS)] * len(prompts)
    plain = generate(loaded, engine_config(TREE), None, prompts, params)[0]
    alone = [generate(loaded, engine_config(TREE), None, [one], params[:1])[0][0] for one in prompts]
    assert alone == plain
    for shape in (CHAIN, TREE):
        drafted = generate(loaded, engine_config(shape), eagle_drafter(loaded, shape), prompts, params)[0]
        assert drafted == plain
    sequences = [prompt + text for prompt, text in zip(prompts, plain, strict=True)]
    right = ScriptedDrafter(sequences, right_tree, loaded.vocab_size)
    assert generate(loaded, engine_config(TREE), right, prompts, params)[0] == plain


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_layer_is_near_that_of_activations_as_they_are(name):
    exact, rounded = loaded_in_eight_bits(name, rounds=False), loaded_in_eight_bits(name, rounds=True)
    assert isinstance(rounded.decoder_layers[0], CpuLayer) == isinstance(exact.decoder_layers[0], CpuLayer)
    rows = torch.randn(1, 48, exact.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        one, other = (loaded.decoder_layers[0].mlp(rows) for loaded in (exact, rounded))
    assert 1e-4 < (one - other).abs().max() / one.std() < 0.1


def test_what_is_kept_for_activations_as_they_are_is_not_taken():
    exact, rounded = loaded_in_eight_bits("llama", rounds=False), loaded_in_eight_bits("llama", rounds=True)
    assert exact.computed_by != rounded.computed_by


def test_a_model_without_packed_weights_is_refused():
    loaded = prepare_model(random_model("llama"), "llama")
    with pytest.raises(UnsupportedModelError, match=r"llama: .*, dtype is float32, and none .* use exact, or"):
        extend_model(loaded, INT8)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="cpu_activations is 'int4': must be 'exact' or 'int8'"):
        EngineConfig(cpu_activations="int4")
