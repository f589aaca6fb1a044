"""Launches of a rank's captured rounds on a GPU of shapes: nothing waits, and each layer adds only its sums."""

from functools import partial

import pytest

pytest.importorskip("triton")

from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import CHAIN, GREEDY, SAMPLED, TREE, engine_config, new_drafter, serve, verifier
from tests.runtime.tensor_parallel.gpu_ranks import QueuedRanks, RankGraphDevice, group_of_two, shard
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import connect
from wingbeat.runtime.tensor_parallel.follower import Follower
from wingbeat.runtime.tensor_parallel.leader import Leader
from wingbeat.runtime.tensor_parallel.round_message import unpack

SHAPES = {"plain": TREE, "chain": CHAIN, "tree": TREE}
MOST = 1.3
"""Launches of a rank's layer for one of a whole model's."""


def captured(gpu, shape, num_layers):
    """Launches of the graphs of a whole model, of rank 0 and of rank 1, each in the order of their captures."""
    whole = FakeGraphDevice(gpu)
    Engine(verifier(num_layers), engine_config(shape, 1), DrafterNeeds((0,)), whole).runner.prepare_trees()
    devices = [RankGraphDevice(gpu), RankGraphDevice(gpu)]
    with group_of_two() as told:
        first, second = (QueuedRanks(rank, told) for rank in (0, 1))
        loaded, followed = shard(first, num_layers), shard(second, num_layers)
        engine = Engine(loaded, engine_config(shape, 1), DrafterNeeds((0,)), devices[0], backend=Leader(loaded, first))
        engine.runner.prepare_trees()
        assert engine.runner.graphs.stats.failed == []
        follower = Follower(followed, second, devices[1])
        while told:
            follower.run(unpack(*second.hear()))
    return [[graph.total() for graph in device.graphs] for device in (whole, *devices)]


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_layer_of_a_rank_has_two_sums_more_than_one_of_a_whole_model(gpu, shape):
    """Plain rounds, those of trees, mixed ones and prompts."""
    per_layer = [
        [two - one for one, two in zip(*totals, strict=True)]
        for totals in zip(*(captured(gpu, shape, num_layers) for num_layers in (1, 2)), strict=True)
    ]
    whole, leads, follows = per_layer
    assert leads == follows == [count + 2 * bool(count) for count in whole]
    assert max(whole) > 0
    assert all(count <= MOST * its for count, its in zip(leads, whole, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", SHAPES)
def test_captured_rounds_of_a_rank_wait_in_their_one_wait_alone(gpu, kind):
    shape, drafter = SHAPES[kind], None
    if kind != "plain":
        drafter = new_drafter("eagle-3", shape, FakeGraphDevice(gpu))
    with group_of_two() as told:
        ranks = QueuedRanks(0, told)
        loaded = shard(ranks, 1)
        build = partial(led, Leader(loaded, ranks))
        served = serve(gpu, engine_config(shape, 3), drafter, [GREEDY, SAMPLED], loaded=loaded, build=build)
    stats = served.engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.BASE_DECODING if drafter is None else Stage.BASE_VERIFICATION]
    assert stats.replays[Stage.BASE_MIXED]
    assert not stats.eager_runs


def led(leader, loaded, config, drafter, channel, device):
    """As `build_engine`, of rank 0."""
    engine = Engine(loaded, config, drafter.needs if drafter else DrafterNeeds(), device, backend=leader)
    if drafter is not None:
        connect(engine, drafter, channel)
    return engine
