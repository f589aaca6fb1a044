"""Embeddings of prompts: transformers' last hidden states, pooled, in whatever rounds a prompt is computed."""

import numpy as np
import pytest
import torch

from tests.runtime.engine.test_round_leftovers import fails_alone, raises_once
from tests.runtime.hybrids import CONFIGS, hybrid, needs_states, random_hybrid
from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    new_engine,
    random_prompts,
    reference,
)
from wingbeat.runtime.pooling.pooling import Pooling
from wingbeat.runtime.scheduling.request import SamplingParams

pytestmark = pytest.mark.few(2)

PROMPTS = random_prompts((1, 2, 5, 23, 61), seed=4)


class Embedder(Run):
    """Collects embeddings by request."""

    def __init__(self, *args):
        super().__init__(*args)
        self.embeddings = [b"" for _ in self.tokens]

    def step(self):
        for output in self.engine.step():
            index = int(output.request_id)
            self.tokens[index] += output.token_ids
            self.embeddings[index] += output.report


def asking(pooling: Pooling) -> SamplingParams:
    return SamplingParams(1, 0.0, report=pooling, speculation=False)


def embed(loaded, config, prompts, params, drafter=None, on_host=None, times=1):
    """The last of `times` runs over the same prompts by one engine."""
    engine = new_engine(loaded, config, drafter, on_host)
    try:
        for _ in range(times):
            run = Embedder(engine, prompts, params)
            run.finish()
        engine.check_integrity()
        return run
    finally:
        engine.model.remove_taps()


def truth(model, prompt, pooling):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        states = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()
    model.set_attn_implementation(before)
    return (states.mean(0) if pooling is Pooling.MEAN else states[-1]).numpy()


def check(model, run, prompts, pooling):
    for found, prompt in zip(run.embeddings, prompts, strict=True):
        np.testing.assert_allclose(np.frombuffer(found, "<f4"), truth(model, prompt, pooling), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["whole", "chunks", "fixed", "again"])
def test_they_are_the_hidden_states_of_transformers(name, pooling, kind):
    loaded = reference(name).loaded
    budget = {"max_num_batched_tokens": 16} if kind == "chunks" else {}
    on_host, times = False if kind == "fixed" else None, 2 if kind == "again" else 1
    params = [asking(pooling)] * len(PROMPTS)
    run = embed(loaded, engine_config(**budget), PROMPTS, params, on_host=on_host, times=times)
    check(loaded.model, run, PROMPTS, pooling)
    assert all(len(tokens) == 1 for tokens in run.tokens)


@pytest.mark.slow
@needs_states
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("name", CONFIGS)
def test_of_models_that_keep_states_they_are_the_same_in_pieces_and_again(name, pooling):
    config = engine_config(block_size=4, state_interval=8, num_kv_blocks=400, max_num_batched_tokens=16)
    run = embed(hybrid(name).loaded, config, PROMPTS, [asking(pooling)] * len(PROMPTS), times=2)
    check(random_hybrid(name), run, PROMPTS, pooling)


@pytest.mark.parametrize("shape", [TREE, CHAIN], ids=["tree", "chain"])
def test_beside_requests_that_generate_neither_changes(shape):
    ref = reference("llama")
    plain = SamplingParams(24, 0.0, ignore_eos=True)
    alone = embed(ref.loaded, engine_config(shape), ref.prompts, [plain] * len(ref.prompts))
    prompts = [*ref.prompts, *PROMPTS]
    params = [*[plain] * len(ref.prompts), *[asking(Pooling.MEAN)] * len(PROMPTS)]
    drafter = eagle_drafter(ref.loaded, shape)
    run = embed(ref.loaded, engine_config(shape, max_num_seqs=4), prompts, params, drafter)
    assert run.tokens[: len(ref.prompts)] == alone.tokens
    assert not any(run.embeddings[: len(ref.prompts)])
    run.embeddings = run.embeddings[len(ref.prompts) :]
    check(ref.loaded.model, run, PROMPTS, Pooling.MEAN)


def test_a_preempted_prompt_is_pooled_once():
    loaded = reference("llama").loaded
    engine = new_engine(loaded, engine_config(max_num_batched_tokens=16), None)
    try:
        run = Embedder(engine, [PROMPTS[-1]], [asking(Pooling.MEAN)])
        run.step()
        run.step()
        (seq,) = engine.scheduler.running
        engine.scheduler._preempt(seq)
        run.finish()
    finally:
        engine.model.remove_taps()
    check(loaded.model, run, PROMPTS[-1:], Pooling.MEAN)


@pytest.mark.parametrize("fields", [{"report": "first"}, {"report": Pooling.MEAN, "max_tokens": 2}], ids=str)
def test_what_cannot_be_pooled_is_refused(fields):
    with pytest.raises(ValueError, match="report is"):
        SamplingParams(**{"max_tokens": 1, "temperature": 0.0, **fields})


@pytest.mark.parametrize(("owner", "name"), [("eager", "decide"), ("chooser", "choose_first")])
def test_an_embedding_whose_round_raises_behind_the_pass_fails_alone(monkeypatch, owner, name):
    ref = reference("llama")
    engine = new_engine(ref.loaded, engine_config(max_num_seqs=2), None)
    try:
        raises_once(monkeypatch, getattr(engine.runner, owner), name, after=True)
        fails_alone(engine, ref.prompts[0], asking(Pooling.MEAN))
        assert Run(engine, ref.prompts[:1], greedy_params(12)).finish() == [ref.continuations[0][:12]]
    finally:
        engine.model.remove_taps()
