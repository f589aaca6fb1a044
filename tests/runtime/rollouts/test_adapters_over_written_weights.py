"""Adapters over a base whose weights are written: what they add stays."""

from tests.runtime.lora_world import KINDS, LoraWorld, merge
from tests.runtime.models import engine_config, greedy, greedy_params, new_engine, random_model
from tests.runtime.rollouts.test_served_weights import moved, values_of, write
from wingbeat.runtime.scheduling.request import Request

NUM_TOKENS = 16


def test_a_base_is_written_under_its_adapters():
    world = LoraWorld("llama", kinds={"all": KINDS["all"]})
    new = moved(random_model("llama"))
    engine = new_engine(world.loaded, engine_config())
    for rewritten in (False, True):
        if rewritten:
            write(world.loaded, values_of(new))
            engine.recompute()
        base = new if rewritten else random_model("llama")
        for adapter, folder in zip(world.adapters, world.folders, strict=True):
            if folder is not None:
                base = merge(base, folder)
            expected = greedy(base, world.prompts, NUM_TOKENS)[0]
            for index, prompt in enumerate(world.prompts):
                engine.add_request(Request(str(index), tuple(prompt), greedy_params(NUM_TOKENS), variant=adapter))
            found = {str(index): [] for index in range(len(world.prompts))}
            while engine.has_unfinished_requests():
                for output in engine.step():
                    found[output.request_id] += output.token_ids
            assert list(found.values()) == expected
