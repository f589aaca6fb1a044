"""Layers that run as one call of the CPU's kernels: the model's own numbers, hooks and copies as ever."""

import copy
import logging

import pytest
import torch

from tests.runtime.models import CONFIGS, random_model
from wingbeat.kernels.cpu import ops
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.verifier.layers import cpu_layers, speed_up
from wingbeat.runtime.verifier.layers.cpu_kernels import cpu_kernels, use_kernels
from wingbeat.runtime.verifier.layers.cpu_layers import CpuLayer
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier.model import VerifierModel

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
OURS = ("llama", "mistral", "qwen3")


def prepared(name: str, **overrides):
    """A model whose norms and biases are not what a fresh one has."""
    model = random_model(name, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return prepare_model(model, name)


def both_ways(model, loaded, num_reqs=3, num_nodes=4):
    """What the same round gives by our kernels, and by the model's own code."""
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)
    for kernels in (True, False):
        used = use_kernels(kernels)
        try:
            yield model(dummy_decode_batch(cache, num_reqs, num_nodes, 1))
        finally:
            use_kernels(used)


@pytest.fixture
def num_calls(monkeypatch):
    """How many layers each call of the kernels ran."""
    counts, run = [], cpu_kernels().run_layers
    monkeypatch.setattr(
        cpu_kernels(),
        "run_layers",
        lambda layers, first, count, *rest: (counts.append(count), run(layers, first, count, *rest)),
    )
    return counts


def test_matrices_that_torch_multiplies_more_quickly_are_left_to_it(monkeypatch, caplog):
    for module in (ops, speed_up):
        monkeypatch.setattr(module, "largest_matrix", lambda: 100)
    with caplog.at_level(logging.INFO):
        loaded = prepared("llama")
    assert "of this size more quickly" in caplog.text
    assert not any(isinstance(layer, CpuLayer) for layer in loaded.decoder_layers)
    asked = []
    monkeypatch.setattr(cpu_kernels(), "linear", lambda *product: asked.append(product))
    with torch.inference_mode():
        loaded.model.lm_head(torch.randn(3, loaded.hidden_size))
    assert not asked


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_layers_of_the_llama_kind_are_ours_and_give_the_models_numbers(name, num_calls):
    loaded = prepared(name)
    ours = [isinstance(layer, CpuLayer) for layer in loaded.decoder_layers]
    assert all(ours) if name in OURS else not any(ours)
    model = VerifierModel(loaded, tap_layers=(1, 3))
    num_calls.clear()
    found, expected = both_ways(model, loaded)
    assert num_calls == ([len(loaded.layers)] if name in OURS else [])
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.taps, expected.taps, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_keys_that_are_asked_for_are_those_of_the_models_own_code(num_calls):
    loaded = prepared("llama")
    model = VerifierModel(loaded, kv_layers=(2,))
    num_calls.clear()
    found, expected = both_ways(model, loaded)
    assert num_calls == [4]
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.taps, expected.taps, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_hook_that_changes_what_a_layer_gets_is_heeded(num_calls):
    loaded = prepared("llama")
    model = VerifierModel(loaded)
    hook = loaded.decoder_layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))
    found, expected = both_ways(model, loaded)
    hook.remove()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_many_rows_run_layer_by_layer(num_calls, monkeypatch):
    loaded = prepared("llama")
    monkeypatch.setattr(cpu_layers, "_MOST_AHEAD", 12 * loaded.hidden_size * 3)
    num_calls.clear()
    list(both_ways(VerifierModel(loaded), loaded))
    assert num_calls == [3, 1]


def test_a_copy_and_a_model_that_moves_run_their_own_code():
    loaded = prepared("llama")
    layer = loaded.decoder_layers[0]
    assert "_stack" in vars(layer)
    assert "_stack" not in vars(copy.deepcopy(layer))
    loaded.model.to(torch.bfloat16)
    assert not any("_stack" in vars(layer) for layer in loaded.decoder_layers)


def test_a_layer_of_another_formula_is_left(monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.verifier.layers.cpu_layers.layer_of", _with_another_eps)
    assert not any(isinstance(layer, CpuLayer) for layer in prepared("llama").decoder_layers)


def _with_another_eps(*args, **fields):
    from wingbeat.kernels.cpu.ops import layer_of

    return layer_of(*args, **fields | {"input_eps": 1.0})
