"""A prefix that is of an adapter."""

from tests.runtime.lora_world import NUM_TOKENS, lora_world
from tests.runtime.models import CHAIN, eagle_drafter, engine_config, greedy_params
from tests.runtime.prefix_world import SMALL, finish, prefix_of, save, store_of
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper
from wingbeat.runtime.scheduling.request import Request


def test_a_prefix_is_of_its_adapter_alone_and_comes_back_for_it(tmp_path):
    world, index, which = lora_world(), 4, 1
    prompt, adapter = world.prompts[index], world.adapters[which]
    limits = engine_config(CHAIN, **SMALL)
    for is_first in (True, False):
        drafter = None if is_first else eagle_drafter(world.loaded, CHAIN)
        engine = build_engine(world.loaded, limits, drafter, InProcessChannel)
        keeper = PrefixKeeper(engine, store_of(tmp_path))
        if is_first:
            save(engine, keeper, prefix_of(prompt[:42], variant=adapter))
        else:
            keeper.open([adapter])
        for number, asked in enumerate((which, 0)):
            request = Request(str(number), tuple(prompt), greedy_params(NUM_TOKENS), variant=world.adapters[asked])
            engine.add_request(request)
            tokens, cached = [], 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens += output.token_ids
                    cached = max(cached, output.num_cached_tokens)
            assert tokens == world.expected[asked][index]
            assert cached == (40 if asked == which else 0)
        finish(engine, keeper)
        keeper.close()
        engine.check_integrity()
        engine.model.remove_taps()
        world.loaded.parts["adapters"].rows = None
