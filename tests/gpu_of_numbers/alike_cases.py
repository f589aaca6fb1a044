"""Deterministic mode on the GPU of numbers: texts in bfloat16 are the same bits on and off, alone and under any load.

In a process of `test_alike_texts`, with `--ptx`: interpreted, a row's products are numpy's, which depend on its place.
"""

from functools import cache
from hashlib import sha256

import pytest
import torch

from tests.gpu_of_numbers.device import CUDA
from tests.runtime.models import CONFIGS, Run, engine_config, random_model, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_chain, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.kernels.gpu.attention import launch
from wingbeat.kernels.gpu.attention.splits import Splits
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model

DETERMINISTIC = {"deterministic": True, "block_size": 16, "max_model_len": 128}
SHAPES = {
    "chain": (SpeculationConfig(draft_steps=3, draft_top_k=1, verify_tree_size=4), right_chain),
    "tree": (SpeculationConfig(draft_steps=3, draft_top_k=3, verify_tree_size=10), right_tree),
}
COUNT = 10


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Texts of a few blocks have several."""
    monkeypatch.setattr(launch, "FIXED_SPLITS", Splits(512, 64))


@cache
def loaded(name, num_layers=2):
    # Weights of this size leave tokens about equally likely, so that a bit soon decides.
    kinds = getattr(CONFIGS[name], "layer_types", None)
    fewer = {"num_hidden_layers": num_layers} | ({"layer_types": kinds[:num_layers]} if kinds else {})
    model = random_model(name, **fewer, initializer_range=0.1).to(CUDA, torch.bfloat16)
    return prepare_model(model, name, deterministic=True)


def prompts_of(count):
    """Every third one begins as the first does, so that prefixes are found."""
    prompts = random_prompts(tuple(5 + 7 * (index % 9) for index in range(count)))
    return [random_prompts((40,), seed=2)[0] + own if index % 3 == 0 else own for index, own in enumerate(prompts)]


def params_of(count, speculation):
    """They end at different times."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 50, "top_p": 0.9}, {"temperature": 1.0}]
    return [
        SamplingParams(6 + 5 * (seed % 4), seed=seed, ignore_eos=True, speculation=speculation, **kinds[seed % 3])
        for seed in range(count)
    ]


def plainly(verifier, count, num_seqs):
    """So many requests at once plainly and eagerly, their prompts whole."""
    shape = SpeculationConfig(draft_steps=1, draft_top_k=1, verify_tree_size=2)
    limits = {"max_num_seqs": num_seqs, "max_num_batched_tokens": 128 * num_seqs, "num_kv_blocks": 1 + 9 * num_seqs}
    config = engine_config(shape, **DETERMINISTIC, **limits, enable_prefix_caching=False, cuda_graphs="none")
    return Run(
        build_engine(verifier, config, None, InProcessChannel), prompts_of(count), params_of(count, False)
    ).finish()


def digests(texts):
    return [sha256(repr(text).encode()).hexdigest()[:12] for text in texts]


def check_texts(verifier, shape, expected, **limits):
    """Texts of an engine, drafted and plain, are those that were written plainly; the engine."""
    count, (speculation, plan) = len(expected), SHAPES[shape]
    sequences = [prompt + text for prompt, text in zip(prompts_of(count), expected, strict=True)]
    drafter = ScriptedDrafter(sequences, plan, verifier.vocab_size)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_kv_blocks": 14} | limits
    engine = build_engine(verifier, engine_config(speculation, **DETERMINISTIC, **limits), drafter, InProcessChannel)
    for drafted in (True, False):
        texts = Run(engine, prompts_of(count), params_of(count, drafted)).finish()
        assert digests(texts) == digests(expected)
    assert engine.speculation.acceptance_length > 1.5
    engine.check_integrity()
    return engine


def check_load(engine):
    """Check that the engine captured its rounds and preempted requests."""
    assert engine.stats().num_preemptions > 0
    stats = engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.BASE_VERIFICATION]
    assert stats.replays[Stage.BASE_DECODING]


@cache
def alone(name):
    """Each request by itself."""
    return plainly(loaded(name), COUNT, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
def test_texts_are_the_same_on_and_off_and_alone(gpu, name, shape):
    check_load(check_texts(loaded(name), shape, alone(name)))


def test_a_few_texts_are_the_same_on_and_off_and_alone(gpu):
    verifier = loaded("llama")
    check_texts(verifier, "tree", plainly(verifier, 4, 1), max_num_seqs=3, cuda_graphs="none")


@pytest.mark.timeout(3000)
def test_200_texts_under_changing_load(gpu):
    verifier = loaded("llama", 1)
    limits = {"max_num_seqs": 16, "num_kv_blocks": 40, "max_num_batched_tokens": 64}
    check_load(check_texts(verifier, "tree", plainly(verifier, 200, 5), **limits))
