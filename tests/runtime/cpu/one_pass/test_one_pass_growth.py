"""A one-pass head on the CPU's kernels stops growing where torch's operations stop."""

import numpy as np
import pytest
import torch

from tests.runtime.cpu.drafting.kernel_drafts import assert_same
from tests.runtime.cpu.one_pass.test_one_pass_kernels import head_of, pair_of
from tests.runtime.models import CHAIN, TREE
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.adaptive.growth_rule import AcceptanceRule
from wingbeat.runtime.adaptive.policy import GrowthLimits
from wingbeat.runtime.config import NUM_BINS

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
@torch.inference_mode()
def test_growth_ends_where_the_rules_end_it(tmp_path, speculation):
    mine, other, world = pair_of(head_of(tmp_path, "dflash2"), speculation)
    table, deepest = np.linspace(0.05, 0.95, NUM_BINS, dtype=np.float32), set()
    for min_reach in (0.0, 0.05, 0.3, 1.0, 3.0):

        def rules(min_reach=min_reach):
            """Return new rules, because a rule follows the paths of the draft that it is used for."""
            whole = slice(0, len(world.slots))
            return ((whole, AcceptanceRule(GrowthLimits(min_reach, 0.02), np.tile(table, (whole.stop, 1)))),)

        batch = world.batch(proposals=world.slots)
        tree = mine.draft(batch._replace(growth_rules=rules()))
        assert_same(tree, other.draft(batch._replace(growth_rules=rules())))
        deepest.add(int(tree.depths.max()))
    assert len(deepest) > 1
