"""The CUDA branches of engine and drafters, run on a GPU of shapes: the host waits where it may, and nowhere else."""

import pytest
from fake_gpu import FakeGraphDevice, fake_gpu, why_not
from gpu_world import CHAIN, GREEDY, PLAIN, SAMPLED, TREE, engine_config, new_drafter, serve

from wingbeat.runtime.cuda_graph import Stage

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no fake GPU: {why_not()}")

SHAPES = {"chain": CHAIN, "tree": TREE}
LAUNCHES_PER_LAYER = 35
"""Of a Llama: 7 products, 16 of the norms, 5 of rope, 2 sums, 2 of the activation, keys stored, attention and merge."""


@pytest.fixture
def gpu():
    with fake_gpu() as mode:
        yield mode


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle-3", "eagle-1", "draft-model", "mtp"])
def test_rounds_wait_for_the_device_in_their_one_wait_alone(gpu, kind, shape, num_slots):
    drafter = new_drafter(kind, SHAPES[shape], FakeGraphDevice(gpu))
    served = serve(gpu, engine_config(SHAPES[shape], num_slots), drafter, [GREEDY, SAMPLED, PLAIN])
    assert served.engine.runner.graphs.stats.failed == []
    assert served.engine.runner.graphs.stats.replays[Stage.BASE_VERIFICATION]
    assert served.engine.drafter_state == "attached"
