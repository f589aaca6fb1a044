"""Layers that run in one call of the CPU's kernels: same numbers as the model's code; hooks and copies still work."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.runtime.models import CONFIGS, noisy, of_type, random_model
from wingbeat.kernels.cpu.ops import cpu_kernels, use_kernels
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.layers import layer_stack
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.heads.lendable import lendable
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.verifier.layers.linears import dense_weight
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier.model import VerifierModel

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
OURS = ("llama", "mistral", "qwen3", "gemma2", "gemma3")


def prepared(name: str, **overrides):
    return prepare_model(noisy(name, **overrides), name)


def both_ways(model, loaded, num_reqs=3, num_nodes=4):
    """Outputs of a round by our kernels, then by the model's own code."""
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)
    for kernels in (True, False):
        used = use_kernels(kernels)
        try:
            yield model(dummy_decode_batch(cache, num_reqs, num_nodes, 1))
        finally:
            use_kernels(used)


@pytest.fixture
def num_calls(monkeypatch):
    """Number of layers that each call of the kernels ran."""
    counts, run = [], cpu_kernels().run_layers
    monkeypatch.setattr(
        cpu_kernels(),
        "run_layers",
        lambda layers, first, count, *rest: (counts.append(count), run(layers, first, count, *rest)),
    )
    return counts


@torch.inference_mode()
def test_weights_are_held_once_and_whoever_wants_them_gets_their_numbers():
    model = random_model("llama")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = prepare_model(model, "llama")
    layer, head = loaded.decoder_layers[0], loaded.model.get_output_embeddings()
    for linear in (layer.self_attn.q_proj, layer.mlp.down_proj, head):
        assert linear.weight.isnan().all()  # NaN, so that a product with this placeholder would be noticed
        assert linear.weight.untyped_storage().nbytes() == linear.weight.itemsize
        assert dense_weight(linear).shape == linear.weight.shape
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    twin = copy.deepcopy(loaded.model)
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, weights[name]), name


@torch.inference_mode()
def test_an_embedding_that_the_output_matrix_was_tied_to_stays_a_table():
    loaded = prepared("llama", tie_word_embeddings=True)
    table = loaded.model.get_input_embeddings().weight
    assert table.is_contiguous()
    assert torch.equal(dense_weight(loaded.model.get_output_embeddings()), table)
    assert lendable(loaded, torch.float32)["lm_head.weight"] == "the verifier holds it packed"


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_layers_of_known_kinds_are_ours_and_give_the_models_numbers(name, num_calls):
    loaded = prepared(name)
    ours = [isinstance(layer, CpuLayer) for layer in loaded.decoder_layers]
    assert all(ours) if name in OURS else not any(ours)
    model = VerifierModel(loaded, tap_layers=(1, 3))
    num_calls.clear()
    found, expected = both_ways(model, loaded)
    assert sum(num_calls) == (len(loaded.layers) if name in OURS else 0)
    assert name.startswith("gemma") or len(num_calls) <= 1, "layers of one rotation are one call"
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.taps, expected.taps, rtol=1e-4, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["smollm3", "seed_oss", "ministral", "gemma"])
@torch.inference_mode()
def test_layers_with_a_known_layers_code_are_ours(name, num_calls):
    """SmolLM3's last layer of four rotates nothing."""
    loaded = prepare_model(of_type(name), name)
    assert all(isinstance(layer, CpuLayer) for layer in loaded.decoder_layers)
    num_calls.clear()
    found, expected = both_ways(VerifierModel(loaded), loaded)
    assert num_calls == ([3, 1] if name == "smollm3" else [4])
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


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
    monkeypatch.setattr(layer_stack, "MOST_AHEAD", 12 * loaded.hidden_size * 3)
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
    assert not any(parameter.isnan().any() for parameter in loaded.model.parameters())


def test_a_layer_of_another_formula_is_left(monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.cpu.layers.layer_stack.layer_of", _with_another_eps)
    assert not any(isinstance(layer, CpuLayer) for layer in prepared("llama").decoder_layers)


def _with_another_eps(*args, **fields):
    from wingbeat.kernels.cpu.structs import layer_of

    return layer_of(*args, **fields | {"input_eps": 1.0})


def test_two_engines_of_one_model_write_to_their_own_pools():
    loaded = prepared("llama")
    config = EngineConfig(max_model_len=16, num_kv_blocks=20)
    stack = loaded.decoder_layers[0].__dict__["_stack"]

    def num_foreign(pool: KVCache) -> int:
        own = [key.data_ptr() for key, _ in pool.layers]
        arrays = (stack._array(pool.layers) for _ in range(3000))
        return sum([layer.key_cache for layer in array] != own for array in arrays)

    pools = [KVCache(loaded.layers, config, loaded.dtype, loaded.device) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(num_foreign, pools)) == [0, 0]
    finally:
        sys.setswitchinterval(interval)
