"""Rules are applied by the CPU's kernels as by torch's operations."""

import pytest
import torch

from tests.runtime.cpu.drafting.kernel_drafts import assert_same
from tests.runtime.cpu.drafting.test_kernel_passes import GREEDY, by_shape, drafter_of, worlds
from tests.runtime.draft_world import MIXED, VOCAB
from tests.runtime.rule_rows import rules_of
from wingbeat.kernels.cpu.ops import cpu_kernels
from wingbeat.runtime.protocol.sampling_rules import no_rules

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")


@by_shape
@torch.inference_mode()
def test_roots_are_followed_by_allowed_tokens_alone(speculation):
    drafter = drafter_of(speculation)
    world, other = worlds(drafter, MIXED)
    words = -(-VOCAB // 32)
    allowed = torch.randint(-(1 << 31), 1 << 31, (len(world.slots), words)).to(torch.int32)
    allowed[1] = 0  # masks every token of the draft vocabulary, so no mask is applied
    batch = world.batch(proposals=world.slots)._replace(allowed_tokens=allowed)
    assert_same(drafter.draft(batch), other.draft(batch))


@pytest.mark.parametrize("temperatures", [GREEDY, MIXED], ids=["greedy", "sampled"])
@by_shape
@torch.inference_mode()
def test_kernels_and_torch_rank_alike(speculation, temperatures):
    drafter = drafter_of(speculation)
    world, other = worlds(drafter, temperatures)
    free = world.batch(proposals=world.slots)
    batch = free._replace(sampling_rules=rules_of(len(free.committed_lens)))
    trees = drafter.draft(batch)
    assert_same(trees, other.draft(batch))
    assert trees.token_ids.tolist() != drafter.draft(free).token_ids.tolist()
    nobody = free._replace(sampling_rules=no_rules(len(free.committed_lens)))
    assert_same(drafter.draft(nobody), other.draft(free))
