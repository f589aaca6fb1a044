"""A drafter that has not seen a saved prefix is given what was recorded of it, and the verifier need not run again."""

import pytest

from tests.runtime.hybrids import hybrid, needs_states
from tests.runtime.models import CHAIN, Run, eagle_drafter, greedy_params, reference
from tests.runtime.prefix_world import SMALL, Kept, prefix_of, save, store_of, warnings_of
from tests.runtime.scripted import ScriptedDrafter, right_chain
from tests.runtime.watchers import ContextDrafter, Rig, dense_taps
from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper

INDEX = 4
"""Index of a reference prompt of 64 tokens, 48 of which are the prefix."""


def scripted(ref):
    """A drafter that keeps no context."""
    return ScriptedDrafter(ref.sequences, right_chain, ref.loaded.vocab_size)


def saved(ref, folder, drafter, length=50, **limits):
    one = Kept(ref.loaded, folder, drafter, **limits)
    one.save(prefix_of(ref.prompts[INDEX % len(ref.prompts)][:length]))
    one.close()


def reloaded(ref, folder, drafter, **limits):
    one = Kept(ref.loaded, folder, drafter, **limits)
    one.keeper.open()
    assert one.names == ["system"]
    return one


@pytest.mark.parametrize(("budget", "most_replayed"), [(64, 0), (63, 24), (16, 24), (5, 40)])
@pytest.mark.parametrize("on_host", [None, False])
@pytest.mark.few(2)
def test_a_new_drafter_gets_true_taps_and_what_is_not_recorded_is_replayed(tmp_path, budget, most_replayed, on_host):
    ref = reference("llama")
    taps = dense_taps(ref)
    saved(ref, tmp_path, ContextDrafter(ref, taps))
    drafter = ContextDrafter(ref, taps)
    one = reloaded(ref, tmp_path, drafter, max_num_batched_tokens=budget, on_host=on_host)
    try:
        tokens, cached = one.run(ref.prompts[INDEX : INDEX + 1], 70)
    finally:
        one.close()
    assert (tokens[0], cached) == (ref.continuations[INDEX][:70], [48])
    assert drafter.num_checked > 0
    assert one.engine.stats().num_replayed_tokens <= most_replayed


@pytest.mark.slow
def test_several_requests_at_once_get_their_context_in_turn(tmp_path):
    ref = reference("llama")
    taps = dense_taps(ref)
    saved(ref, tmp_path, ContextDrafter(ref, taps))
    drafter = ContextDrafter(ref, taps)
    one = reloaded(ref, tmp_path, drafter, max_num_batched_tokens=24)
    try:
        order = [INDEX, 0, INDEX, 1, 2, INDEX]
        tokens, _ = one.run([ref.prompts[index] for index in order], 60)
    finally:
        one.close()
    assert tokens == [ref.continuations[index][:60] for index in order]
    assert drafter.num_checked > 0


def test_a_prompt_that_goes_exactly_one_token_further_needs_no_replay(tmp_path):
    ref = reference("llama")
    taps = dense_taps(ref)
    saved(ref, tmp_path, ContextDrafter(ref, taps), length=64)
    drafter = ContextDrafter(ref, taps)
    one = reloaded(ref, tmp_path, drafter)
    sequence = ref.sequences[INDEX]
    try:
        tokens, cached = one.run([sequence[:65]], 60)
    finally:
        one.close()
    assert (tokens[0], cached) == (sequence[65:125], [64])
    assert drafter.num_checked > 0
    assert one.engine.stats().num_replayed_tokens == 0


def test_the_heir_of_a_lost_drafter_gets_it_too():
    ref = reference("llama")
    taps = dense_taps(ref)
    rig = Rig(ref, ContextDrafter(ref, taps), **SMALL)
    keeper = PrefixKeeper(rig.engine)
    try:
        save(rig.engine, keeper, prefix_of(ref.prompts[INDEX][:50]))
        heir = ContextDrafter(ref, taps)
        rig.replace(heir)
        run = Run(rig.engine, [ref.prompts[INDEX]], greedy_params(70))
        assert rig.finish(run) == [ref.continuations[INDEX][:70]]
        assert heir.num_checked > 0
        assert rig.engine.stats().num_replayed_tokens == 0
        keeper.keep([("system", 2, None)]).result(10)
        rig.replace(heir)
        run = Run(rig.engine, [ref.prompts[INDEX]], greedy_params(70))
        assert rig.finish(run) == [ref.continuations[INDEX][:70]]
        assert rig.engine.stats().num_replayed_tokens > 0
    finally:
        keeper.close()
        rig.engine.model.remove_taps()


def test_a_prefix_whose_request_was_preempted_is_recorded_whole(tmp_path):
    ref = reference("llama")
    taps = dense_taps(ref)
    first = Kept(ref.loaded, tmp_path, ContextDrafter(ref, taps), max_num_batched_tokens=16)
    first.keeper.save(prefix_of(ref.prompts[INDEX][:50]))
    first.engine.step()
    first.engine.step()
    first.engine.scheduler._preempt(first.engine.scheduler.running[0])
    first.save(prefix_of(ref.prompts[INDEX][:50]))
    first.close()
    drafter = ContextDrafter(ref, taps)
    one = reloaded(ref, tmp_path, drafter)
    one.run([ref.prompts[INDEX]], 20)
    one.close()
    assert drafter.num_checked > 0
    assert one.engine.stats().num_replayed_tokens == 0


@pytest.mark.parametrize("kind", ["another", "without", "none"])
def test_what_was_recorded_for_another_drafter_is_left_alone(tmp_path, caplog, kind):
    ref = reference("llama")
    saved(ref, tmp_path, ContextDrafter(ref, dense_taps(ref)))
    drafters = {"another": lambda: eagle_drafter(ref.loaded, CHAIN), "without": lambda: scripted(ref)}
    one = reloaded(ref, tmp_path, drafters.get(kind, lambda: None)(), speculation=CHAIN)
    try:
        tokens, cached = one.run([ref.prompts[INDEX]], 40)
    finally:
        one.close()
    assert (tokens[0], cached, warnings_of(caplog)) == (ref.continuations[INDEX][:40], [48], [])
    assert (one.engine.stats().num_replayed_tokens > 0) == (kind == "another")


def test_without_a_drafter_that_keeps_context_nothing_is_recorded(tmp_path):
    ref = reference("llama")
    saved(ref, tmp_path, scripted(ref), speculation=CHAIN)
    from safetensors.torch import load_file

    assert not [name for name in load_file(tmp_path / "system.safetensors") if name.startswith("taps")]
    assert store_of(tmp_path).records()


@needs_states
def test_a_hybrids_drafter_gets_what_was_recorded(tmp_path):
    ref = hybrid("lfm2")
    taps, prompt = dense_taps(ref), ref.prompts[INDEX % len(ref.prompts)]
    saved(ref, tmp_path, ContextDrafter(ref, taps), length=22)
    drafter = ContextDrafter(ref, taps)
    one = reloaded(ref, tmp_path, drafter)
    try:
        tokens, cached = one.run([prompt], 30)
    finally:
        one.close()
    assert (tokens[0], cached) == (ref.continuations[INDEX % len(ref.prompts)][:30], [20])
    assert drafter.num_checked > 0
    assert one.engine.stats().num_replayed_tokens == 0
