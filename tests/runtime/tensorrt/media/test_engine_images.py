"""Images and sounds over an engine: their encoder is an engine of its own, and texts are those of generate()."""

import copy

import pytest
import torch

from tests.near_ties import check_same_drafts
from tests.runtime.media.media_world import ShownRun, medium, shown
from tests.runtime.media.test_drafter_sees import GRIDS, Dense, by_place, check, check_first, head_for, watched
from tests.runtime.models import CHAIN, TREE, engine_config, greedy_params, new_engine
from tests.runtime.one_pass.one_pass_drafts import load
from tests.runtime.one_pass.one_pass_world import random_tensors, raw_config
from tests.runtime.tensorrt.engine_world import LIMITS, base_config, draft_config, draft_session, torch_pair
from tests.runtime.tensorrt.media.drafts_watched import drafts_within
from tests.runtime.tensorrt.media.images_world import SOUNDS, images_of, with_images
from tests.runtime.watchers import FailingEnd, Rig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.heads.eagle1 import Eagle1Head, Eagle1HeadConfig
from wingbeat.runtime.heads.layer import DecoderHead
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.one_pass_drafter import OnePassDrafter
from wingbeat.runtime.tensorrt.block_drafter import BlockDrafter
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter

MODELS = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "qwen2_vl", "llava_siglip", *SOUNDS)
SHAPES = {"tree": TREE, "chain": CHAIN, "plain": None}
NUM_TOKENS = 20


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(1)
def test_text_behind_images_is_that_of_generate(name, shape):
    ref, speculation = shown(name), SHAPES[shape] or TREE
    limits = engine_config(speculation, max_num_seqs=3, num_kv_blocks=None, block_size=4)
    engine, session, _ = torch_pair(
        ref.loaded, speculation, limits, SHAPES[shape] is not None, extend=with_images(name)
    )
    texts = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS)).finish()
    assert texts == [more[:NUM_TOKENS] for more in ref.continuations]
    again = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS)).finish()
    assert again == texts
    assert engine.block_manager.hit_tokens > 0
    assert engine.loaded.reader.encoder.figures.num_encoded == len({one.digest for held in ref.media for one in held})
    assert "multimodal_embeddings" in session.inputs


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_encoders_graph_makes_the_models_own_features(name):
    ref = shown(name)
    part = images_of(name)
    media = [one for held in ref.media for one in held]
    own, found = ref.loaded.reader.encoder.features(media), part.encoder.features(media)
    assert own.keys() == found.keys()
    for digest, features in own.items():
        torch.testing.assert_close(found[digest].embeddings, features.embeddings, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(found[digest].deep, features.deep, atol=2e-5, rtol=2e-5)


def check_text(name, engine):
    """Behind the prompts of a model it is that of generate()."""
    ref = shown(name)
    texts = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS)).finish()
    assert texts == [more[:NUM_TOKENS] for more in ref.continuations]


def by_engines(name, head, shape, **fields):
    """Trees of engines, by sequence and length."""
    limits = engine_config(shape, **{"max_num_seqs": 3, "num_kv_blocks": None} | fields)
    drafter_kind = BlockDrafter if isinstance(head, OnePassHead) else EngineDrafter
    with drafts_within(drafter_kind, shown(name)) as drafts:
        check_text(
            name, torch_pair(shown(name).loaded, shape, limits, head=copy.deepcopy(head), extend=with_images(name))[0]
        )
    return drafts


def by_torch(name, head, shape, kind=EagleDrafter, **fields):
    """Trees of the torch drafter, by sequence and length."""
    limits = engine_config(shape, **{"max_num_seqs": 3} | fields)
    engine = new_engine(shown(name).loaded, limits, kind(copy.deepcopy(head), shape))
    try:
        drafts = watched(engine)
        check_text(name, engine)
    finally:
        engine.model.remove_taps()
    return by_place(drafts)


def check_same(found, expected):
    """At the lengths that both draft behind: their rounds begin at other ones."""
    check_same_drafts(found, expected, at_least=NUM_TOKENS + 1)


def eagle1_for(name: str) -> DecoderHead:
    """An EAGLE-1 head that reads what this model embeds."""
    loaded = shown(name).loaded
    torch.manual_seed(3)
    fields = {"mrope_section": (4, 2, 2), "mrope_interleaved": GRIDS[name]} if name in GRIDS else {}
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocab = {"vocab_size": loaded.vocab_size, "draft_vocab_size": loaded.vocab_size}
    head = Eagle1Head(Eagle1HeadConfig(**sizes, **vocab, head_dim=16, target_hidden_size=64, tap_layers=(4,), **fields))
    # The inputs of its layer have no norm: from larger weights, one bit of a weight moves scores by more than GAP.
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    torch.nn.init.normal_(head.qkv_proj.weight, std=0.15)
    return head.eval().requires_grad_(False)


HEADS = {
    "eagle3": head_for,
    "one axis": lambda name: head_for(name, mrope_section=()),
    "blind": lambda name: head_for(name, embeds_media=False),
    "two layers": lambda name: head_for(name, num_layers=2, norm_output=True),
    "eagle1": eagle1_for,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava", "qwen2_audio"])
def test_drafts_behind_images_are_those_of_a_dense_pass(name):
    head = head_for(name)
    drafts = by_engines(name, head, CHAIN, max_num_batched_tokens=17)
    check(drafts, Dense(head, name), 3 * NUM_TOKENS + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "qwen2_audio"])
@pytest.mark.parametrize("kind", HEADS)
def test_trees_behind_images_are_those_of_the_torch_drafter(kind, name):
    head = HEADS[kind](name)
    config = draft_config(head, base_config(shown(name).loaded, head.tap_layers).encoder)
    assert config.num_axes == (3 if name in GRIDS and kind != "one axis" else 0)
    assert config.media_width == (0 if kind == "blind" else 64)
    check_same(by_engines(name, head, TREE, block_size=4), by_torch(name, head, TREE, block_size=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_blocks_behind_images_are_those_of_the_torch_drafter(name, tmp_path):
    """Such heads read no embeddings, and turn by the axis of time, moved by what images take of it."""
    raw = raw_config("dflash2", (0, 1, 2), 2, block_size=7)
    head = load(tmp_path, raw, random_tensors(raw))
    check_same(by_engines(name, head, TREE), by_torch(name, head, TREE, OnePassDrafter))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava"])
@pytest.mark.few(1)
def test_a_draft_engine_that_comes_later_sees_the_images_again(name):
    """Prompts are replayed in pieces that begin and end within images."""
    ref, head = shown(name), head_for(name)
    config = draft_config(head, base_config(ref.loaded, head.tap_layers).encoder)

    def drafter() -> EngineDrafter:
        return EngineDrafter(draft_session(head, config), config, head.draft_token_ids, TREE)

    rig = Rig(ref, drafter(), lambda end: FailingEnd(end, "wait", 2, False), max_num_batched_tokens=13)
    try:
        run = ShownRun(rig.engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
        while rig.engine.drafter_state == "attached":
            rig.step(run)
        rig.replace(drafter())
        drafts = watched(rig.engine)
        rig.finish(run)
    finally:
        rig.engine.model.remove_taps()
    assert rig.engine.stats().num_replayed_tokens > 0
    assert len(drafts) > NUM_TOKENS
    check_first(by_place(drafts), Dense(head, name), NUM_TOKENS // 2)


def test_an_image_larger_than_the_engine_takes_is_refused():
    ref = shown("qwen2_5_vl")
    part = images_of("qwen2_5_vl", LIMITS.model_copy(update={"max_image_tokens": 5}))
    with pytest.raises(ValueError, match="image of 6 tokens: the engine was built with max_image_tokens 5"):
        part.encoder.check(medium(ref.loaded.model, 1, 0, (2, 3)))
    part.encoder.check(medium(ref.loaded.model, 1, 0, (2, 2)))


@pytest.mark.slow
def test_without_its_encoder_a_model_of_sound_serves_text_alone():
    ref = shown("qwen2_audio")
    limits = engine_config(TREE, max_num_seqs=3, num_kv_blocks=None)
    engine, _, _ = torch_pair(ref.loaded, TREE, limits)
    assert not base_config(ref.loaded, ()).is_vlm
    texts = [index for index, held in enumerate(ref.media) if not held]
    prompts, media = [ref.prompts[index] for index in texts], [ref.media[index] for index in texts]
    run = ShownRun(engine, prompts, media, greedy_params(NUM_TOKENS))
    assert run.finish() == [ref.continuations[index][:NUM_TOKENS] for index in texts]
    with pytest.raises(ValueError, match="audio cannot be used: the model does not accept this kind"):
        ShownRun(engine, ref.prompts[:1], ref.media[:1], greedy_params(4))
