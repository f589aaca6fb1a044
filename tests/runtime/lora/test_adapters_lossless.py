"""Requests with adapters, mixed in one batch, write what transformers writes with each adapter merged."""

import pytest

from tests.runtime.lora_world import NUM_TOKENS, lora_world
from tests.runtime.models import CHAIN, TREE, eagle_drafter, engine_config, greedy_params, new_engine
from wingbeat.runtime.scheduling.request import Request


def run(engine, requests):
    """Tokens of requests, (adapter, prompt, params) each."""
    for index, (adapter, prompt, params) in enumerate(requests):
        engine.add_request(Request(str(index), tuple(prompt), params, adapter=adapter))
    tokens = [[] for _ in requests]
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.failure is None, output.failure
            tokens[int(output.request_id)] += output.token_ids
    engine.check_integrity()
    return tokens


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_mixed_adapters_write_what_each_merged_model_writes(shape):
    world = lora_world("llama")
    drafter = None if shape is None else eagle_drafter(world.loaded, shape)
    engine = new_engine(world.loaded, engine_config(shape or TREE), drafter)
    try:
        mixed = [(index % len(world.adapters), prompt) for index, prompt in enumerate(world.prompts)]
        requests = [(world.adapters[which], prompt, greedy_params(NUM_TOKENS)) for which, prompt in mixed]
        tokens = run(engine, requests)
        assert tokens == [world.expected[which][index] for index, (which, _) in enumerate(mixed)]
    finally:
        engine.model.remove_taps()
