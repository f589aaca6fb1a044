"""Rounds in one graph on a GPU of shapes: which rounds they are, and what the host launches in them."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from tests.runtime.fake_gpu import CUDA
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import (
    ALTERED,
    CHAIN,
    GREEDY,
    PLAIN,
    SAMPLED,
    TREE,
    engine_config,
    new_drafter,
    serve,
    verifier,
)
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.worker import DraftWorker, RoundObserver
from wingbeat.runtime.engine import memory
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.inner_drafter import InnerDrafter, attach
from wingbeat.runtime.one_graph.whole_rounds import num_whole_rounds
from wingbeat.runtime.scheduling.request import Request

SHAPES = {"chain": CHAIN, "tree": TREE}
LONG = replace(GREEDY, max_tokens=8)
TEMPERED = replace(LONG, temperature=0.8, seed=3)
WHOLE = Counter(graph=1, copy_=1)
"""Launches of a round in one graph: the graph, and the copy of its tokens to the host."""


def served(gpu, params, shape=CHAIN, num_slots=1, kind="eagle-3", **how):
    drafter = new_drafter(kind, shape, FakeGraphDevice(gpu))
    return serve(gpu, engine_config(shape, num_slots), drafter, params, **how)


@pytest.mark.few(2)
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle-3", "eagle-1", "draft-model", "mtp", "shared_keys", "dflash", "p-eagle"])
def test_steady_rounds_are_one_graph_and_one_download(gpu, kind, shape, num_slots):
    done = served(gpu, [LONG, TEMPERED], SHAPES[shape], num_slots, kind)
    stats = done.engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.WHOLE_ROUND] > 2 * num_slots
    assert done.launches.count(WHOLE) > 2
    assert done.engine.drafter_state == "attached"
    done.engine.check_integrity()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "params",
    [SAMPLED, ALTERED, PLAIN, replace(LONG, bad_words=((3, 5),))],
    ids=["filtered", "altered", "plain", "masked"],
)
def test_rounds_that_need_the_host_between_take_the_usual_graphs(gpu, params):
    done = served(gpu, [params], TREE)
    assert not done.engine.runner.graphs.stats.replays.get(Stage.WHOLE_ROUND)


def test_a_sequence_that_needs_the_host_takes_the_round_of_all(gpu):
    done = served(gpu, [LONG, SAMPLED], TREE, num_slots=2)
    graphs = [launches["graph"] for launches in done.launches]
    assert {1, 3} <= set(graphs), "one graph once the sampled request has ended"


class Waiting(RoundObserver):
    """Has something to do before the next pass of the drafter, such as a swap of its head."""

    has_work = False

    def before(self) -> None:
        self.has_work = False


def test_work_that_waits_for_a_pass_of_the_drafter_gets_one(gpu):
    """The work is done by the drafter's own pass, which therefore answers one round."""
    drafter = new_drafter("eagle-3", CHAIN, FakeGraphDevice(gpu))
    engine = Engine(verifier(), engine_config(CHAIN, 1), drafter.needs, FakeGraphDevice(gpu))
    worker = DraftWorker(drafter)
    attach(engine, worker, partial(InProcessChannel, device=CUDA))
    engine.add_request(Request("0", (1, 2, 3), replace(LONG, max_tokens=40)))
    whole = [takes_one_graph(engine) for _ in range(5)]
    worker.observer = Waiting()
    worker.observer.has_work = True
    whole += [takes_one_graph(engine) for _ in range(3)]
    assert whole[-4:] == [True, False, True, True]
    assert not worker.observer.has_work


def takes_one_graph(engine) -> bool:
    """Run a round; whether it was one graph."""
    replays = engine.runner.graphs.stats.replays
    before = replays.get(Stage.WHOLE_ROUND, 0)
    engine.step()
    return replays.get(Stage.WHOLE_ROUND, 0) > before


@pytest.mark.parametrize("why", ["adaptive", "host channel"])
def test_engines_that_cannot_have_one_graph_have_none(gpu, why):
    shape = replace(CHAIN, adaptive=True) if why == "adaptive" else CHAIN
    drafter = new_drafter("eagle-3", shape, FakeGraphDevice(gpu))
    worker = DraftWorker(drafter)
    channel = InProcessChannel if why == "host channel" else partial(InProcessChannel, device=CUDA)
    engine = Engine(verifier(), engine_config(shape, 1), drafter.needs, FakeGraphDevice(gpu))
    attach(engine, worker, channel)
    assert engine.runner.whole is None


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_reserved_for_every_graph_of_whole_rounds(gpu, shape, monkeypatch):
    """A drafter in the engine's process is reserved what a drafter beside it is, and these graphs."""
    config = replace(engine_config(SHAPES[shape], 12), num_kv_blocks=None)
    drafter = new_drafter("eagle-3", SHAPES[shape], FakeGraphDevice(gpu))
    device = FakeGraphDevice(gpu)
    engine = Engine(verifier(), engine_config(SHAPES[shape], 12), drafter.needs, device)
    attach(engine, DraftWorker(drafter), partial(InProcessChannel, device=CUDA))
    captured = [stage for stage, _ in engine.runner.graphs.stats.captured].count(Stage.WHOLE_ROUND)
    assert captured == num_whole_rounds(config) > 2
    monkeypatch.setattr(memory, "activation_bytes", lambda *args: (1000, 2000))
    inner = InnerDrafter(SimpleNamespace(engine_dir="built"), "cuda", lambda lender: DraftWorker(drafter))
    needs = inner.needs(None, engine.loaded)
    beside, inside, eager = (
        memory.reserved_bytes(engine.loaded, *given)
        for given in (
            (config, drafter.needs._replace(held_bytes=1)),
            (config, needs),
            (replace(config, cuda_graphs=False), needs),
        )
    )
    assert inside - beside == captured * memory.GRAPH_BYTES
    assert eager < inside
