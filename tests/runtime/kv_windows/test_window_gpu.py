"""Rounds of layers that keep their windows alone are captured, and the host waits for none of them."""

import pytest
from transformers import Gemma3TextConfig, GptOssConfig

pytest.importorskip("triton")

from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import (
    CHAIN,
    GREEDY,
    IDS,
    PLAIN,
    SAMPLED,
    SHAPE,
    TREE,
    engine_config,
    new_drafter,
    placed_verifier,
    serve,
)
from tests.runtime.kv_windows.window_world import windowed
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.kv_windows.windowed_cache import WindowedCache

LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
CONFIGS = {
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, **IDS, **LAYERS, tie_word_embeddings=False),
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE, **IDS, **LAYERS, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["none", "eagle-3"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_rounds_are_captured_without_a_wait(gpu, name, kind, shape):
    drafter = None if kind == "none" else new_drafter(kind, shape, FakeGraphDevice(gpu))
    with windowed(placed_verifier(CONFIGS[name]())) as loaded:
        config = engine_config(shape, 3, num_kv_blocks=80, num_window_blocks=40)
        served = serve(gpu, config, drafter, [GREEDY, SAMPLED, PLAIN], loaded=loaded)
    assert isinstance(served.engine.cache, WindowedCache)
    stats = served.engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.BASE_DECODING if kind == "none" else Stage.BASE_VERIFICATION]
    served.engine.check_integrity()
