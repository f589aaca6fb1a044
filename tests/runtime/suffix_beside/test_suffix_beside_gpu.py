"""Earlier text beside a drafter on a GPU of shapes: captured rounds verify it, and the host waits for tokens alone."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, why_not
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import CHAIN, GREEDY, SAMPLED, TREE, engine_config, new_drafter, serve
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.suffix_beside import suffix_beside


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_captured_rounds_verify_trees_of_text(monkeypatch, shape):
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    monkeypatch.setattr(suffix_beside, "FIRST_ROUNDS", 0)
    made, launched = [], suffix_beside.SuffixBeside.launched

    def noted(beside, flight):
        made.extend(flight.by_text)
        launched(beside, flight)

    monkeypatch.setattr(suffix_beside.SuffixBeside, "launched", noted)
    with fake_gpu() as gpu:
        drafter = new_drafter("eagle-3", shape, FakeGraphDevice(gpu))
        served = serve(
            gpu, engine_config(shape, 3, suffix_beside=True), drafter, [replace(GREEDY, max_tokens=24), SAMPLED]
        )
    stats = served.engine.runner.graphs.stats
    assert stats.failed == []
    assert not served.engine.overlap
    assert stats.replays[Stage.BASE_VERIFICATION]
    assert served.engine.drafter_state == "attached"
    # On shapes alone every token is the same one, which the text's own automaton has seen.
    assert sum(made) > 2
