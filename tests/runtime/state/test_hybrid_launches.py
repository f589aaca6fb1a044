"""Rounds of hybrids on a GPU of shapes: the host waits for nothing."""

import pytest

pytest.importorskip("triton")

from tests.runtime.fake_gpu import fake_gpu, why_not
from tests.runtime.gpu_world import GREEDY, TREE, VOCAB_SIZE, engine_config, placed_verifier, serve
from tests.runtime.hybrids import needs_states, of_layers
from tests.runtime.scripted import ScriptedDrafter, right_tree

pytestmark = needs_states


@pytest.fixture
def gpu():
    if (reason := why_not()) is not None:
        pytest.skip(f"no fake GPU: {reason}")
    with fake_gpu() as gpu:
        yield gpu


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "falcon_h1", "qwen3_next", "bamba", "nemotron_h", "jamba"])
def test_no_captured_round_waits_for_the_device(gpu, name):
    """Requests come and go; in strict rounds every wait is an error at its line."""
    drafter = ScriptedDrafter([], right_tree, VOCAB_SIZE)
    served = serve(
        gpu,
        engine_config(TREE, 2),
        drafter,
        [GREEDY],
        loaded=placed_verifier(of_layers(name, [0, 2 if name == "nemotron_h" else 1])),
    )
    assert any(launches["graph"] for launches in served.launches)
    assert served.engine.stats().graphs.failed == []
