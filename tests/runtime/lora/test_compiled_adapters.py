"""Adapters in compiled decoder layers: the texts of eager ones, and what is loaded later compiles nothing."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

from tests.runtime.lora.test_adapters_lossless import add, engine_of, finish
from tests.runtime.lora_world import KINDS, NUM_TOKENS, LoraWorld
from tests.runtime.recorded_graphs import RepeatingDevice
from tests.runtime.verifier.test_compiled import CountingBackend, Steps
from wingbeat.kernels.layer import reference
from wingbeat.kernels.lora.stacked_adapters import AdapterRows
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.engine import assembly
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.lora.adapted import ModelAdapters
from wingbeat.runtime.lora.adapter import LinearAdapter
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.compiled import CompiledLayers
from wingbeat.runtime.verifier.layers.fused import LayerOps

# Few shapes: each is compiled.
LIMITS = {"max_num_seqs": 3, "cuda_graphs": "decode_only", "compile": True}
SHAPE = SpeculationConfig(draft_steps=2, draft_top_k=2, verify_tree_size=4)
KINDS_HERE = {"all": KINDS["all"], "patterned": KINDS["patterned"], "later": KINDS["attention"]}


class CompiledRounds(RepeatingDevice):
    """What it captures runs compiled whenever it is replayed, and nothing else does."""

    layers: CompiledLayers

    def replay(self, graph) -> None:
        with self.layers:
            super().replay(graph)


@contextmanager
def compiled_engine(world, monkeypatch, backend):
    """An engine whose captured rounds run compiled layers, whatever they take."""
    device = CompiledRounds()

    def faster_layers(loaded, steps, measure):
        device.layers = CompiledLayers(loaded, backend)
        with device.layers:
            for step in steps:
                step()
        return device.layers

    torch._dynamo.reset()
    monkeypatch.setattr(assembly, "faster_layers", faster_layers)
    with engine_of(world, SHAPE, device, **LIMITS) as engine:
        yield engine


@pytest.fixture(scope="module")
def world():
    """Layers as on GPUs, which join their products where they are not compiled."""
    ops = LayerOps(reference.add_rms_norm, reference.rotate_and_store, reference.silu_mul)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wingbeat.runtime.verifier.layers.fused.OPS", {"cpu": ops})
        yield LoraWorld("llama", max_loras=2, kinds=KINDS_HERE)


def seeded(number: int) -> SamplingParams:
    """Greedy and drawn ones take turns."""
    return SamplingParams(NUM_TOKENS, temperature=0.8 if number % 2 else 0.0, seed=number, ignore_eos=True)


def texts(engine, world, asked):
    """Of requests for (adapter, prompt), all at once."""
    for number, (which, index) in enumerate(asked):
        add(engine, world, which, index, seeded(number), name=str(number))
    tokens, _ = finish(engine)
    return [tokens[str(number)] for number in range(len(asked))]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["counted", "aot_eager", "inductor"])
def test_compiled_rounds_write_the_texts_of_eager_ones_and_adapters_that_come_and_go_compile_nothing(
    world, monkeypatch, backend
):
    counting = CountingBackend()
    mixed = [(number % 3, number // 2) for number in range(6)]
    later = [(2, 0), (3, 0), (3, 1), (0, 1), (3, 2), (2, 2)]
    with engine_of(world, SHAPE, on_host=False, max_num_seqs=3) as plain:
        expected = [texts(plain, world, asked) for asked in (mixed, later)]
    resident = world.loaded.parts["adapters"].resident
    for adapter in world.adapters[1:]:
        resident.unload(adapter.digest)
    with compiled_engine(world, monkeypatch, counting if backend == "counted" else backend) as engine:
        num_graphs = counting.num_graphs
        assert texts(engine, world, mixed) == expected[0]
        resident.unload(world.adapters[1].digest)
        assert texts(engine, world, later) == expected[1]
        assert not engine.runner.graphs.stats.failed
        replays = engine.runner.graphs.stats.replays
        assert replays[Stage.BASE_VERIFICATION] > 0
    for asked, found in zip((mixed, later), expected, strict=True):
        assert found[::2] == [world.expected[which][index] for which, index in asked[::2]]
    if backend == "counted":
        assert counting.num_graphs == num_graphs > 0
        assert counting.num_runs > 100


def test_what_is_measured_has_the_adapters_of_a_captured_round(world, monkeypatch):
    """Without them another variant would be compiled and timed than the one that is captured."""
    seen = []

    def faster_layers(loaded, steps, measure):
        table = loaded.model.get_input_embeddings()
        hook = table.register_forward_pre_hook(lambda module, args: seen.append(loaded.parts["adapters"].rows))
        for step in steps:
            step()
        hook.remove()
        return nullcontext()

    monkeypatch.setattr(assembly, "faster_layers", faster_layers)
    with engine_of(world, SHAPE, RepeatingDevice(), **LIMITS):
        pass
    assert [len(rows.ids) for rows in seen] == [1, SHAPE.num_nodes]
    assert all(rows.tiles is not None and not rows.ids.any() for rows in seen)


@pytest.mark.gpu
def test_compiled_layers_with_adapters_agree_with_eager_ones_on_a_gpu():
    steps = Steps(device="cuda")
    adapters = ModelAdapters(steps.loaded.model, steps.loaded.decoder_layers, 2, 8)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    for path, shape in adapters.linears.items():
        adapters.put(2, path, LinearAdapter(draw(5, shape.inputs) * 0.1, draw(shape.outputs, 5) * 0.1))
    adapters.rows = adapters.rows_of(torch.tensor([0, 2, 2, 1, 0, 0, 1, 2], device="cuda"), on_host=False)
    batch = steps.batch(2, 4)
    batch = batch._replace(columns={AdapterRows: adapters.rows})
    with torch.inference_mode():
        expected = steps.model(batch)
        with CompiledLayers(steps.loaded):
            torch.testing.assert_close(steps.model(batch), expected, atol=1e-3, rtol=1e-3)
        plain = steps.model(steps.batch(2, 4))
    assert (plain.logits - expected.logits).abs().max() > 0.1
