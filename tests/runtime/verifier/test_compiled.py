"""Compiled decoder layers: the same results, one compilation per class and shape, kept only where faster."""

import logging

import pytest
import torch

from tests.runtime.models import prepare_model, random_model
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice
from wingbeat.runtime.round.rows import Rows, Segment
from wingbeat.runtime.verifier.compiled import CompiledLayers, _faster, faster_layers, replay_ms
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.model import VerifierModel

BLOCK_SIZE = 16


class CountingBackend:
    """Runs graphs as they are; counts them and their runs."""

    def __init__(self) -> None:
        self.num_graphs = self.num_runs = 0

    def __call__(self, graph, example_inputs):
        self.num_graphs += 1

        def run(*inputs):
            self.num_runs += 1
            return graph.forward(*inputs)

        return run


class Steps:
    """Forward passes of a small model by shape."""

    def __init__(self, num_layers: int = 2, device: str = "cpu") -> None:
        self.loaded = prepare_model(random_model("llama", num_hidden_layers=num_layers).to(device), "llama")
        self.model = VerifierModel(self.loaded, (1,))
        self.caches = [
            tuple(torch.zeros(9, BLOCK_SIZE, layer.num_kv_heads, dim, device=device) for dim in (16, 16))
            for layer in self.loaded.layers
        ]

    def batch(self, num_reqs: int, num_nodes: int) -> Rows:
        device = self.loaded.device
        positions = torch.arange(num_nodes, device=device).expand(num_reqs, -1)
        tables = torch.arange(1, num_reqs + 1, device=device)[:, None]
        context = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        segment = Segment.of(0, positions, context, None, tables)
        slot_mapping = (tables * BLOCK_SIZE + positions).flatten()
        token_ids = (torch.arange(num_reqs * num_nodes, device=device) * 7 % 90)[None]
        return Rows(token_ids, positions.reshape(1, -1), slot_mapping, [segment], self.caches)

    def step(self, *shape: int):
        batch = self.batch(*shape)

        @torch.inference_mode()
        def run():
            return self.model(batch)

        return run


@pytest.mark.slow
def test_compiled_layers_compute_the_same_with_one_compilation_for_all_layers():
    counts = []
    for num_layers in (2, 4):
        torch._dynamo.reset()
        backend, steps = CountingBackend(), Steps(num_layers)
        compiled = CompiledLayers(steps.loaded, backend)
        for shape in ((1, 1), (2, 4)):
            run = steps.step(*shape)
            expected = run()
            with compiled:
                torch.testing.assert_close(run(), expected)
                once = backend.num_graphs
                run()
            assert backend.num_graphs == once
        counts.append(backend.num_graphs)
    assert counts[0] == counts[1] > 0


def test_layers_are_as_they_were_after_the_context():
    backend, steps = CountingBackend(), Steps()
    with CompiledLayers(steps.loaded, backend):
        pass
    steps.step(1, 3)()
    assert backend.num_graphs == 0
    assert steps.loaded.model.config._attn_implementation == ATTENTION_NAME
    assert all("forward" not in vars(layer) for layer in steps.loaded.decoder_layers)


@pytest.mark.parametrize(("eager_ms", "compiled_ms", "kept"), [(2.0, 1.0, True), (1.0, 2.0, False), (1.0, 1.0, False)])
def test_the_faster_one_is_kept(eager_ms, compiled_ms, kept, caplog):
    steps = Steps()
    compiled = CompiledLayers(steps.loaded, CountingBackend())

    def measure(step):
        return compiled_ms if "forward" in vars(steps.loaded.decoder_layers[0]) else eager_ms

    with caplog.at_level(logging.INFO):
        chosen = _faster(compiled, [steps.step(1, 1), steps.step(2, 4)], measure)
    assert (chosen is compiled) == kept
    assert f"eager {eager_ms:.3f}/{eager_ms:.3f} ms, compiled {compiled_ms:.3f}/{compiled_ms:.3f} ms" in caplog.text


@pytest.mark.slow
def test_a_failing_compiler_costs_a_warning(caplog):
    def broken(graph, example_inputs):
        raise RuntimeError("no compiler here")

    steps = Steps()
    compiled = CompiledLayers(steps.loaded, broken)

    def measure(step):
        step()
        return 1.0

    chosen = _faster(compiled, [steps.step(1, 2)], measure)
    assert chosen is not compiled
    assert "torch.compile failed" in caplog.text
    assert "no compiler here" in caplog.text
    assert all("forward" not in vars(layer) for layer in steps.loaded.decoder_layers)


def test_the_cpu_never_compiles():
    steps = Steps()

    def measure(step):
        raise AssertionError("measured")

    assert not isinstance(faster_layers(steps.loaded, [steps.step(1, 1)], measure), CompiledLayers)


@pytest.mark.gpu
def test_compiled_layers_agree_with_eager_ones_in_a_cuda_graph():
    steps = Steps(device="cuda")
    step = steps.step(2, 4)
    expected = step()
    with CompiledLayers(steps.loaded):
        torch.testing.assert_close(step(), expected, atol=1e-3, rtol=1e-3)
    graphs = CudaGraphDevice(torch.device("cuda", 0))
    with faster_layers(steps.loaded, [step], lambda step: replay_ms(step, graphs, repeats=3)):
        torch.testing.assert_close(step(), expected, atol=1e-3, rtol=1e-3)
