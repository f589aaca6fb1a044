"""Images over an engine: the vision encoder is an engine of its own, and texts are those of generate()."""

import pytest
import torch

from tests.runtime.media_world import ShownRun, medium, shown
from tests.runtime.models import CHAIN, TREE, engine_config, greedy_params
from tests.runtime.tensorrt.engine_world import LIMITS, base_config, media_of, torch_pair

MODELS = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "qwen2_vl", "llava_siglip")
SHAPES = {"tree": TREE, "chain": CHAIN, "plain": None}
NUM_TOKENS = 20


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(4)
def test_text_behind_images_is_that_of_generate(name, shape):
    ref, speculation = shown(name), SHAPES[shape] or TREE
    limits = engine_config(speculation, max_num_seqs=3, num_kv_blocks=None, block_size=4)
    engine, session, _ = torch_pair(ref.loaded, speculation, limits, SHAPES[shape] is not None)
    texts = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS)).finish()
    assert texts == [more[:NUM_TOKENS] for more in ref.continuations]
    again = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS)).finish()
    assert again == texts
    assert engine.block_manager.hit_tokens > 0
    assert engine.loaded.media.encoder.figures.num_encoded == len({one.digest for held in ref.media for one in held})
    assert "multimodal_embeddings" in session.inputs


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_encoders_graph_makes_the_models_own_features(name):
    ref = shown(name)
    part = media_of(ref.loaded, base_config(ref.loaded, ()))
    media = [one for held in ref.media for one in held]
    own, found = ref.loaded.media.encoder.features(media), part.encoder.features(media)
    assert own.keys() == found.keys()
    for digest, features in own.items():
        torch.testing.assert_close(found[digest].embeddings, features.embeddings, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(found[digest].deep, features.deep, atol=2e-5, rtol=2e-5)


def test_an_image_larger_than_the_engine_takes_is_refused():
    ref = shown("qwen2_5_vl")
    config = base_config(ref.loaded, (), LIMITS.model_copy(update={"max_image_tokens": 5}))
    part = media_of(ref.loaded, config)
    with pytest.raises(ValueError, match="image of 6 tokens: the engine was built with max_image_tokens 5"):
        part.encoder.check(medium(ref.loaded.model, 1, 0, (2, 3)))
    part.encoder.check(medium(ref.loaded.model, 1, 0, (2, 2)))


def test_a_model_of_sound_serves_text_alone():
    ref = shown("qwen2_audio")
    limits = engine_config(TREE, max_num_seqs=3, num_kv_blocks=None)
    engine, _, _ = torch_pair(ref.loaded, TREE, limits)
    assert not base_config(ref.loaded, ()).is_vlm
    texts = [index for index, held in enumerate(ref.media) if not held]
    prompts, media = [ref.prompts[index] for index in texts], [ref.media[index] for index in texts]
    run = ShownRun(engine, prompts, media, greedy_params(NUM_TOKENS))
    assert run.finish() == [ref.continuations[index][:NUM_TOKENS] for index in texts]
    with pytest.raises(ValueError, match="audio cannot be used: the model takes none"):
        ShownRun(engine, ref.prompts[:1], ref.media[:1], greedy_params(4))
