"""Log-probabilities of tokens, of their alternatives and of the prompt: transformers' own, drafted or not."""

from dataclasses import replace

import pytest
import torch

from tests.runtime.models import CHAIN, TREE, Run, eagle_drafter, engine_config, new_engine, reference
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.engine.drafter_client import DrafterState
from wingbeat.runtime.scheduling.request import SamplingParams

pytestmark = pytest.mark.few(2)

LENGTH, NUM_TOP = 24, 3


class Recorder(Run):
    """Collects what outputs report."""

    def __init__(self, *args):
        super().__init__(*args)
        self.logprobs = [[] for _ in self.tokens]
        self.prompt_logprobs = [[] for _ in self.tokens]

    def step(self):
        for output in self.engine.step():
            index = int(output.request_id)
            self.tokens[index] += output.token_ids
            self.logprobs[index] += output.logprobs
            self.prompt_logprobs[index] += output.prompt_logprobs


def record(ref, config, drafter, params, on_host=None):
    engine = new_engine(ref.loaded, config, drafter, on_host)
    try:
        run = Recorder(engine, ref.prompts, params)
        run.finish()
        return run
    finally:
        engine.model.remove_taps()


def true_logprobs(loaded, tokens):
    """[len(tokens) - 1, vocab_size]: of each next token, by transformers."""
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = loaded.model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    loaded.model.set_attn_implementation(before)
    return logits.double().log_softmax(-1)


def check(found, truth, token_ids, num_top):
    """Reported ones against the distribution of each position."""
    assert len(found) == len(token_ids) == len(truth)
    for got, true, token_id in zip(found, truth, token_ids, strict=True):
        assert got.logprob == pytest.approx(float(true[token_id]), abs=1e-4)
        assert [entry[0] for entry in got.top] == true.topk(num_top).indices.tolist()
        assert [entry[1] for entry in got.top] == pytest.approx(true.topk(num_top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0, "repetition_penalty": 1.2, "top_k": 20}])
@pytest.mark.parametrize("kind", ["plain", "chain", "tree", "told", "fixed"])
def test_they_are_the_models_own(kind, fields):
    ref = reference("llama")
    params = SamplingParams(LENGTH, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=2, seed=5, **fields)
    config, drafter, on_host = engine_config(CHAIN if kind == "chain" else TREE), None, None
    if kind in ("chain", "tree"):
        drafter = eagle_drafter(ref.loaded, config.speculation)
    elif kind in ("told", "fixed"):
        plain = record(ref, config, None, params).tokens
        sequences = [prompt + more for prompt, more in zip(ref.prompts, plain, strict=True)]
        drafter, on_host = ScriptedDrafter(sequences, right_tree, ref.loaded.vocab_size), kind == "told"
    run = record(ref, config, drafter, params, on_host)
    for index, prompt in enumerate(ref.prompts):
        truth = true_logprobs(ref.loaded, prompt + run.tokens[index])
        check(run.logprobs[index], truth[len(prompt) - 1 :], run.tokens[index], NUM_TOP)
        check(run.prompt_logprobs[index], truth[: len(prompt) - 1], prompt[1:], 2)


@pytest.mark.parametrize("asks", [0, 1])
def test_whoever_asks_may_run_beside_a_request_without_drafts(asks):
    ref = reference("llama")
    params = [SamplingParams(LENGTH, 0.0, ignore_eos=True, speculation=bool(index % 2)) for index in range(4)]
    params[asks] = replace(params[asks], logprobs=NUM_TOP)
    prompts = [ref.prompts[index % len(ref.prompts)] for index in range(4)]
    engine = new_engine(ref.loaded, engine_config(TREE), eagle_drafter(ref.loaded, TREE))
    try:
        run = Recorder(engine, prompts, params)
        run.finish()
        assert engine.drafter_state is DrafterState.ATTACHED
    finally:
        engine.model.remove_taps()
    truth = true_logprobs(ref.loaded, prompts[asks] + run.tokens[asks])
    check(run.logprobs[asks], truth[len(prompts[asks]) - 1 :], run.tokens[asks], NUM_TOP)


def test_only_who_asks_is_told_and_a_cached_prompt_is_computed_again():
    ref = reference("llama")
    quiet = SamplingParams(LENGTH, 0.0, ignore_eos=True)
    asking = SamplingParams(LENGTH, 0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    engine = new_engine(ref.loaded, engine_config(), eagle_drafter(ref.loaded, TREE))
    try:
        first = Recorder(engine, ref.prompts, quiet)
        first.finish()
        assert not any(first.logprobs)
        assert not any(first.prompt_logprobs)
        again = Recorder(engine, ref.prompts, [asking, quiet] * 4)
        again.finish()
    finally:
        engine.model.remove_taps()
    assert again.tokens == first.tokens
    assert [len(row) for row in again.prompt_logprobs] == [
        len(prompt) - 1 if index % 2 == 0 else 0 for index, prompt in enumerate(ref.prompts)
    ]
    assert [len(row) for row in again.logprobs] == [LENGTH, 0] * 4
    assert all(entry.top == () for row in again.logprobs for entry in row)


def test_a_prompt_in_chunks_and_a_preemption_report_each_token_once():
    ref = reference("llama")
    params = SamplingParams(60, 0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    run = record(ref, engine_config(max_num_batched_tokens=16, num_kv_blocks=22), None, params)
    assert run.engine.scheduler.num_preemptions > 0
    for index, prompt in enumerate(ref.prompts):
        truth = true_logprobs(ref.loaded, prompt + run.tokens[index])
        check(run.logprobs[index], truth[len(prompt) - 1 :], run.tokens[index], 1)
        check(run.prompt_logprobs[index], truth[: len(prompt) - 1], prompt[1:], 1)
