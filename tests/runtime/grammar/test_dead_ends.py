"""An answer ends where its grammar and other fields leave no token, drafted or not; other requests go on."""

import pytest
import torch

from tests.runtime.models import DEMO_PAIR, TREE, eagle_drafter, engine_config, new_engine
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.scheduling.request import FinishReason, GrammarSpec, Request, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import load_model

CHOICE = GrammarSpec("choice", '["import", "from"]')
TEXTS = ("import", "from")


@pytest.fixture(scope="module")
def demo():
    loaded = load_model(DEMO_PAIR / "verifier", torch.float32, torch.device("cpu"))
    tokenizer = Tokenizer.load(DEMO_PAIR / "verifier")
    return loaded, tokenizer, Grammars(tokenizer, loaded.vocab_size, loaded.eos_token_ids)


@pytest.mark.few(2)
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_ends_where_nothing_is_left(demo, drafted, temperature):
    loaded, tokenizer, grammars = demo
    grammar, common = grammars.compile(CHOICE), {"temperature": temperature, "grammar": CHOICE, "logprobs": 1}
    fields = [
        {},
        {"min_tokens": 12},
        {"allowed_token_ids": tuple(tokenizer.encode("xyz"))},
        {"bad_words": tuple((token_id,) for token_id in range(4096) if tokenizer.decode([token_id])[:1] in {"i", "f"})},
    ]
    engine = new_engine(loaded, engine_config(TREE), eagle_drafter(loaded, TREE) if drafted else None)
    texts: dict[str, list[int]] = {str(index): [] for index in range(len(fields))}
    ends = {}
    try:
        for index, more in enumerate(fields):
            params = SamplingParams(20, **common, **more)
            engine.add_request(Request(str(index), tuple(tokenizer.encode("# a")), params), grammar)
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.failure is None
                assert len(output.logprobs) == len(output.token_ids)
                texts[output.request_id] += output.token_ids
                ends[output.request_id] = output.finish_reason
        engine.check_integrity()
    finally:
        engine.model.remove_taps()
    written = [tokenizer.decode(token_ids) for token_ids in texts.values()]
    assert written[0] in TEXTS
    assert written[1] in TEXTS
    assert not any(text in TEXTS for text in written[2:])
    assert ends == {"0": FinishReason.STOP, **dict.fromkeys("123", FinishReason.LENGTH)}
