"""Rounds in which no sequence has an adapter are computed without the adapters' kernels, by graphs of their own."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from tests.runtime.lora.test_adapters_lossless import SHAPES, add, engine_of, finish
from tests.runtime.lora_world import lora_world, write_adapter
from tests.runtime.models import greedy_params
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.round.shapes import num_graphs
from wingbeat.runtime.scheduling.request import Request

pytest.importorskip("triton")

from tests.runtime.fake_gpu import CUDA
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import CHAIN, GREEDY, TREE, engine_config, llama, new_drafter, new_model, verifier

ADAPTED = {"_shrink_kernel": 4, "_expand_kernel": 4}
"""Adapter kernels of a layer."""


class OpenDevice(FakeGraphDevice):
    """Adds the kernels of a replayed graph to the launches of the round."""

    def replay(self, graph: Counter[str]) -> None:
        super().replay(graph)
        self.gpu.launches.update(graph)


def new_engine(gpu, speculation, max_loras=2, apart=False):
    """An engine with room for adapters and a drafter in its process; `apart` keeps each round's stages apart."""
    loaded = verifier()
    if max_loras:
        loaded.add(ModelAdapters(loaded.model, loaded.decoder_layers, max_loras, 4))
    drafter = new_drafter("eagle-3", speculation, OpenDevice(gpu))
    limits = engine_config(speculation, 2, max_loras=max_loras, max_lora_rank=4)
    engine = build_engine(loaded, limits, drafter, partial(InProcessChannel, device=CUDA), OpenDevice(gpu))
    if apart:
        engine.runner.whole = None
    return engine


def rounds_of(gpu, engine):
    """Run all requests; per round, whether a sequence had an adapter, and the launches."""
    found = []
    while engine.has_unfinished_requests():
        gpu.launches.clear()
        engine.step()
        if engine._in_flight:
            plan = engine._in_flight[-1].plan
            seqs = [*plan.decodes, *(chunk.seq for chunk in plan.chunks)]
            found.append((any(seq.seat for seq in seqs), Counter(gpu.launches)))
    return found


def request(name, num_tokens, variant=None):
    return Request(name, (1, 2, 3), replace(GREEDY, max_tokens=num_tokens), variant=variant)


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_adapter_kernels_are_launched_in_rounds_with_an_adapter_alone(gpu, tmp_path, speculation, apart):
    engine = new_engine(gpu, speculation, apart=apart)
    folder = write_adapter(tmp_path / "adapter", new_model(llama()).float())
    adapter = engine.loaded.parts["adapters"].inspect("adapter", folder)
    engine.add_request(request("base", 24))
    engine.add_request(request("adapted", 6, adapter))
    engine.add_request(request("last", 8))
    rounds = rounds_of(gpu, engine)
    assert engine.runner.graphs.stats.failed == []
    assert {adapted for adapted, _ in rounds} == {True, False}
    for adapted, launches in rounds:
        assert {name: launches[name] for name in ADAPTED} == {name: adapted * count for name, count in ADAPTED.items()}


def test_a_round_without_an_adapter_launches_what_an_engine_without_adapters_does(gpu):
    found = []
    for max_loras in (2, 0):
        engine = new_engine(gpu, TREE, max_loras)
        engine.add_request(request("base", 12))
        found.append(rounds_of(gpu, engine))
    assert found[0] == found[1]


def test_every_graph_is_counted_where_memory_is_reserved(gpu):
    engine = new_engine(gpu, TREE)
    [num_whole] = [count(engine.config) for count in hooks("num_whole_rounds")] or [0]
    assert len(engine.runner.graphs.stats.captured) == num_graphs(engine.config) + num_whole
    assert num_graphs(engine_config(TREE, 2)) < num_graphs(engine.config)


@pytest.mark.parametrize("shape", ["plain", "tree"])
def test_texts_stay_the_same_as_rounds_change_between_both_kinds(shape):
    world, kinds = lora_world(), []
    with engine_of(world, SHAPES[shape], RecordingDevice(), max_loras=4, max_num_seqs=3) as engine:
        is_lean = engine.runner.graphs.is_lean
        engine.runner.graphs.is_lean = lambda plan: kinds.append(is_lean(plan)) or kinds[-1]

        def arrive(number):
            if number in (2, 12):
                add(engine, world, 1 + number % 3, 2, greedy_params(4), f"adapted {number}")

        add(engine, world, 0, 0)
        add(engine, world, 0, 1)
        tokens, _ = finish(engine, arrive)
        stats = engine.stats().graphs
    assert tokens.pop("0") == world.expected[0][0]
    assert tokens.pop("1") == world.expected[0][1]
    expected = {f"adapted {number}": world.expected[1 + number % 3][2][:4] for number in (2, 12)}
    assert tokens == {name: expected[name] for name in tokens}
    changes = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert changes[:3] == [True, False, True]
    assert not stats.eager_runs
