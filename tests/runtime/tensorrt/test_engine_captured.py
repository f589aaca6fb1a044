"""Captured stages read blocks that came after the capture; texts are those of eager ones."""

from tests.runtime.models import Run, greedy_params, reference
from tests.runtime.one_pass.one_pass_drafts import load
from tests.runtime.one_pass.one_pass_world import random_tensors, raw_config
from tests.runtime.tensorrt.captured import captured_pair

ALL = {"verify", "plain", "proposal", "accept"}


def test_a_block_of_one_pass_is_captured(tmp_path):
    expected = reference("llama")
    raw = raw_config("dflash2", (0, 1, 2), 2, block_size=7)
    pair = captured_pair(expected.loaded, head=load(tmp_path, raw, random_tensors(raw)), max_num_seqs=3)
    texts = Run(pair.engine, expected.prompts[:4], greedy_params(20)).finish()
    assert texts == [more[:20] for more in expected.continuations[:4]]
    assert pair.stages() == ALL
    assert pair.engine.speculation.num_drafts > 0
