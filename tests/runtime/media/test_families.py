"""Media families: number of tokens of an image, positions of their rotation, and models whose images are served."""

import numpy as np
import pytest
import torch
from transformers import Gemma4Config, LlavaConfig, PixtralVisionConfig

from tests.runtime.media.media_world import CONFIGS, MORE, PLACEHOLDER, medium, random_model, shown, with_media
from tests.test_docs import text_of
from wingbeat.runtime.media.encoder import MOST_AT_ONCE
from wingbeat.runtime.media.families import FAMILIES, MediaNotServed, family_of
from wingbeat.runtime.media.media_input import SERVED
from wingbeat.runtime.media.positions import rotations
from wingbeat.runtime.verifier.layers.kept_logits import keep_logits
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.mark.few(2)
@pytest.mark.parametrize("grids", [[(2, 3)], [(4, 2), (1, 5)], [(3, 3), (5, 1), (2, 2)]])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(name, grids):
    model = shown(name).loaded.model
    places = {3 * index + index * index: (index, grid) for index, grid in enumerate(grids)}
    prompt, images = with_media(model, list(range(20)), places)
    token_ids = torch.tensor([prompt])
    expected, delta = model.model.get_rope_index(
        token_ids,
        mm_token_type_ids=(token_ids == PLACEHOLDER).long(),
        image_grid_thw=torch.from_numpy(np.concatenate([one.arrays["image_grid_thw"] for one in images])),
    )
    whole = rotations(images, 0, len(prompt))
    assert whole.tolist() == expected[:, 0].tolist()
    assert sum(one.shift for one in images) == int(delta)
    for begin in range(0, len(prompt), 5):
        end = min(begin + 7, len(prompt) + 3)
        part = rotations(images, begin, end)
        assert part[:, : len(prompt) - begin].tolist() == whole[:, begin:end].tolist()
    assert (
        rotations(images, len(prompt), len(prompt) + 2).tolist() == [[len(prompt) + int(delta) + i for i in (0, 1)]] * 3
    )


OTHERS = {
    "model_type gemma4": Gemma4Config,
    "vision tower pixtral": lambda: LlavaConfig(vision_config=PixtralVisionConfig()),
    "outside of 97 tokens": lambda: CONFIGS["llava"](97, 97),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_other_families_are_refused_by_name(reason):
    with pytest.raises(MediaNotServed, match=reason):
        family_of(OTHERS[reason](), "image")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MORE)
def test_the_other_families_pass_the_trial(name):
    assert [*prepare_model(random_model(name), name).takes.values()] == [SERVED]


def test_a_model_whose_images_come_out_otherwise_is_served_for_text(monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen2_5_vl", FAMILIES["llava"])
    loaded = prepare_model(random_model("qwen2_5_vl"), "wrong")
    assert loaded.reader is None
    assert "images are not served" in loaded.takes["image"]


def test_the_encoder_makes_as_many_embeddings_as_there_are_tokens_once_for_each_image():
    encoder = shown("qwen3_vl").loaded.reader.encoder
    model = shown("qwen3_vl").loaded.model
    encoder.forget()
    images = [medium(model, seed, 0, grid) for seed, grid in ((1, (2, 3)), (2, (4, 2)), (1, (2, 3)))]
    found = encoder.features(images)
    assert [len(found[one.digest].embeddings) for one in images] == [6, 8, 6]
    assert [len(part) for part in found[images[0].digest].deep] == [6, 6]
    encoder.features(images[:1])
    assert (encoder.figures.num_encoded, encoder.figures.num_hits) == (2, 1)
    assert encoder.figures.num_bytes == sum(one.num_bytes for one in found.values())


@pytest.mark.slow
def test_an_encoder_forgets_what_it_was_asked_for_longest_ago():
    encoder = shown("llava").loaded.reader.encoder
    model, before = shown("llava").loaded.model, encoder.max_bytes
    encoder.forget()
    images = [medium(model, seed, 0) for seed in range(3)]
    size = encoder.features(images[:1])[images[0].digest].num_bytes
    encoder.max_bytes = 2 * size
    try:
        for one in (images[1], images[0], images[2], images[0]):
            encoder.features([one])
        assert encoder.figures.num_bytes == 2 * size
        encoder.features([images[1]])
        assert (encoder.figures.num_encoded, encoder.figures.num_hits) == (4, 2)
        encoder.max_bytes = size // 2
        assert encoder.features([images[2]])[images[2].digest].num_bytes == size
        assert encoder.figures.num_bytes == 0
    finally:
        encoder.max_bytes = before
        encoder.forget()


def test_embeddings_of_another_number_than_tokens_are_an_error():
    encoder, model = shown("llava").loaded.reader.encoder, shown("llava").loaded.model
    with pytest.raises(ValueError, match="image of 5 tokens, and the encoder made 16"):
        encoder.features([medium(model, 9, 0)._replace(length=5)])


@pytest.mark.parametrize(
    ("name", "frames", "tokens"), [("qwen2_audio", 40, 10), ("qwen2_audio", 3, 1), ("glmasr", 61, 7)]
)
def test_a_sound_has_a_token_for_as_many_frames_as_the_encoder_pools(name, frames, tokens):
    config, family = random_model(name).config, FAMILIES[name]
    windows = -(-frames // 48)
    mask = (np.arange(windows * 48) < frames).reshape(windows, 48).astype(int)
    assert family.num_tokens(config, {family.inputs[1]: mask}) == tokens


def test_audio_of_other_families_is_refused_by_name():
    with pytest.raises(MediaNotServed, match="audio is not served with model_type gemma4, but with qwen2_audio"):
        family_of(Gemma4Config(), "audio")
    with pytest.raises(MediaNotServed, match="images are not served with model_type qwen2_audio"):
        family_of(random_model("qwen2_audio").config, "image")


def test_a_model_whose_forward_takes_no_rows_gives_logits_of_those_that_are_asked_for():
    """Qwen2-Audio's."""
    model = random_model("qwen2_audio").eval()
    token_ids = torch.arange(12)[None]
    whole = model(token_ids).logits
    keep_logits(model)
    assert torch.equal(model(token_ids).logits, whole)
    assert torch.allclose(model(token_ids, logits_to_keep=1).logits, whole[:, -1:], atol=1e-5)
    rows = torch.tensor([2, 7])
    assert torch.allclose(model(token_ids, logits_to_keep=rows).logits, whole[:, rows], atol=1e-5)


def test_the_documents_number_of_images_at_once_is_that_of_the_code():
    assert f"images of a round together, at most {MOST_AT_ONCE} at once" in text_of("models.md")
