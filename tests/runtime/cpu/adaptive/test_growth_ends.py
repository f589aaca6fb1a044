"""An EAGLE drafter on the CPU's kernels stops growing where torch's operations stop."""

import numpy as np
import pytest
import torch

from tests.runtime.cpu.drafting.kernel_drafts import assert_same
from tests.runtime.cpu.drafting.test_kernel_passes import by_shape, drafter_of, worlds
from tests.runtime.draft_world import MIXED
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.adaptive.growth_rule import AcceptanceRule
from wingbeat.runtime.adaptive.policy import GrowthLimits
from wingbeat.runtime.config import NUM_BINS

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


@by_shape
@torch.inference_mode()
def test_growth_ends_where_the_rules_end_it(speculation):
    drafter = drafter_of(speculation)
    world, other = worlds(drafter, MIXED)
    table = np.linspace(0.05, 0.95, NUM_BINS, dtype=np.float32)
    deepest = set()
    for min_reach in (0.0, 0.05, 0.3, 1.0, 3.0, 9.0):

        def rules(min_reach=min_reach):
            """Return new rules, because a rule follows the paths of the draft that it is used for."""
            halves = (slice(0, 3), slice(3, len(world.slots)))
            limits = GrowthLimits(min_reach, 0.02)
            made = [AcceptanceRule(limits, np.tile(table, (half.stop - half.start, 1))) for half in halves]
            return tuple(zip(halves, made, strict=True))

        batch = world.batch(proposals=world.slots)
        tree = drafter.draft(batch._replace(growth_rules=rules()))
        assert_same(tree, other.draft(batch._replace(growth_rules=rules())))
        deepest.add(int(tree.depths.max()))
    assert len(deepest) > 1 or speculation.max_path == 2
