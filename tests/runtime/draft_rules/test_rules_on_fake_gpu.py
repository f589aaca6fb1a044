"""Rules of a round on a GPU of shapes: the host does not wait for them."""

import pytest
import torch

pytest.importorskip("triton")

from tests.runtime.fake_gpu import CUDA
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import VOCAB_SIZE, new_drafter
from tests.runtime.launch_counts import attach, decided
from tests.runtime.test_fake_gpu import KINDS, SHAPES
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.protocol.sampling_rules import no_rules


@pytest.mark.few(2)
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_rules_of_sampling_and_masks_are_not_waited_for(gpu, kind, shape, captured):
    """Drafts by a drafter in its verifier's process; masks come from the host."""
    drafter = new_drafter(kind, SHAPES[shape], FakeGraphDevice(gpu) if captured else None)
    batch = decided(attach(drafter, SHAPES[shape], num_slots=1))
    rules = no_rules(1, CUDA)
    masks = torch.full((1, VOCAB_SIZE // 32), 5, dtype=torch.int32, pin_memory=True)
    gpu.strict = True
    masks = masks.to(CUDA, non_blocking=True)
    for ruled in (
        {"sampling_rules": rules},
        {"allowed_tokens": masks},
        {"sampling_rules": rules, "allowed_tokens": masks},
    ):
        drafter.draft(batch._replace(**ruled))
    if captured:
        assert drafter.graph_stats.failed == []
        assert drafter.graph_stats.replays == {Stage.DRAFT_RULED: 3}
        assert not drafter.graph_stats.eager_runs
