"""Captured stages read adapters and blocks that came after the capture; texts are those of eager ones."""

import pytest

from tests.runtime.lora_world import NUM_TOKENS, lora_world
from tests.runtime.models import Run, greedy_params, reference
from tests.runtime.one_pass.one_pass_drafts import load
from tests.runtime.one_pass.one_pass_world import random_tensors, raw_config
from tests.runtime.tensorrt.captured import captured_pair
from tests.runtime.tensorrt.engine_world import LIMITS
from wingbeat.runtime.scheduling.request import Request

ALL = {"verify", "plain", "proposal", "accept"}


@pytest.mark.slow
def test_adapters_that_come_after_the_capture_write_what_their_merged_models_write():
    world = lora_world()
    built = LIMITS.model_copy(update={"max_loras": 2, "max_lora_rank": 8})
    pair = captured_pair(reference("llama").loaded, built=built, max_num_seqs=3, max_loras=2, max_lora_rank=8)
    which = (1, 0, 2, 3, 1, 0)
    for index, adapter in enumerate(which):
        params, prompt = greedy_params(NUM_TOKENS), tuple(world.prompts[index])
        pair.engine.add_request(Request(str(index), prompt, params, adapter=world.adapters[adapter]))
    tokens: dict[str, list[int]] = {}
    while pair.engine.has_unfinished_requests():
        for output in pair.engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == {str(index): world.expected[adapter][index] for index, adapter in enumerate(which)}
    assert pair.stages() == ALL
    assert pair.graphs.num_replays > 0


def test_a_block_of_one_pass_is_captured(tmp_path):
    expected = reference("llama")
    raw = raw_config("dflash2", (0, 1, 2), 2, block_size=7)
    pair = captured_pair(expected.loaded, head=load(tmp_path, raw, random_tensors(raw)), max_num_seqs=3)
    texts = Run(pair.engine, expected.prompts[:4], greedy_params(20)).finish()
    assert texts == [more[:20] for more in expected.continuations[:4]]
    assert pair.stages() == ALL
    assert pair.engine.speculation.num_drafts > 0
