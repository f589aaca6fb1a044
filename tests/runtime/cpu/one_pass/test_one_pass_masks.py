"""Masks of roots are applied by the CPU's kernels as by torch's operations."""

import pytest
import torch

from tests.runtime.cpu.one_pass.test_one_pass_kernels import assert_alike, head_of, pair_of
from tests.runtime.draft_world import VOCAB
from tests.runtime.models import TREE
from wingbeat.kernels.cpu.ops import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


@pytest.mark.parametrize("family", ["dflash", "dspark-gated", "dflash2"])
def test_roots_are_followed_by_allowed_tokens_alone(tmp_path, family):
    mine, other, world = pair_of(head_of(tmp_path, family), TREE)
    allowed = torch.randint(-(1 << 31), 1 << 31, (len(world.slots), -(-VOCAB // 32))).to(torch.int32)
    allowed[1] = 0  # masks every token of the draft vocabulary, so no mask is applied
    assert_alike(mine, other, world, allowed_tokens=allowed)
