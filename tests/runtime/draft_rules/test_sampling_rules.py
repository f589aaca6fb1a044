"""Drafts are ranked by the logits that remain after each request's sampling rules."""

import pytest
import torch

from tests.runtime.by_torch import by_torch
from tests.runtime.models import CHAIN, DEMO_PAIR, TREE, Run, engine_config, new_engine, reference
from wingbeat.kernels.sampling.noise import gumbel_noise
from wingbeat.kernels.sampling.processors import Histories
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.draft_rules.published_rules import MOST_BIASED, has_rules, listed
from wingbeat.runtime.draft_rules.request_rules import RequestRules, prompt_lens
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.growth import Growth, Roots
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.contract import Continuations
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.protocol.sampling_rules import RuleKinds, no_rules
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer

BAN = float("-inf")


def drafted(params, logits, history, top_k=3, among=None):
    """First level of a tree under one request's rules; the drafter's logits are the target's own."""
    vocab_size = logits.shape[-1]
    growth = Growth(SpeculationConfig(2, top_k, 1 + 2 * top_k), torch.arange(vocab_size))
    told = no_rules(1)
    told.numbers[0, :6] = torch.tensor(
        [
            *(params.top_k, params.top_p, params.min_p),
            *(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        ]
    )
    for place, (token_id, bias) in enumerate(listed(params)):
        told.token_ids[0, place], told.biases[0, place] = token_id, bias
    lens, zeros = torch.tensor([len(history)]), torch.zeros(1, dtype=torch.int64)
    temperatures = torch.tensor([params.temperature])
    histories = Histories(torch.tensor([history]), lens, prompt_lens(told), zeros)
    rules = RequestRules.from_slots(told, RuleKinds.every(), temperatures, histories, growth.rules.columns)
    positions = lens + torch.arange(2)[:, None]
    roots = Roots(zeros, zeros, positions, temperatures, zeros + params.seed, rules=rules)
    own = slice(None) if among is None else among
    given = Continuations(logits.view(1, 1, -1)[..., own], None if among is None else torch.tensor([among]))

    def expand(level):
        return given._replace(logits=given.logits.expand(-1, level.token_ids.shape[1], -1))

    tree = growth.grow(roots, given, expand)
    return tree.token_ids[0][(tree.depths[0] == 1) & (tree.scores[0] > BAN)].tolist()


def test_the_first_candidate_is_the_targets_own_token():
    """With the target's logits and noise, the first candidate is the target's chosen token under any filter."""
    torch.manual_seed(1)
    for seed in range(40):
        logits, params = torch.randn(50) * 2, SamplingParams(temperature=0.8, top_p=0.6, top_k=20, seed=seed)
        kept = logits / 0.8
        ranked, order = kept.sort(descending=True)
        mass = ranked[:20].softmax(0).cumsum(0)
        allowed = order[: int((mass < 0.6).sum()) + 1]
        noise = gumbel_noise(torch.tensor([seed]), torch.tensor([4]), torch.arange(50))[0]
        chosen = int(allowed[(kept + noise)[allowed].argmax()])
        first = drafted(params, logits, [1, 2, 3, 4])
        assert first[0] == chosen
        assert set(first) <= set(allowed.tolist())


def test_bans_and_penalties_move_a_greedy_draft():
    logits = torch.tensor([3.0, 2.5, 2.0, 1.5, 1.0, 0.0])
    greedy = SamplingParams(temperature=0.0)
    assert drafted(greedy, logits, [5], 1) == [0]
    assert drafted(SamplingParams(temperature=0.0, bad_words=((0,), (1, 2))), logits, [5], 1) == [1]
    assert drafted(SamplingParams(temperature=0.0, logit_bias=((4, 9.0),)), logits, [5], 1) == [4]
    assert drafted(SamplingParams(temperature=0.0, presence_penalty=0.6), logits, [0, 0], 1) == [1]
    assert drafted(SamplingParams(temperature=0.0, frequency_penalty=0.6), logits, [0, 0, 1], 1) == [2]
    assert drafted(SamplingParams(temperature=0.0, repetition_penalty=2.0), logits, [0, 1], 1) == [2]
    # A head whose draft vocabulary has only a few tokens.
    assert drafted(SamplingParams(temperature=0.0, bad_words=((2,),)), logits, [5], 1, among=[2, 4, 3]) == [3]


def test_what_is_listed():
    assert not has_rules(SamplingParams(temperature=1.0))
    assert not has_rules(SamplingParams(temperature=0.0, top_p=0.5))
    assert has_rules(SamplingParams(temperature=1.0, top_p=0.5))
    assert has_rules(SamplingParams(temperature=0.0, presence_penalty=0.1))
    many = tuple((token_id, float(token_id)) for token_id in range(2 * MOST_BIASED))
    kept = listed(SamplingParams(logit_bias=many))
    assert [token_id for token_id, _ in kept] == list(range(2 * MOST_BIASED))[: -MOST_BIASED - 1 : -1]
    allowed = SamplingParams(allowed_token_ids=(4, 9), logit_bias=((4, 2.0), (5, 9.0)), bad_words=((9,), (5,)))
    assert dict(listed(allowed)) == {4: 2.0, 9: BAN}
    assert not listed(SamplingParams(allowed_token_ids=tuple(range(MOST_BIASED + 1))))


WORDS = tuple((token_id,) for token_id in range(200, 260))
ASKED = {
    "filters": {"temperature": 0.7, "top_p": 0.9},
    "all": {
        "temperature": 0.9,
        "top_k": 30,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logit_bias": ((221, -2.0), (300, 1.0)),
        "bad_words": WORDS,
    },
    "greedy": {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "bad_words": ((221,),)},
}


@pytest.fixture(scope="module")
def demo():
    return reference("demo", 1).loaded


@pytest.mark.few(1)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("head", ["drafter", "dflash2"])
def test_tokens_are_those_of_plain_decoding_beside_requests_without_rules(demo, head, shape, asked):
    target = TargetDescription.from_checkpoint(DEMO_PAIR / "verifier")
    tokenizer = Tokenizer.load(DEMO_PAIR / "verifier")
    prompts = [tokenizer.encode(text) for text in ("def f(x):\n", "import os\n", "class A:\n    ")]
    free = SamplingParams(32, 1.0, seed=3, ignore_eos=True)
    params = [SamplingParams(32, seed=2, ignore_eos=True, **asked), free, SamplingParams(32, ignore_eos=True, **asked)]
    config = engine_config(shape, max_model_len=512, num_kv_blocks=300)

    def generated(drafter):
        engine = new_engine(demo, config, drafter)
        try:
            return Run(engine, prompts, params).finish(), engine
        finally:
            engine.model.remove_taps()

    def drafted():
        options = DrafterOptions(torch.float32, "cpu")
        tokens, engine = generated(load_drafter(DEMO_PAIR / head, target, shape, options))
        assert engine.speculation.num_accepted_tokens > 0
        return tokens

    plain, _ = generated(None)
    assert drafted() == plain
    assert by_torch(drafted) == plain
