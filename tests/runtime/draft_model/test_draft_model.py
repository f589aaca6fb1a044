"""A draft model's trees are those of its full contexts in transformers' own code; through the engine it is lossless."""

from dataclasses import replace

import pytest
import torch

from tests.runtime.draft_model.checkpoints import save, words
from tests.runtime.draft_world import BLOCK_SIZE, MIXED, NUM_SLOTS, SHAPES, World, channel_spec
from tests.runtime.drafters.test_drafter_kinds import LLAMA, checkpoint
from tests.runtime.hybrids import hybrid, needs_states
from tests.runtime.models import (
    CHAIN,
    NUM_TOKENS,
    TREE,
    Run,
    engine_config,
    generate,
    greedy_params,
    random_model,
    reference,
)
from tests.runtime.slow_growth import assert_tree, slow_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.kernels.kv.reference import slot_mapping
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.draft_model.model_drafter import ModelDrafter, build_draft_model
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import kind_of, load_drafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.vocabulary import VocabularyError, check_same_vocabulary
from wingbeat.runtime.llm import connect
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

pytestmark = pytest.mark.few(1)

SMALL = {"num_hidden_layers": 2}


def small(name="llama", **overrides):
    return random_model(name, **(SMALL | overrides))


def gemma(**overrides):
    return random_model("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], **overrides)


def drafter_of(model, speculation):
    drafter = ModelDrafter(prepare_model(model, "draft"), speculation)
    spec = channel_spec(speculation, 0)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    return drafter


def dense(model, tokens):
    """`logits_of` for a sequence: each call runs all of it through transformers, without a cache."""
    model.set_attn_implementation("eager")
    return lambda path: model(torch.tensor([[*tokens, *path]])).logits[0, -1]


def check(tree, world, slots, model, speculation, max_levels=None):
    for row, slot in enumerate(slots):
        tokens = world.tokens[slot, : world.lens[slot]].tolist()
        temperature, seed = float(world.temperatures[slot]), int(world.seeds[slot])
        assert_tree(tree, row, slow_tree(tokens, dense(model, tokens), speculation, temperature, seed, max_levels))


@pytest.mark.parametrize("temperatures", [(0.0,) * NUM_SLOTS, MIXED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("make", [small, gemma], ids=["llama", "gemma3"])
@pytest.mark.parametrize("speculation", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_trees_equal_those_of_full_contexts(speculation, make, temperatures):
    """Unequal lengths, prompts in chunks; five drafted levels, three tokens accepted, five more."""
    drafter, judge = drafter_of(make(), speculation), make()
    world = World(speculation, 0, (2, 9, 17, 40), temperatures)
    world.feed(drafter)
    for slots, tree in world.drafted_twice(drafter):
        check(tree, world, slots, judge, speculation)


@torch.inference_mode()
def test_a_pass_may_hold_chunks_decodes_and_roots_of_different_sequences():
    drafter, judge = drafter_of(small(), TREE), small()
    world = World(TREE, 0, (9, 17, 33))
    begun, decoding, ending = world.slots
    lens = world.lens.tolist()
    drafter.draft(world.batch(chunks=[(slot, 0, lens[slot] - 3) for slot in (decoding, ending)]))
    batch = world.batch(
        decodes=[(ending, lens[ending] - 3, 2), (decoding, lens[decoding] - 3, 2)],
        chunks=[(begun, 0, lens[begun] - 1)],
        proposals=[begun, decoding],
        max_levels=2,
    )
    check(drafter.draft(batch), world, [begun, decoding], judge, TREE, max_levels=2)
    check(drafter.draft(world.batch(proposals=[ending])), world, [ending], judge, TREE)


@torch.inference_mode()
def test_a_shared_prefix_is_not_run_again():
    """Two prompts part at a block's end: the second one's chunk begins there, behind blocks the first one filled."""
    drafter, judge = drafter_of(small(), TREE), small()
    world = World(TREE, 0, (13, 14))
    first, second = world.slots
    world.tokens[second, :8] = world.tokens[first, :8]
    assert world.tokens[second, 8] != world.tokens[first, 8]
    world.tables[second, :2] = world.tables[first, :2]
    drafter.commit(world.batch(chunks=[(first, 0, 12)]))
    drafter.commit(world.batch(chunks=[(second, 8, 5)]))
    slots = [second, first]
    check(drafter.propose(world.batch(proposals=slots)), world, slots, judge, TREE)


@torch.inference_mode()
def test_proposing_writes_nothing_that_was_committed():
    drafter = drafter_of(small(), TREE)
    world = World(TREE, 0, (9, 16, 17))
    world.feed(drafter)
    slots, size = world.slots, drafter.pool.block_size
    rows = torch.cat(
        [slot_mapping(world.tables[s : s + 1], torch.arange(world.lens[s] - 1)[None], BLOCK_SIZE)[0] for s in slots]
    )
    before = [[part.flatten(0, 1)[rows].clone() for part in pair] for pair in drafter.pool.caches]
    trees = [drafter.propose(world.batch(proposals=slots)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*trees, strict=True))
    after = [[part.flatten(0, 1)[rows] for part in pair] for pair in drafter.pool.caches]
    assert all(torch.equal(a, b) for pairs in zip(before, after, strict=True) for a, b in zip(*pairs, strict=True))
    # Reserved blocks beyond a sequence's last token belong to the verifier, and drafts do not write to them.
    reserved = torch.cat([world.tables[s, -(-int(world.lens[s] - 1) // size) :] for s in slots])
    assert not any(part[reserved].any() for pair in drafter.pool.caches for part in pair)


@torch.inference_mode()
def test_growing_keeps_what_is_stored():
    drafter, judge = drafter_of(small(), TREE), small()
    world = World(TREE, 0, (9, 17))
    world.feed(drafter)
    spec = channel_spec(TREE, 0)
    drafter.resize(spec, 2 * spec.num_slots, 2 * spec.num_blocks)
    check(drafter.propose(world.batch(proposals=world.slots)), world, world.slots, judge, TREE)


def test_channels_of_another_shape_are_refused_and_short_contexts_are_warned_of(caplog):
    drafter = ModelDrafter(prepare_model(small(max_position_embeddings=32), "short"), TREE)
    with pytest.raises(ValueError, match="taps of size 64"):
        drafter.resize(channel_spec(TREE, 64), 1, 1)
    with pytest.raises(ValueError, match="paths of 6: this drafter"):
        drafter.resize(channel_spec(CHAIN, 0), 1, 1)
    drafter.resize(channel_spec(TREE, 0), 1, 1)
    assert "draft model short supports 32 positions" in caplog.text


@pytest.mark.parametrize("shape", [CHAIN, SpeculationConfig(5, 4, 69)], ids=["chain", "whole-tree"])
def test_the_verifier_as_its_own_draft_model_is_right(shape):
    """Every chain is accepted; a tree may leave an unlikely path unexpanded, but its first token is always accepted."""
    ref = reference("llama")
    drafter = ModelDrafter(prepare_model(random_model("llama"), "copy"), shape)
    tokens, engine = generate(ref.loaded, engine_config(shape), drafter, ref.prompts, greedy_params())
    assert tokens == ref.continuations
    counts = engine.speculation
    assert counts.num_accepted_tokens_per_pos[0] == counts.num_drafts
    if shape == CHAIN:
        assert counts.num_drafts == 8 * ((NUM_TOKENS - 1) // 6)
        assert counts.num_accepted_tokens == 5 * counts.num_drafts
    assert counts.num_accepted_tokens > 3.5 * counts.num_drafts


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "limits", [{}, {"num_kv_blocks": 40, "max_num_batched_tokens": 16}], ids=["roomy", "preempting"]
)
def test_a_draft_model_changes_nothing_but_speed(shape, limits):
    ref = reference("qwen3")
    drafter = ModelDrafter(prepare_model(small("llama"), "other"), shape)
    tokens, engine = generate(ref.loaded, engine_config(shape, **limits), drafter, ref.prompts, greedy_params(48))
    assert tokens == [more[:48] for more in ref.continuations]
    assert engine.speculation.num_drafts > 8 * 48 / 6
    assert engine.drafter_state == "attached"


@pytest.mark.slow
def test_adaptive_speculation_may_stop_its_growth():
    ref = reference("llama")
    shape = SpeculationConfig(draft_steps=5, draft_top_k=1, adaptive=True)
    drafter = ModelDrafter(prepare_model(random_model("llama"), "copy"), shape)
    tokens, engine = generate(ref.loaded, engine_config(shape), drafter, ref.prompts, greedy_params(64))
    assert tokens == [more[:64] for more in ref.continuations]
    assert engine.drafter_state == "attached"


def test_sampled_text_is_the_same_and_a_shared_prefix_is_cached_on_both_sides():
    """The draft model adds the target's noise, so a copy of the verifier drafts sampled tokens right too."""
    ref = reference("llama")
    prompts = [ref.prompts[4] + [index] for index in range(3)]
    params = [SamplingParams(max_tokens=30, temperature=0.8, seed=index, ignore_eos=True) for index in range(3)]
    params[2] = replace(params[2], speculation=False)
    plain, _ = generate(ref.loaded, engine_config(), None, prompts, params)
    drafter = ModelDrafter(prepare_model(random_model("llama"), "copy"), TREE)
    tokens, engine = generate(ref.loaded, engine_config(max_num_seqs=1), drafter, prompts, params)
    assert tokens == plain
    counts = engine.speculation
    assert counts.num_accepted_tokens_per_pos[0] == counts.num_drafts


def test_a_draft_model_that_comes_late_is_told_of_what_it_missed():
    """Contexts are replayed in chunks while others decode; afterwards a copy of the verifier is right as ever."""
    ref = reference("llama")
    drafter = ModelDrafter(prepare_model(random_model("llama"), "copy"), CHAIN)
    engine = Engine(ref.loaded, engine_config(CHAIN, max_num_batched_tokens=48), drafter.needs)
    run = Run(engine, ref.prompts, greedy_params(64))
    while min(len(tokens) for tokens in run.tokens) < 10:
        run.step()
    connect(engine, drafter, InProcessChannel)
    assert run.finish() == [more[:64] for more in ref.continuations]
    counts = engine.speculation
    assert counts.num_drafts > 8 * 40 / 6
    assert counts.num_accepted_tokens_per_pos[0] == counts.num_drafts


def test_a_checkpoint_is_loaded_and_another_vocabulary_is_refused(tmp_path):
    target = save(small(), tmp_path / "target", words(97))
    described = TargetDescription.from_checkpoint(target)

    def build(folder):
        return load_drafter(folder, described, TREE)

    same = build(save(small(num_hidden_layers=1), tmp_path / "same", words(97)))
    assert len(same.model.model.model.layers) == 1
    padded = build(save(small(vocab_size=112), tmp_path / "padded", words(97)))
    assert len(padded.growth.draft_token_ids) == 97
    with pytest.raises(VocabularyError, match=r"another vocabulary than the verifier .*: .*97"):
        build(save(small(), tmp_path / "disjoint", {f"u{index}": index for index in range(97)}))
    with pytest.raises(
        VocabularyError, match="96 and 97 tokens, of which 1 differ \\('t96' is no token there and 96 here\\)"
    ):
        check_same_vocabulary(save(small(), tmp_path / "fewer", words(96)), 96, target, 97)
    with pytest.raises(VocabularyError, match="of which 2 differ \\('t3' is 5 there and 3 here, 't5' is 3 there"):
        check_same_vocabulary(save(small(), tmp_path / "swapped", words(97, t3=5, t5=3)), 97, target, 97)
    with pytest.raises(VocabularyError, match="112 and 97 tokens, and no tokenizer"):
        build(save(small(vocab_size=112), tmp_path / "bare"))
    with pytest.raises(FileNotFoundError, match="holds no config"):
        build_draft_model(str(tmp_path), described, TREE, DrafterOptions())


@needs_states
def test_a_draft_model_has_no_states():
    with pytest.raises(UnsupportedModelError, match=r"Lfm2.*recurrent state"):
        ModelDrafter(hybrid("lfm2").loaded, CHAIN)


def test_a_folder_with_a_whole_model_is_a_draft_model(tmp_path):
    assert kind_of(checkpoint(tmp_path, LLAMA, {"model.layers.0.self_attn.q_proj.weight": (4, 4)})) == "draft_model"
