"""A CPU without the C++ kernels: texts are those of transformers, and features that need the kernels are refused."""

from functools import cache

import pytest

from tests.runtime.by_torch import by_torch, without_cpu
from tests.runtime.models import (
    CHAIN,
    NUM_TOKENS,
    PROMPT_LENS,
    TREE,
    eagle_drafter,
    engine_config,
    generate,
    greedy,
    greedy_params,
    random_model,
    random_prompts,
)
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

SHAPES = {"plain": None, "chain": CHAIN, "tree": TREE}


@cache
def world(name):
    """The model as torch runs it, its prompts, and what transformers writes."""
    model, prompts = random_model(name), random_prompts(PROMPT_LENS)
    expected, _ = greedy(model, prompts, NUM_TOKENS)
    return by_torch(lambda: prepare_model(model, name)), prompts, expected


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_greedy_text_is_that_of_transformers(name, shape):
    loaded, prompts, expected = world(name)
    speculation = SHAPES[shape]
    with without_cpu():
        drafter = None if speculation is None else eagle_drafter(loaded, speculation)
        tokens, engine = generate(loaded, engine_config(speculation or TREE), drafter, prompts, greedy_params())
    assert tokens == expected
    assert drafter is None or engine.speculation.num_drafts > 0


@pytest.mark.parametrize("asked", [{"deterministic": True}, {"eight_bits": True}], ids=str)
def test_modes_that_only_the_kernels_have_are_refused(asked):
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM: .*, but this installation has no kernels"):
        by_torch(lambda: prepare_model(random_model("llama"), "llama", **asked))
