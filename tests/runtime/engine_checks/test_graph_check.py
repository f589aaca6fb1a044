"""Captured rounds are compared with eager rounds before the first request is served."""

from typing import Any

import pytest
import torch

from tests.needs import needs
from tests.runtime.models import random_model
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.engine_checks import graph_check
from wingbeat.runtime.engine_checks.bounded_step import StepTimeout, bounded_step
from wingbeat.runtime.engine_checks.graph_check import check_graphs
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.loading.loader import load_model

PROMPT = Request("a", (5, 6, 7), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))


class WrongDevice(RecordingDevice):
    """Replays that do nothing, so that outputs stay as the capture left them."""

    def replay(self, graph: Any) -> None:
        return


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    random_model("llama", num_hidden_layers=1).save_pretrained(folder)
    return folder


def engine_on(folder, device: RecordingDevice | None) -> Engine:
    loaded = load_model(folder, torch.float32, torch.device("cpu"))
    limits = EngineConfig(max_num_seqs=2, max_model_len=128, max_num_batched_tokens=64)
    return Engine(loaded, limits, graph_device=device)


def written(engine: Engine) -> list[int]:
    engine.add_request(PROMPT)
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.token_ids
    return tokens


@pytest.mark.slow
def test_graphs_that_write_what_eager_rounds_write_are_replayed(folder):
    engine = engine_on(folder, RecordingDevice())
    assert check_graphs(engine, None) is None
    assert not engine.runner.graphs.stats.replays
    expected = written(engine_on(folder, None))
    assert written(engine) == expected
    assert engine.runner.graphs.stats.replays[Stage.BASE_DECODING] > 0


def test_graphs_that_write_something_else_are_not_replayed_and_it_is_said(folder, caplog):
    engine = engine_on(folder, WrongDevice())
    line = check_graphs(engine, None)
    assert "no graph is replayed" in line
    assert line in caplog.text
    assert written(engine) == written(engine_on(folder, None))
    assert not engine.runner.graphs.stats.replays
    assert engine.runner.graphs.stats.eager_runs[Stage.BASE_DECODING] > 0
    engine.check_integrity()


@needs("prompt_graphs")
@pytest.mark.slow
def test_mixed_rounds_are_held_against_eager_ones_too(folder):
    """Only the graph of rounds with prompt chunks beside decodes replays wrongly."""

    class WrongChunks(RecordingDevice):
        def replay(self, graph: Any) -> None:
            mixed = engine.runner.graphs.prompts.mixed.values()
            if not any(captured.graph is graph for runner in mixed for captured in runner._graphs.values()):
                super().replay(graph)

    engine = engine_on(folder, WrongChunks())
    assert "no graph is replayed" in check_graphs(engine, None)


def test_nothing_is_asked_where_nothing_is_captured(folder):
    assert check_graphs(engine_on(folder, None), None) is None


def test_a_replay_that_hangs_is_told_with_what_to_switch_off(folder, monkeypatch, hang):
    class HangingDevice(RecordingDevice):
        def replay(self, graph: Any) -> None:
            hang()

    monkeypatch.setattr(graph_check, "LIMIT_S", 0.5)
    with pytest.raises(StepTimeout, match=r"replaying CUDA graphs takes longer than .*--no-cuda-graphs"):
        check_graphs(engine_on(folder, HangingDevice()), None)


def test_a_step_that_raises_raises_here():
    with pytest.raises(ZeroDivisionError):
        bounded_step("dividing", 10, "", lambda: 1 / 0)
