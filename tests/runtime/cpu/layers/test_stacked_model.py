"""A model whose layers are all in one stack runs from tokens to logits in one call, bit for bit like its own code."""

import inspect
import sys
from contextlib import contextmanager

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from tests.runtime.models import noisy, random_model
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.cpu.layers.stacked_model import KeptRotations, StackedCausalLM, StackedDecoder
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier.model import VerifierModel

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
OURS = ("llama", "mistral", "qwen3")


def prepared(name: str, **overrides):
    return prepare_model(noisy(name, **overrides), name)


def rows_of(loaded):
    cache = KVCache(loaded.layers, EngineConfig(max_model_len=16, num_kv_blocks=20), loaded.dtype, loaded.device)
    return dummy_decode_batch(cache, 3, 4, 1)


@contextmanager
def entered():
    """Collect the code objects of all functions that are called within the context."""
    found = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code) if event == "call" else None)
    try:
        yield found
    finally:
        sys.setprofile(before)


def codes_of(module, first):
    """Code of `forward` in the first class of the MRO that is not a subclass of `first`."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, first)).forward.__code__


@torch.inference_mode()
@pytest.mark.parametrize("name", OURS)
def test_a_pass_goes_straight_and_leaves_the_same_bits_as_the_models_own_code(name):
    loaded = prepared(name)
    model, rows = VerifierModel(loaded, (1, 3)), rows_of(loaded)
    own_codes = {codes_of(loaded.model, StackedCausalLM), codes_of(loaded.model.model, StackedDecoder)}
    for each in (rows, rows._replace(logits_rows=torch.tensor([11, 0, 5]))):
        with entered() as codes:
            straight = model(each)
        assert not codes & own_codes
        hook = loaded.model.model.register_forward_pre_hook(lambda module, args: None)
        with entered() as codes:
            decoded = model(each)
        hook.remove()
        assert codes & own_codes == {codes_of(loaded.model, StackedCausalLM)}, "the decoder's loop is one step"
        hook = loaded.decoder_layers[2].register_forward_hook(lambda *given: None)
        with entered() as codes:
            looped = model(each)
        hook.remove()
        assert codes >= own_codes
        assert len(straight.logits) == (12 if each is rows else 3)
        for one in (decoded, looped):
            assert torch.equal(one.logits, straight.logits)
            assert torch.equal(one.taps, straight.taps)


@torch.inference_mode()
def test_hooks_see_every_layer():
    loaded, calls = prepared("llama"), []
    model = VerifierModel(loaded, (1, 3))
    hooks = [layer.register_forward_hook(lambda *given: calls.append(given)) for layer in loaded.decoder_layers]
    model(rows_of(loaded))
    for hook in hooks:
        hook.remove()
    assert len(calls) == len(loaded.decoder_layers)


@torch.inference_mode()
def test_a_pass_calls_no_layer_by_itself(monkeypatch):
    loaded = prepared("llama")
    model = VerifierModel(loaded, (1,))
    monkeypatch.setattr(CpuLayer, "forward", lambda *given, **more: pytest.fail("a layer was called"))
    assert model(rows_of(loaded)).taps.shape == (12, loaded.hidden_size)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [LlamaForCausalLM, LlamaModel])
def test_a_forward_in_the_place_of_the_classs_is_called(monkeypatch, kind):
    """Other packages replace a class's `forward` by a function of theirs before a model loads."""
    calls, own = [], kind.forward

    def another(self, *given, **more):
        calls.append(self)
        return own(self, *given, **more)

    another.__signature__ = inspect.signature(own)
    monkeypatch.setattr(kind, "forward", another)
    loaded = prepared("llama")
    model = VerifierModel(loaded)
    calls.clear()
    model(rows_of(loaded))
    assert calls == [loaded.model if kind is LlamaForCausalLM else loaded.model.model]


@torch.inference_mode()
def test_whoever_taps_what_enters_the_output_matrix_sees_it():
    loaded = prepared("llama")
    model, rows, seen = VerifierModel(loaded, (1, len(loaded.decoder_layers))), rows_of(loaded), []
    with entered() as codes:
        taps = model(rows).taps
    assert codes_of(loaded.model, StackedCausalLM) not in codes
    hook = loaded.model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    model(rows)
    hook.remove()
    assert torch.equal(taps[:, loaded.hidden_size :], seen[0])


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
