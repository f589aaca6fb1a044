"""A prefix whose layers store latents comes back from disk."""

from tests.runtime.latent_attention.test_latent_attention import model_of
from tests.runtime.models import greedy, random_prompts
from tests.runtime.prefix_world import Kept, prefix_of
from wingbeat.runtime.fused.layers import LayerOps
from wingbeat.runtime.latent_attention.kept import keep_latents
from wingbeat.runtime.verifier.loading.loader import prepare_model


def test_a_prefix_of_latents_comes_back_from_disk(monkeypatch, tmp_path):
    monkeypatch.setattr("wingbeat.runtime.fused.layers.OPS", {"cpu": LayerOps()})
    loaded = prepare_model(model_of("latent queries"), "deepseek_v3")
    keep_latents(loaded)
    (prompt,) = random_prompts((30,))
    expected, _ = greedy(model_of("latent queries"), [prompt], 8)
    first = Kept(loaded, tmp_path)
    first.save(prefix_of(prompt[:24]))
    assert first.engine.cache.num_bytes == first.engine.cache.num_blocks * 4 * 4 * sum(
        layer.kv_size for layer in loaded.layers
    )
    first.close()
    second = Kept(loaded, tmp_path)
    second.keeper.open()
    try:
        assert second.run([prompt], 8) == (expected, [24])
    finally:
        second.close()
