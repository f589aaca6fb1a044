"""Rounds of hybrids on a GPU of shapes: the host waits for nothing, and launches of a layer are counted."""

import pytest

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, why_not
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import GREEDY, TREE, VOCAB_SIZE, engine_config, placed_verifier, serve
from tests.runtime.hybrids import needs_states, of_layers
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.round.choice import Choosing

pytestmark = needs_states

LIMITS = {"lfm2": (18, 5), "qwen3_5": (44, 21), "falcon_h1": (68, 21)}
"""Launches of a layer with a mixer, by kind: in the forward pass over trees, and where tokens are chosen. A layer of a
Llama has 9."""
ATTENDING = {"lfm2": 13, "qwen3_5": 16}
"""Launches of a layer that attends, in the forward pass over trees."""


@pytest.fixture
def gpu():
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with fake_gpu() as gpu:
        yield gpu


def placed_hybrid(name: str, num_mixers: int, num_attending: int = 1):
    """Layers that attend, behind them layers with mixers."""
    return placed_verifier(of_layers(name, [*[1] * num_attending, *[0] * num_mixers]))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LIMITS)
def test_no_captured_round_waits_for_the_device(gpu, name):
    """Requests come and go; in strict rounds every wait is an error at its line."""
    drafter = ScriptedDrafter([], right_tree, VOCAB_SIZE)
    served = serve(gpu, engine_config(TREE, 2), drafter, [GREEDY], loaded=placed_hybrid(name, 1))
    assert any(launches["graph"] for launches in served.launches)
    assert served.engine.stats().graphs.failed == []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LIMITS)
def test_launches_of_a_layer_are_no_more_than_their_limit_and_no_fewer(gpu, name):
    one, two = (launches(gpu, name, num_mixers) for num_mixers in (1, 2))
    assert tuple(more - fewer for fewer, more in zip(one, two, strict=True)) == LIMITS[name]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ATTENDING)
def test_attention_of_hybrids_is_fused(gpu, name):
    one, two = (launches(gpu, name, 1, num_attending)[0] for num_attending in (1, 2))
    assert two - one == ATTENDING[name]


def launches(gpu, name: str, num_mixers: int, num_attending: int = 1) -> tuple[int, int]:
    """A captured round of one greedy sequence's tree: launches of the forward pass, and of the choice behind it."""
    device = FakeGraphDevice(gpu)
    engine = Engine(placed_hybrid(name, num_mixers, num_attending), engine_config(TREE, 1), DrafterNeeds(), device)
    engine.runner.prepare_trees()
    stages = [stage for stage, _ in engine.runner.graphs.stats.captured]
    forward, greedy, *_ = device.graphs[stages.index(Stage.BASE_VERIFICATION) :][: 1 + len(Choosing)]
    return forward.total(), greedy.total()
