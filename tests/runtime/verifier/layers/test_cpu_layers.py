"""Layers that run as one call of the CPU's kernels: the model's own numbers, hooks and copies as ever."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tests.runtime.models import CONFIGS, noisy, random_model
from wingbeat.kernels.cpu.ops import cpu_kernels, use_kernels
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.heads.lendable import lendable
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.verifier.layers import cpu_layers
from wingbeat.runtime.verifier.layers.cpu_layers import CpuLayer
from wingbeat.runtime.verifier.layers.linears import dense_weight
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier.model import KeptRotations, VerifierModel

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
OURS = ("llama", "mistral", "qwen3")


def prepared(name: str, **overrides):
    return prepare_model(noisy(name, **overrides), name)


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


@torch.inference_mode()
def test_weights_are_held_once_and_whoever_wants_them_gets_their_numbers():
    model = random_model("llama")
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = prepare_model(model, "llama")
    layer, head = loaded.decoder_layers[0], loaded.model.get_output_embeddings()
    for linear in (layer.self_attn.q_proj, layer.mlp.down_proj, head):
        assert linear.weight.isnan().all()  # so that nobody multiplies by what is no weight
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
    assert lendable(loaded, torch.float32)["lm_head.weight"].equal(table)


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
    assert not any(parameter.isnan().any() for parameter in loaded.model.parameters())


def test_a_layer_of_another_formula_is_left(monkeypatch):
    monkeypatch.setattr("wingbeat.runtime.verifier.layers.cpu_layers.layer_of", _with_another_eps)
    assert not any(isinstance(layer, CpuLayer) for layer in prepared("llama").decoder_layers)


def _with_another_eps(*args, **fields):
    from wingbeat.kernels.cpu.structs import layer_of

    return layer_of(*args, **fields | {"input_eps": 1.0})


@torch.inference_mode()
@pytest.mark.parametrize("name", OURS)
def test_the_loop_over_all_layers_is_one_step_of_the_same_bits(name):
    loaded = prepared(name)
    layers = loaded.decoder_layers
    assert isinstance(layers, cpu_layers.LayersAtOnce)
    model = VerifierModel(loaded, (1, 3))
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)
    rows, calls = dummy_decode_batch(cache, 3, 4, 1), []
    hooks = [layer.register_forward_hook(lambda *given: calls.append(given)) for layer in layers]
    looped = model(rows)
    assert len(calls) == len(layers), "hooks see every layer"
    for hook in hooks:
        hook.remove()
    at_once = model(rows)
    assert len(calls) == len(layers)
    assert torch.equal(looped.logits, at_once.logits)
    assert torch.equal(looped.taps, at_once.taps)
    assert list(layers[: len(layers)]) == list(layers), "outside of a pass it is a list"


@torch.inference_mode()
def test_a_pass_calls_no_layer_by_itself(monkeypatch):
    loaded = prepared("llama")
    model = VerifierModel(loaded, (1,))
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)
    monkeypatch.setattr(CpuLayer, "forward", lambda *given, **more: pytest.fail("a layer was called"))
    assert model(dummy_decode_batch(cache, 3, 4, 1)).taps.shape == (12, loaded.hidden_size)


@torch.inference_mode()
@pytest.mark.parametrize("name", OURS)
def test_a_pass_goes_straight_and_leaves_the_same_bits_as_the_models_own_code(name):
    loaded = prepared(name)
    model, calls = VerifierModel(loaded, (1, 3)), []
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)
    rows = dummy_decode_batch(cache, 3, 4, 1)
    chosen = rows._replace(logits_rows=torch.tensor([11, 0, 5]))
    hook = loaded.model.register_forward_hook(lambda *given: calls.append(given))
    own = [model(each) for each in (rows, chosen)]
    hook.remove()
    assert len(calls) == 2
    code = type(loaded.model).forward.__code__
    straight = []
    for each in (rows, chosen):
        with entered() as codes:
            straight.append(model(each))
        assert code not in codes
    assert [len(each.logits) for each in straight] == [12, 3]
    for one, other in zip(own, straight, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.taps, other.taps)


@contextmanager
def entered():
    """The code of functions that are called meanwhile."""
    found = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code) if event == "call" else None)
    try:
        yield found
    finally:
        sys.setprofile(before)


@torch.inference_mode()
def test_a_forward_in_the_place_of_the_classs_is_called(monkeypatch):
    loaded = prepared("llama")
    model, calls, own = VerifierModel(loaded), [], type(loaded.model).forward
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)

    def another(self, *given, **more):
        calls.append(self)
        return own(self, *given, **more)

    monkeypatch.setattr(type(loaded.model), "forward", another)
    model(dummy_decode_batch(cache, 1, 1, 1))
    assert calls == [loaded.model]


@torch.inference_mode()
def test_whoever_taps_what_enters_the_output_matrix_still_sees_it():
    loaded = prepared("llama")
    model = VerifierModel(loaded, (1, len(loaded.decoder_layers)))
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)
    assert model(dummy_decode_batch(cache, 3, 4, 1)).taps.shape == (12, 2 * loaded.hidden_size)


@torch.inference_mode()
@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "dynamic"])
def test_rotations_that_are_kept_are_those_that_the_module_computes(rope_type):
    more = {} if rope_type == "default" else {"factor": 4.0}
    if rope_type == "llama3":
        more |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = random_model("llama", rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, **more})
    module, kept = model.model.rotary_emb, KeptRotations()
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.zeros(1, 4, 8, dtype=dtype)
        for positions in ([[3, 0, 7, 7]], [[60, 1, 2, 31]], [[5, 900, 20000, 4]], [[6, 6, 6, 6]]):
            found = kept.take(module, hidden, torch.tensor(positions))
            for part, expected in zip(found, module(hidden, position_ids=torch.tensor(positions)), strict=True):
                assert part.dtype == dtype
                assert torch.equal(part, expected)


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


@torch.inference_mode()
def test_a_list_of_layers_is_one_step_to_the_thread_whose_pass_it_is(monkeypatch):
    loaded, told = prepared("llama"), []
    layers, run_all = loaded.decoder_layers, cpu_layers.LayersAtOnce.run_all
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)

    def asked(self, *args, **kwargs):
        told.extend((self.is_one_step, other.submit(lambda: self.is_one_step).result(10)))
        return run_all(self, *args, **kwargs)

    monkeypatch.setattr(cpu_layers.LayersAtOnce, "run_all", asked)
    with ThreadPoolExecutor(1) as other:
        VerifierModel(loaded, ())(dummy_decode_batch(cache, 3, 4, 1))
    assert told == [True, False]
    assert not layers.is_one_step
