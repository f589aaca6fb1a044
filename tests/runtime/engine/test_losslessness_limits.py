"""Tokens do not depend on what the scheduler does: prefix hits, limits, aborts, neighbours.

Preemption and small budgets are columns of `test_losslessness`.
"""

from dataclasses import replace

import pytest

from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    generate,
    greedy_params,
    new_engine,
    random_prompts,
    reference,
)
from tests.runtime.scripted import ScriptedDrafter, right_tree
from tests.runtime.text_drafters import text_drafter
from wingbeat.runtime.scheduling.request import FinishReason, Request, SamplingParams

pytestmark = pytest.mark.few(1)

SHORT = 48


def scripted(ref, plan=right_tree):
    return ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size)


def drafter_of(kind, ref, speculation=TREE):
    makers = {
        "none": lambda: None,
        "eagle": lambda: eagle_drafter(ref.loaded, speculation),
        "right": lambda: scripted(ref),
        "ngram": lambda: text_drafter("ngram", speculation),
    }
    return makers[kind]()


def first(ref, count=SHORT):
    return [tokens[:count] for tokens in ref.continuations]


def test_preemption_without_a_prefix_cache():
    ref = reference("llama")
    config = engine_config(max_model_len=128, num_kv_blocks=20, enable_prefix_caching=False)
    tokens, engine = generate(ref.loaded, config, drafter_of("eagle", ref), ref.prompts, greedy_params(SHORT))
    assert tokens == first(ref)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["none", "eagle", "right"])
def test_prefix_hits(model, kind):
    """Prompts run again, then prompts that diverge from them in the middle of a block."""
    ref = reference(model)
    engine = new_engine(ref.loaded, engine_config(block_size=4, num_kv_blocks=600), drafter_of(kind, ref))
    Run(engine, ref.prompts, greedy_params(SHORT)).finish()
    forks = [sequence[: len(prompt) + 10] for prompt, sequence in zip(ref.prompts, ref.sequences, strict=True)]
    for prompts, skipped in ((ref.prompts, 0), (forks, 10)):
        run = Run(engine, prompts, greedy_params(SHORT - skipped))
        assert run.finish() == [tokens[skipped:SHORT] for tokens in ref.continuations]
        # Cached are all full blocks except the one of the last token, which is left to compute.
        expected = [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
        assert [run.last[index].num_cached_tokens for index in range(8)] == expected
    engine.model.remove_taps()


def test_prefix_shared_by_requests_that_part():
    ref = reference("llama")
    common = ref.prompts[4][:40]
    prompts = [common + tail for tail in random_prompts((3, 9, 1, 14), seed=5)]
    alone = [generate(ref.loaded, engine_config(), None, [prompt], greedy_params(24))[0][0] for prompt in prompts]
    engine = new_engine(ref.loaded, engine_config(), drafter_of("eagle", ref))
    Run(engine, [common], greedy_params(1)).finish()
    run = Run(engine, prompts, greedy_params(24))
    assert run.finish() == alone
    assert [run.last[index].num_cached_tokens for index in range(4)] == [32] * 4
    engine.model.remove_taps()


@pytest.mark.parametrize("kind", ["none", "eagle", "right", "ngram"])
def test_sequences_end_at_max_model_len(kind):
    ref = reference("llama")
    config = engine_config(max_model_len=70, num_kv_blocks=60)
    engine = new_engine(ref.loaded, config, drafter_of(kind, ref))
    run = Run(engine, ref.prompts, greedy_params(128))
    expected = [tokens[: 70 - len(prompt)] for prompt, tokens in zip(ref.prompts, ref.continuations, strict=True)]
    assert run.finish() == expected
    assert {output.finish_reason for output in run.last.values()} == {FinishReason.LENGTH}
    engine.model.remove_taps()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("kind", ["none", "eagle", "right"])
def test_few_tokens(kind, max_tokens):
    ref = reference("llama")
    tokens, _ = generate(ref.loaded, engine_config(), drafter_of(kind, ref), ref.prompts, greedy_params(max_tokens))
    assert tokens == first(ref, max_tokens)


@pytest.mark.parametrize("kind", ["none", "right"])
def test_end_of_sequence_in_the_middle_of_a_tree(kind):
    ref = reference("llama")
    # Requests meet the end token at different places: some in mid-path, some at once, some never.
    end = ref.continuations[0][9]
    loaded = replace(ref.loaded, eos_token_ids=frozenset({end}))
    engine = new_engine(loaded, engine_config(), drafter_of(kind, ref))
    run = Run(engine, ref.prompts, SamplingParams(max_tokens=SHORT, temperature=0.0))
    ends = [tokens[:SHORT].index(end) if end in tokens[:SHORT] else None for tokens in ref.continuations]
    assert run.finish() == [
        tokens[: SHORT if at is None else at + 1] for tokens, at in zip(ref.continuations, ends, strict=True)
    ]
    reasons = [run.last[index].finish_reason for index in range(8)]
    assert [reason is FinishReason.STOP for reason in reasons] == [at is not None for at in ends]
    assert engine.stats().num_free_blocks == 199
    engine.model.remove_taps()


@pytest.mark.parametrize("kind", ["eagle", "right"])
def test_aborts_leave_the_others_alone(kind):
    ref = reference("llama")
    config = engine_config(max_num_seqs=4, max_num_batched_tokens=16)
    engine = new_engine(ref.loaded, config, drafter_of(kind, ref))
    run = Run(engine, ref.prompts, greedy_params(SHORT))
    for number in range(6):
        run.step()
        if number == 1:
            engine.abort_request("4")  # still waiting, or in the middle of its prompt
        if number == 4:
            engine.abort_request("1")  # while its tree is being drafted
            engine.abort_request("never seen")
            engine.add_request(Request("1", tuple(ref.prompts[1]), greedy_params(SHORT)))
            run.tokens[1].clear()
        engine.check_integrity()
    tokens = run.finish()
    assert [tokens[index] for index in (0, 1, 2, 3, 5, 6, 7)] == [first(ref)[index] for index in (0, 1, 2, 3, 5, 6, 7)]
    assert engine.stats().num_free_blocks == 199
    engine.model.remove_taps()


def mixed_params():
    return [
        greedy_params(30),
        SamplingParams(max_tokens=30, temperature=1.0, seed=7, ignore_eos=True),
        greedy_params(30, speculation=False),
        SamplingParams(max_tokens=30, temperature=0.7, top_p=0.9, seed=-8, ignore_eos=True, speculation=False),
        SamplingParams(max_tokens=20, temperature=1.3, top_k=5, seed=9, ignore_eos=True),
        greedy_params(7),
        SamplingParams(max_tokens=30, temperature=0.9, min_p=0.05, seed=10, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=1.0, top_p=0.5, seed=1 << 40, ignore_eos=True),
    ]


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_each_request_of_a_mixed_batch_is_as_if_alone(speculation):
    ref = reference("llama")
    params = mixed_params()
    alone = [
        generate(ref.loaded, engine_config(), None, [prompt], param)[0][0]
        for prompt, param in zip(ref.prompts, params, strict=True)
    ]
    drafter = eagle_drafter(ref.loaded, speculation)
    engine = new_engine(ref.loaded, engine_config(speculation), drafter)
    run = Run(engine, ref.prompts, params)
    assert run.finish() == alone
    drafts = [run.last[index].metrics.num_drafts for index in range(8)]
    assert [count > 0 for count in drafts] == [param.speculation for param in params]
    engine.model.remove_taps()


def test_requests_that_can_never_run_are_refused():
    ref = reference("llama")
    engine = new_engine(ref.loaded, engine_config(max_model_len=70, num_kv_blocks=60))
    for prompt, message in (([], "empty"), ([1] * 70, "leaves no room"), ([1, 97], "97"), ([-1], "-1")):
        with pytest.raises(ValueError, match=message):
            engine.add_request(Request("x", tuple(prompt), greedy_params()))
    assert not engine.has_unfinished_requests()
    with pytest.raises(ValueError, match="max_model_len is 600"):
        new_engine(ref.loaded, engine_config(max_model_len=600))
