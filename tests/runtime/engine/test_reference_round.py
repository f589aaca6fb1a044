"""The engine's rounds are those of `reference_round`: the same trees are drafted, the same tokens accepted."""

from itertools import chain, pairwise

import pytest
from transformers import AutoModelForCausalLM

from tests.runtime.by_torch import by_torch
from tests.runtime.models import CHAIN, DEMO_PAIR, TREE, Run, engine_config, new_engine, reference
from tests.runtime.reference_round import Sampling, generate
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.scheduling.request import SamplingParams

LENGTH = 24
SHAPES = {"tree": TREE, "chain": CHAIN}


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO_PAIR / "verifier", attn_implementation="eager").float().eval()


@pytest.fixture(scope="module")
def head():
    return load_eagle_head(DEMO_PAIR / "drafter", TargetDescription.from_checkpoint(DEMO_PAIR / "verifier"))


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("text", [0, 2, 4])
def test_each_round_drafts_and_accepts_what_the_algorithm_says(model, head, shape, temperature, text):
    check_rounds(model, head, shape, temperature, text, by_torch)


def check_rounds(model, head, shape, temperature, text, made):
    """Compare an engine's rounds with the reference; `made` is called with a function that builds the engine."""
    ref, speculation = reference("demo", 1), SHAPES[shape]
    prompt, sampling = ref.prompts[text], Sampling(temperature, seed=7)
    expected = generate(model, head, prompt, speculation, sampling, LENGTH)
    engine = made(lambda: new_engine(ref.loaded, engine_config(speculation), EagleDrafter(head, speculation)))
    try:
        params = SamplingParams(LENGTH, temperature, seed=sampling.seed, ignore_eos=True)
        run, ends = Run(engine, [prompt], params), [0]
        while engine.has_unfinished_requests():
            run.step()
            ends.append(len(run.tokens[0]))
    finally:
        engine.model.remove_taps()
    rounds = [run.tokens[0][begin:end] for begin, end in pairwise(ends) if end > begin]
    assert run.tokens[0] == [*chain.from_iterable(expected)][:LENGTH]
    assert list(map(len, rounds[:-1])) == list(map(len, expected[: len(rounds) - 1]))
    assert max(map(len, expected)) > 2, "drafts are accepted"
