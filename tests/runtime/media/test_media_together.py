"""Images beside recurrent states: the text is what transformers writes with both."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runtime.hybrids import MTP_NORMS, needs_states
from tests.runtime.lossless_table import drafter_of
from tests.runtime.media.media_world import HYBRIDS, NUM_TOKENS, ShownRun, dense_taps, random_model, shown
from tests.runtime.models import CHAIN, TREE, engine_config, greedy_params, new_engine
from tests.runtime.watchers import TAPS, ContextDrafter, FailingEnd, Rig
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.verifier.loading.loader import load_model

pytestmark = needs_states
ROOMS = {
    "roomy": {},
    "tight": {"max_model_len": 116, "num_kv_blocks": 40, "max_num_batched_tokens": 24, "num_saved_states": 3},
    "trickle": {"max_num_batched_tokens": 17},
    "no cache": {"enable_prefix_caching": False},
}


def config_of(name, speculation=TREE, **limits):
    """Limits under which states are kept at the end of every other block."""
    own = {"block_size": 4, "num_kv_blocks": 400} | ({"state_interval": 8} if name in HYBRIDS else {})
    limits = limits if name in HYBRIDS else {key: value for key, value in limits.items() if key != "num_saved_states"}
    return engine_config(speculation, **(own | limits))


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_served_with_images(name):
    ref = shown(name)
    assert ref.loaded.takes == {"image": "served"}
    assert ref.loaded.keeps_states
    assert sum(len(set(tokens)) for tokens in ref.continuations) > 4 * 6


@pytest.mark.few(1)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("kind", ["none", "right", "random", "eagle"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrids_text_behind_images_is_that_of_generate(name, kind, room):
    ref = shown(name)
    engine = new_engine(ref.loaded, config_of(name, TREE, **ROOMS[room]), drafter_of(kind, ref, TREE))
    try:
        run = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
        assert run.finish() == ref.continuations
    finally:
        engine.model.remove_taps()
    if kind == "right":
        assert engine.speculation.acceptance_length > 4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrids_prefix_with_the_same_images_is_found_and_its_text_stays(name):
    ref = shown(name)
    engine = new_engine(ref.loaded, config_of(name))
    for turn in range(2):
        run = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
        assert run.finish() == ref.continuations
        assert all((run.last[index].num_cached_tokens > 0) == (turn > 0) for index in range(len(ref.prompts)))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrids_lost_drafter_gets_true_taps_of_replayed_images(name):
    ref = shown(name)
    taps = dense_taps(ref, TAPS)
    rig = Rig(ref, ContextDrafter(ref, taps), lambda end: FailingEnd(end, "wait", 2, False), max_num_batched_tokens=64)
    try:
        run = ShownRun(rig.engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
        while rig.engine.drafter_state == "attached":
            rig.step(run)
        heir = ContextDrafter(ref, taps)
        rig.replace(heir)
        assert rig.finish(run) == ref.continuations
    finally:
        rig.engine.model.remove_taps()
    assert heir.num_checked > 0


def with_mtp_module(name, folder):
    """A checkpoint with an MTP module in Qwen's layout: a copy of its last layer behind a random fusion."""
    random_model(name).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = "model.language_model.layers.3."
    tensors |= {"mtp.layers.0." + key.removeprefix(last): one.clone() for key, one in tensors.items() if last in key}
    generator = torch.Generator().manual_seed(2)
    tensors |= {f"mtp.{key}.weight": torch.rand(64, generator=generator) for key in MTP_NORMS}
    tensors["mtp.fc.weight"] = 0.2 * torch.randn(64, 128, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrids_own_mtp_module_drafts_behind_images(name, tmp_path):
    with_mtp_module(name, tmp_path)
    ref, loaded = shown(name), load_model(tmp_path, torch.float32, torch.device("cpu"))
    drafter = load_drafter("mtp", TargetDescription.from_checkpoint(tmp_path), CHAIN)
    assert drafter.needs.embedding_width == loaded.hidden_size
    engine = new_engine(loaded, config_of(name, CHAIN), drafter)
    assert engine.channel_spec.num_axes == 3
    run = ShownRun(engine, ref.prompts, ref.media, greedy_params(NUM_TOKENS))
    assert run.finish() == ref.continuations
    assert engine.speculation.num_draft_tokens > 3 * engine.speculation.num_drafts > 0
