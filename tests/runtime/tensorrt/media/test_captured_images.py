"""Captured stages read images that came after the capture."""

import pytest

from tests.runtime.media.media_world import ShownRun, shown
from tests.runtime.media.test_drafter_sees import Dense, check_first, head_for
from tests.runtime.models import greedy_params
from tests.runtime.tensorrt.captured import captured_pair
from tests.runtime.tensorrt.media.drafts_watched import drafts_within
from tests.runtime.tensorrt.media.images_world import with_images
from tests.runtime.tensorrt.test_engine_captured import ALL
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter


@pytest.mark.slow
def test_text_behind_images_and_cached_blocks_is_that_of_generate():
    ref, head = shown("qwen3_vl"), head_for("qwen3_vl")
    pair = captured_pair(ref.loaded, head=head, extend=with_images("qwen3_vl"), max_num_seqs=3, block_size=4)
    dense = Dense(head, "qwen3_vl")
    for _ in range(2):
        with drafts_within(EngineDrafter, ref) as drafts:
            texts = ShownRun(pair.engine, ref.prompts, ref.media, greedy_params(16)).finish()
        assert texts == [more[:16] for more in ref.continuations]
        check_first(drafts, dense, 17)
    assert pair.engine.block_manager.hit_tokens > 0
    assert pair.stages() == ALL
    assert pair.graphs.num_replays > 0
