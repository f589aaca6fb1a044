"""Captured stages read images and blocks that came after the capture; texts are those of eager ones."""

import pytest

from tests.runtime.media.test_drafter_sees import Dense, check_first, head_for
from tests.runtime.media_world import ShownRun, shown
from tests.runtime.models import Run, greedy_params, reference
from tests.runtime.one_pass.one_pass_drafts import load
from tests.runtime.one_pass.one_pass_world import random_tensors, raw_config
from tests.runtime.tensorrt.captured import captured_pair
from tests.runtime.tensorrt.drafts_watched import drafts_within
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter

ALL = {"verify", "plain", "proposal", "accept"}


@pytest.mark.slow
def test_text_behind_images_and_cached_blocks_is_that_of_generate():
    ref, head = shown("qwen3_vl"), head_for("qwen3_vl")
    pair = captured_pair(ref.loaded, head=head, max_num_seqs=3, block_size=4)
    dense = Dense(head, "qwen3_vl")
    for _ in range(2):
        with drafts_within(EngineDrafter, ref) as drafts:
            texts = ShownRun(pair.engine, ref.prompts, ref.media, greedy_params(16)).finish()
        assert texts == [more[:16] for more in ref.continuations]
        check_first(drafts, dense, 17)
    assert pair.engine.block_manager.hit_tokens > 0
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
