"""Layers that keep their windows alone write what transformers' generate() writes."""

from dataclasses import replace

import pytest

from tests.covering import pairwise
from tests.runtime.engine.arrivals import Load, ending
from tests.runtime.kv_windows.window_world import finish, spoil, windowed
from tests.runtime.models import (
    CHAIN,
    TREE,
    WINDOW,
    Run,
    eagle_drafter,
    engine_config,
    greedy,
    greedy_params,
    reference,
)
from tests.runtime.recorded_graphs import RecordingDevice
from tests.runtime.scripted import ScriptedDrafter, random_tree, right_chain, right_tree
from tests.runtime.watchers import ContextDrafter, Rig, dense_taps
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.llm import build_engine

SHAPES = {"tree": TREE, "chain": CHAIN}
ROOMS = {
    "roomy": {},
    # Every block's edge is crossed by accepted and rejected drafts.
    "small blocks": {"block_size": 4, "num_kv_blocks": 600},
    # Requests are preempted, prompts come in pieces, blocks and places are taken again.
    "tight": {
        **{"block_size": 4, "max_model_len": 128, "num_kv_blocks": 124, "max_num_batched_tokens": 24},
        "num_window_blocks": 120,
    },
}
AXES = {
    "model": ["gemma3", "gpt_oss", "mistral", "gemma2"],
    "drafter": ["none", "right", "random", "eagle"],
    "shape": list(SHAPES),
    "loop": ["waiting", "overlapped"],
    "rounds": ["host", "eager", "graphs"],
    "room": list(ROOMS),
    "prefixes": ["cached", "not cached"],
}


def drafter_of(kind, ref, shape):
    if kind == "eagle":
        return eagle_drafter(ref.loaded, shape)
    plan = {"right": right_chain if shape is CHAIN else right_tree, "random": random_tree}.get(kind)
    return None if plan is None else ScriptedDrafter(ref.sequences, plan, ref.loaded.vocab_size)


def rows():
    table = pairwise(AXES, lambda row: row["drafter"] != "random" or row["shape"] == "tree")
    return [pytest.param(row, id="-".join(row.values())) for row in table]


@pytest.mark.few(6)
@pytest.mark.parametrize("row", rows())
def test_the_text_is_that_of_generate(row):
    ref, shape = reference(row["model"]), SHAPES[row["shape"]]
    limits = ROOMS[row["room"]] | {
        "overlap": row["loop"] == "overlapped",
        "enable_prefix_caching": row["prefixes"] == "cached",
    }
    device = RecordingDevice() if row["rounds"] == "graphs" else None
    on_host = None if row["rounds"] == "host" else False
    length = 48 if row["room"] == "tight" else 80
    with windowed(ref.loaded):
        drafter = drafter_of(row["drafter"], ref, shape)
        engine = build_engine(
            ref.loaded, engine_config(shape, **limits), drafter, InProcessChannel, device, on_host=on_host
        )
        try:
            assert finish(Run(engine, ref.prompts, greedy_params(length))) == [
                text[:length] for text in ref.continuations
            ]
        finally:
            engine.model.remove_taps()
    stats = engine.stats()
    assert stats.num_preemptions > 0 or row["room"] != "tight" or row["drafter"] != "none"
    assert engine.cache.beside.num_held == 0
    if row["drafter"] in ("right", "random"):
        assert engine.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_a_conversation_finds_its_earlier_turns(name):
    ref = reference(name)
    with windowed(ref.loaded) as loaded:
        engine = build_engine(loaded, engine_config(TREE, block_size=4, num_kv_blocks=600), None, InProcessChannel)
        chats = [list(prompt) for prompt in ref.prompts[:4]]
        for turn in range(3):
            run = Run(engine, chats, greedy_params(21))
            answers = finish(run)
            assert answers == greedy(loaded.model, chats, 21)[0]
            cached = [run.last[index].num_cached_tokens for index in range(len(chats))]
            assert turn == 0 or min(cached) > 16, "the window at the end of the last turn is still there"
            chats = [chat + answer + [turn, 2, 3] for chat, answer in zip(chats, answers, strict=True)]
        engine.model.remove_taps()


def test_a_beginning_that_has_lost_its_window_is_computed_again_and_then_found():
    """Two prompts share a beginning; the second finds its blocks, but not the window at the end of the beginning."""
    ref = reference("gemma3")
    shared, ends = ref.prompts[4][:44], ([5, 6, 7] * 12, [8, 9, 10] * 12, [11, 12, 13] * 12, [14, 15, 16] * 12)
    limits = {"block_size": 4, "num_kv_blocks": 400, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    with windowed(ref.loaded) as loaded:
        engine = build_engine(loaded, engine_config(CHAIN, **limits), None, InProcessChannel)
        others, found = ref.prompts[5:], []
        for end in ends:
            # Other requests take the places that are not asked for.
            finish(Run(engine, others, greedy_params(40)))
            prompt = shared + end
            run = Run(engine, [prompt], greedy_params(12))
            assert finish(run) == greedy(loaded.model, [prompt], 12)[0]
            found.append(run.last[0].num_cached_tokens)
        engine.model.remove_taps()
    assert found == [0, 0, 44, 44]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["none", "eagle"])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_come_go_and_are_aborted_leave_no_place_held(kind, overlap):
    ref = reference("gemma3")
    loaded, end = ending(ref)
    load = Load(ref, end, seed=3)
    limits = ROOMS["tight"] | {"overlap": overlap}
    with windowed(loaded):
        engine = build_engine(loaded, engine_config(TREE, **limits), drafter_of(kind, ref, TREE), InProcessChannel)
        tokens, aborted, reasons = load.play(engine)
        engine.model.remove_taps()
    assert all(tokens[name] == load.expected[name] for name in reasons.keys() & load.expected.keys())
    for name in aborted & load.expected.keys():
        assert tokens[name] == load.expected[name][: len(tokens[name])]
    assert engine.cache.beside.num_held == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("on_host", [None, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_comes_late_is_replayed_contexts_of_several_windows(overlap, on_host):
    """`ContextDrafter` compares the hidden states of every replayed position with transformers' own."""
    ref = reference("gemma3")
    taps = dense_taps(ref)
    limits = {"block_size": 4, "num_kv_blocks": 600, "max_num_batched_tokens": 24, "overlap": overlap}
    with windowed(ref.loaded):
        rig = Rig(ref, ContextDrafter(ref, taps), **limits)
        run = Run(rig.engine, ref.prompts, greedy_params(80))
        while min(map(len, run.tokens)) < 30:
            spoil(rig.engine)
            rig.step(run)
        late = ContextDrafter(ref, taps)
        rig.replace(late)
        while rig.engine.has_unfinished_requests():
            spoil(rig.engine)
            rig.step(run)
        rig.engine.check_integrity()
        rig.engine.model.remove_taps()
    assert run.tokens == ref.continuations
    assert late.num_checked > 0
    assert len(late.pairs) > 8 * 2 * WINDOW, "whole contexts were replayed"


def test_rounded_keys_and_values_are_those_of_whole_contexts():
    ref, texts = reference("gemma3"), []
    limits = {"block_size": 4, "num_kv_blocks": 600, "kv_cache_dtype": "fp8"}
    with windowed(ref.loaded) as loaded:
        for more in ({}, {"num_window_blocks": 0}):
            engine = build_engine(loaded, engine_config(TREE, **limits, **more), None, InProcessChannel)
            texts.append(Run(engine, ref.prompts, greedy_params(48)).finish())
            engine.model.remove_taps()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("spare", [0, 1])
def test_a_limit_below_what_running_sequences_need_is_refused(spare):
    ref = reference("gemma3")
    config = engine_config(CHAIN, num_kv_blocks=400)
    with windowed(ref.loaded) as loaded:
        (part,) = loaded.parts.values()
        needed = part.sizes(config).running
        given = replace(config, num_window_blocks=needed - 1 + spare)
        if spare:
            Engine(loaded, given).model.remove_taps()
        else:
            with pytest.raises(ValueError, match=f"num_window_blocks is {needed - 1}: 8 sequences .* need {needed}"):
                Engine(loaded, given)
