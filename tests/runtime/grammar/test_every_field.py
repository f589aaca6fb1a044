"""Every field that alters or reports tokens, at once: the same tokens and log-probabilities, drafted or not."""

from dataclasses import replace

import pytest

from tests.runtime.grammar.world import SPECS, TOKENIZER, Constrained, demo_drafter
from tests.runtime.models import CHAIN, TREE, engine_config, new_engine, reference
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.scheduling.request import SamplingParams

pytestmark = pytest.mark.few(1)

FIELDS = {
    "top_p": 0.95,
    "top_k": 200,
    "min_p": 0.001,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": ((70, 2.0), (300, -3.0)),
    "bad_words": ((65,), (66, 67)),
    "min_tokens": 6,
    "logprobs": 3,
    "prompt_logprobs": 2,
}


class Reporting(Constrained):
    """Collects log-probabilities too."""

    def __init__(self, *args):
        self.reported = {}
        super().__init__(*args)

    def step(self):
        for output in self.engine.step():
            index = int(output.request_id)
            self.tokens[index] += output.token_ids
            self.reported.setdefault(index, []).extend((*output.prompt_logprobs, *output.logprobs))


def run(loaded, grammars, params, batch_size, shape, drafter):
    """Tokens and log-probabilities by request."""
    config = engine_config(shape, max_num_seqs=batch_size, max_model_len=512, num_kv_blocks=300)
    engine = new_engine(loaded, config, drafter)
    try:
        reporting = Reporting(engine, grammars, [TOKENIZER.encode("data = ")] * len(params), params)
        return reporting.finish(), [reporting.reported[index] for index in range(len(params))], engine.speculation
    finally:
        engine.model.remove_taps()


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("shape", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("batch_size", [8, 1])
def test_tokens_and_log_probabilities_are_those_of_plain_decoding(batch_size, shape, temperature):
    loaded = reference("demo", 1).loaded
    grammars = Grammars(TOKENIZER, loaded.vocab_size, loaded.eos_token_ids)
    params = [
        SamplingParams(24, temperature, seed=seed, speculation=False, grammar=spec, **FIELDS)
        for seed, spec in enumerate(SPECS)
    ]
    plain, reported, _ = run(loaded, grammars, params, batch_size, shape, None)
    drafted = [replace(param, speculation=True) for param in params]
    tokens, again, speculation = run(loaded, grammars, drafted, batch_size, shape, demo_drafter(shape))
    assert tokens == plain
    assert speculation.num_accepted_tokens > 0
    for mine, other in zip(reported, again, strict=True):
        assert len(mine) == len(other) > 0
        for left, right in zip(mine, other, strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert [value for _, value in left.top] == pytest.approx([value for _, value in right.top], abs=1e-4)
