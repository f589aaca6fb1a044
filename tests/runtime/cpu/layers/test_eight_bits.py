"""Linear layers in 8 bits write the text of transformers over the rounded weights, whatever is drafted."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

from tests.runtime.hybrids import CONFIGS as HYBRIDS
from tests.runtime.hybrids import needs_states, random_hybrid
from tests.runtime.models import (
    CHAIN,
    CONFIGS,
    DEMO_PAIR,
    NUM_TOKENS,
    PROMPT_LENS,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    generate,
    greedy,
    greedy_params,
    new_engine,
    random_model,
    random_prompts,
)
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.kernels.cpu.ops import cpu_kernels, use_kernels
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.layers.linears import dense_weight
from wingbeat.runtime.verifier.loading.loader import load_model, prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

pytestmark = [
    pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler"),
    pytest.mark.few(1),
]

LENGTH = 40
CPU = torch.device("cpu")
SHAPES = {"plain": None, "chain": CHAIN, "tree": TREE}
OWN_LAYERS = ("llama", "qwen3", "mistral", "gemma2", "gemma3")


@torch.no_grad()
def by_hand(model):
    """Copy of a model whose linear layers have their weights rounded to 8 bits by the formula."""
    twin = copy.deepcopy(model)
    twin.get_output_embeddings().weight = nn.Parameter(twin.get_output_embeddings().weight.clone())
    for linear in twin.modules():
        if type(linear) is nn.Linear:
            scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
            mantissa, exponent = scale.frexp()
            scale = (mantissa * 2**16 + 0.5).floor().ldexp(exponent - 16)
            linear.weight = nn.Parameter((linear.weight / scale).round() * scale)
    return twin


@cache
def world(name, **overrides):
    """The served model, its prompts, and the texts that transformers writes with the rounded copy."""
    model, prompts = random_model(name), random_prompts(PROMPT_LENS)
    expected, _ = greedy(by_hand(model), prompts, NUM_TOKENS)
    return prepare_model(model, name, eight_bits=True), prompts, expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*OWN_LAYERS, *sorted(CONFIGS.keys() - set(OWN_LAYERS))])
def test_greedy_text_is_that_of_transformers_by_rounded_weights(name, shape):
    loaded, prompts, expected = world(name)
    drafter = None if SHAPES[shape] is None else eagle_drafter(loaded, SHAPES[shape])
    tokens, engine = generate(loaded, engine_config(SHAPES[shape] or TREE), drafter, prompts, greedy_params())
    assert tokens == expected
    assert drafter is None or engine.speculation.num_drafts > 0
    assert all(isinstance(layer, CpuLayer) for layer in loaded.decoder_layers) == (name in OWN_LAYERS)


@needs_states
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "jamba"])
def test_models_with_states_write_the_text_of_their_rounded_weights(name):
    model, prompts = random_hybrid(name), random_prompts((5, 27, 1))
    expected = [greedy(by_hand(model), [prompt], LENGTH)[0][0] for prompt in prompts]
    loaded = prepare_model(model, name, eight_bits=True)
    drafter = eagle_drafter(loaded, CHAIN)
    assert generate(loaded, engine_config(CHAIN), drafter, prompts, greedy_params(LENGTH))[0] == expected


@needs_states
def test_a_model_whose_code_reads_a_weight_itself_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"^JambaForCausalLM: .* \(dtype is int8\)$"):
        prepare_model(random_hybrid("jamba"), "jamba", eight_bits=True)


@pytest.mark.parametrize("room", [{}, {"max_model_len": 128, "num_kv_blocks": 14, "max_num_batched_tokens": 24}])
@pytest.mark.parametrize("speculation", [CHAIN, TREE, SpeculationConfig(3, 2, 8, adaptive=True)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_seeded_sampling_is_that_of_plain_decoding(name, speculation, room):
    loaded, prompts, _ = world(name)
    params = [SamplingParams(LENGTH, 0.8, 0.95, seed=seed, ignore_eos=True) for seed in range(len(prompts))]
    expected, _ = generate(loaded, engine_config(), None, prompts, params)
    drafter = eagle_drafter(loaded, speculation)
    tokens, engine = generate(loaded, engine_config(speculation, **room), drafter, prompts, params)
    assert tokens == expected
    assert (engine.stats().num_preemptions > 0) == bool(room)


def test_accepted_paths_leave_the_text_as_it_is():
    loaded, prompts, expected = world("llama")
    sequences = [prompt + more for prompt, more in zip(prompts, expected, strict=True)]
    engine = new_engine(loaded, engine_config(), ScriptedDrafter(sequences, right_tree, loaded.vocab_size))
    try:
        assert Run(engine, prompts, greedy_params()).finish() == expected
    finally:
        engine.model.remove_taps()
    assert engine.speculation.acceptance_length > 4


def test_rows_are_alike_where_that_is_asked_for():
    loaded = prepare_model(random_model("llama"), "llama", deterministic=True, eight_bits=True)
    prompts, config = random_prompts(PROMPT_LENS), engine_config(CHAIN, deterministic=True)
    params = SamplingParams(LENGTH, 0.8, seed=1, ignore_eos=True)
    alone = [generate(loaded, config, None, [prompt], params)[0][0] for prompt in prompts]
    assert generate(loaded, config, eagle_drafter(loaded, CHAIN), prompts, params)[0] == alone


@torch.inference_mode()
def test_weights_lie_in_a_byte_and_everything_else_as_it_was():
    model = random_model("llama", tie_word_embeddings=True)
    meant, before = by_hand(model), model.get_input_embeddings().weight.clone()
    loaded = prepare_model(model, "llama", eight_bits=True)
    linears = {name: one for name, one in loaded.model.named_modules() if isinstance(one, nn.Linear)}
    assert len(linears) == 7 * 4 + 1
    for name, linear in linears.items():
        assert linear.panels.storage.itemsize == 1
        assert torch.equal(dense_weight(linear), meant.get_submodule(name).weight), name
    assert torch.equal(loaded.model.get_input_embeddings().weight, before)
    numbers = sum(linear.in_features * linear.out_features for linear in linears.values())
    assert loaded.weights_bytes < 1.2 * numbers + 4 * before.numel() + 4 * 64 * 64
    twin = copy.deepcopy(loaded.model)
    for (name, ours), (_, theirs) in zip(twin.named_parameters(), meant.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.slow
def test_a_pair_is_opened_by_its_word():
    limits = engine_config(CHAIN, num_kv_blocks=200)
    texts = []
    for drafter in ("none", DEMO_PAIR / "drafter"):
        llm = LLM(DEMO_PAIR / "verifier", drafter, limits, InProcessChannel, dtype="int8", device="cpu")
        assert (llm.engine.loaded.eight_bits, llm.engine.loaded.dtype) == (True, torch.float32)
        texts.append(Run(llm.engine, [llm.tokenizer.encode("import os")], greedy_params(LENGTH)).finish())
    model = load_model(DEMO_PAIR / "verifier", torch.float32, CPU).model
    expected, _ = greedy(by_hand(model), [llm.tokenizer.encode("import os")], LENGTH)
    assert texts == [expected] * 2
    with pytest.raises(ValueError, match=r"dtype is int8 and device is cuda: .*; use device cpu"):
        LLM(DEMO_PAIR / "verifier", "none", limits, InProcessChannel, dtype="int8", device="cuda")


def test_without_kernels_nothing_is_rounded():
    used = use_kernels(False)
    try:
        with pytest.raises(UnsupportedModelError, match=r"no kernels for such weights: .* \(dtype is int8\)"):
            prepare_model(random_model("llama"), "llama", eight_bits=True)
    finally:
        use_kernels(used)
