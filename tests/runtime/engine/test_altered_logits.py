"""Penalties, biases and bans act at each tree node by the node's own path: transformers' tokens, drafted or not."""

from functools import cache

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.optional import FEATURES, is_deleted
from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    generate,
    new_engine,
    reference,
    settled,
)
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_chain, right_tree
from wingbeat.runtime.scheduling.request import SamplingParams

pytestmark = pytest.mark.few(1)

LENGTH = 40
EOS = 7
SHAPES = {"chain": CHAIN, "tree": TREE}
ALONE = is_deleted(FEATURES["masks"])
"""Whether bad words may only be single tokens."""
FIELDS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "output_penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.6},
    "logit_bias": {"logit_bias": ((3, 4.0), (9, -50.0), (11, 2.5))},
    "bad_words": {"bad_words": ((5,),) if ALONE else ((5,), (40, 41), (60, 12, 33))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(20, 80))},
    "min_tokens": {"min_tokens": 25, "logit_bias": ((EOS, 6.0),), "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": (50, 51, 52, 53), "min_tokens": 6},
    "all": {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((3, 2.0), (60, 3.0)),
        "bad_words": ((5,),) if ALONE else ((5,), (60, 60)),
        "min_tokens": 10,
        "stop_token_ids": (12,),
    },
}


class OutputPenalties:
    """OpenAI's presence and frequency penalties, by their definition."""

    def __init__(self, params, num_prompt_tokens):
        self.params, self.num_prompt_tokens = params, num_prompt_tokens

    def __call__(self, input_ids, scores):
        counts = torch.bincount(input_ids[0, self.num_prompt_tokens :], minlength=scores.shape[1])
        scores = scores - self.params.frequency_penalty * counts
        return scores - self.params.presence_penalty * (counts > 0)


def processors_of(params, num_prompt_tokens, vocab_size, eos):
    """transformers' own processors in the documented order: bias, penalties, masks."""
    made, minus_inf = LogitsProcessorList(), float("-inf")
    if params.logit_bias:
        made.append(SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in params.logit_bias}))
    if params.allowed_token_ids:
        others = set(range(vocab_size)) - set(params.allowed_token_ids)
        made.append(SequenceBiasLogitsProcessor({(token_id,): minus_inf for token_id in others}))
    if params.min_tokens:
        banned = [*params.stop_token_ids, eos]
        made.append(MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, banned, device="cpu"))
    if params.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    made.append(OutputPenalties(params, num_prompt_tokens))
    if params.bad_words:
        made.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    return made


def transformers_greedy(loaded, prompt, params, eos):
    """Token by token, from the whole sequence each time."""
    model, tokens = loaded.model, torch.tensor([prompt])
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    processors = processors_of(params, len(prompt), loaded.vocab_size, eos)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {eos})
    try:
        for _ in range(params.max_tokens):
            with torch.no_grad():
                scores = processors(tokens, model(tokens, use_cache=False).logits[:, -1].float())
            settled((scores,))
            tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], dim=1)
            if int(tokens[0, -1]) in stops:
                break
    finally:
        model.set_attn_implementation(before)
    return tokens[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def expected_of(ref):
    """The texts that transformers writes where these fields alter its logits."""

    @cache
    def expected(kind):
        return [transformers_greedy(ref.loaded, prompt, params_of(FIELDS[kind]), EOS) for prompt in ref.prompts]

    return expected


@pytest.fixture(scope="module")
def ref():
    ref = reference("llama")
    loaded = ref.loaded
    before = loaded.eos_token_ids
    loaded.eos_token_ids = frozenset([EOS])
    yield ref
    loaded.eos_token_ids = before


def params_of(fields, temperature=0.0, seed=0):
    return SamplingParams(LENGTH, temperature, seed=seed, **({"ignore_eos": True} | fields))


def drafters(ref, texts, shape):
    """Drafters: an untrained head, then scripted ones that know the text wholly or in part."""
    sequences = [prompt + more + [1] * 8 for prompt, more in zip(ref.prompts, texts, strict=True)]
    yield eagle_drafter(ref.loaded, shape)
    for plan in (right_chain,) if shape is CHAIN else (right_tree, random_tree):
        yield ScriptedDrafter(sequences, plan, ref.loaded.vocab_size)


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("kind", ["all", *(kind for kind in FIELDS if kind != "all")])
def test_greedy_tokens_are_those_of_transformers_processors(ref, expected_of, kind, shape):
    params, expected = params_of(FIELDS[kind]), expected_of(kind)
    assert len({tuple(row) for row in expected}) > 1
    plain, _ = generate(ref.loaded, engine_config(), None, ref.prompts, params)
    assert plain == expected
    for drafter in drafters(ref, expected, SHAPES[shape]):
        tokens, engine = generate(ref.loaded, engine_config(SHAPES[shape]), drafter, ref.prompts, params)
        assert tokens == expected
        assert engine.speculation.num_drafts > 0


@pytest.mark.parametrize("shape", list(SHAPES))
def test_sampled_tokens_are_those_of_plain_decoding_beside_neighbours_that_want_nothing(ref, shape):
    params = [params_of(fields, 1.0, seed) for seed, fields in enumerate([{}, *FIELDS.values()])][: len(ref.prompts)]
    plain, _ = generate(ref.loaded, engine_config(), None, ref.prompts, params)
    alone, _ = generate(ref.loaded, engine_config(max_num_seqs=1), None, ref.prompts, params)
    assert plain == alone
    for drafter in drafters(ref, plain, SHAPES[shape]):
        tokens, _ = generate(ref.loaded, engine_config(SHAPES[shape]), drafter, ref.prompts, params)
        assert tokens == plain


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_the_fixed_shapes_of_an_accelerator_and_rounds_in_flight_change_nothing(ref, overlap):
    params = [
        params_of(FIELDS[kind], temperature, 3) for kind in ("all", "bad_words") for temperature in (0.0, 1.0)
    ] * 2
    plain, _ = generate(ref.loaded, engine_config(), None, ref.prompts, params)
    for drafter in (None, *drafters(ref, plain, TREE)):
        engine = new_engine(ref.loaded, engine_config(overlap=overlap), drafter, on_host=False)
        try:
            assert Run(engine, ref.prompts, params).finish() == plain
        finally:
            engine.model.remove_taps()


def test_slots_forget_what_altered_them(ref):
    """More requests than slots: each slot serves altered requests and plain ones in turn."""
    params = [params_of(FIELDS["all"] if index % 2 else {}) for index in range(len(ref.prompts))]
    expected, _ = generate(ref.loaded, engine_config(), None, ref.prompts, params)
    found, _ = generate(ref.loaded, engine_config(max_num_seqs=2), None, ref.prompts, params)
    assert found == expected


def test_preempted_sequences_keep_their_history(ref):
    params = params_of(FIELDS["all"] | {"stop_token_ids": (), "min_tokens": 0})
    expected, _ = generate(ref.loaded, engine_config(), None, ref.prompts, params)
    found, engine = generate(ref.loaded, engine_config(num_kv_blocks=18), None, ref.prompts, params)
    assert engine.scheduler.num_preemptions > 0
    assert found == expected
