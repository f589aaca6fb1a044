"""The verifier's side of drafting: trees are requested only for complete contexts, and a lost drafter harms no text."""

from functools import partial

import pytest

from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, new_engine
from tests.runtime.watchers import ContextDrafter, FailingEnd

pytestmark = pytest.mark.few(1)

SHORT = 48


@pytest.fixture
def rig(rigs, ref):
    return partial(rigs, ref)


def first(ref, count=SHORT):
    return [tokens[:count] for tokens in ref.continuations]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 4, "num_kv_blocks": 600},
        {"max_model_len": 128, "num_kv_blocks": 20},
        {"max_num_seqs": 3, "max_num_batched_tokens": 20},
    ],
    ids=["plain", "chunks", "preemption", "queue"],
)
def test_context_is_complete_wherever_a_tree_is_asked_for(ref, taps, rig, limits):
    drafter = ContextDrafter(ref, taps)
    one = rig(drafter, **limits)
    assert one.run(ref.prompts, greedy_params(SHORT)) == first(ref)
    assert (one.engine.stats().num_preemptions > 0) == ("max_model_len" in limits)
    assert drafter.num_checked >= 8 * SHORT / 6
    assert one.engine.speculation.acceptance_length > 4


@pytest.mark.slow
def test_context_is_complete_after_prefix_hits(ref, taps, rig):
    """Cached blocks come with the draft KV of whoever filled them: nothing is replayed."""
    drafter = ContextDrafter(ref, taps)
    one = rig(drafter)
    for _ in range(2):
        run = Run(one.engine, ref.prompts, greedy_params(SHORT))
        assert one.finish(run) == first(ref)
    assert sum(output.num_cached_tokens for output in run.last.values()) > 100
    assert one.engine.stats().num_replayed_tokens == 0
    assert one.engine.speculation.acceptance_length > 4


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 9])
def test_prefixes_the_drafter_never_saw_are_replayed(ref, taps, rig, budget):
    """Blocks filled without speculation hold no draft KV, so hits on them are replayed before a tree is asked for."""
    drafter = ContextDrafter(ref, taps)
    one = rig(drafter, max_num_batched_tokens=budget)
    one.run(ref.prompts, greedy_params(SHORT, speculation=False))
    assert drafter.num_checked == 0
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    assert one.finish(run) == first(ref)
    assert sum(output.num_cached_tokens for output in run.last.values()) > 100
    assert one.engine.stats().num_replayed_tokens > 100
    assert all(output.metrics.num_drafts > 0 for output in run.last.values())


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 9])
def test_another_incarnation_starts_from_replayed_context(ref, taps, rig, budget):
    one = rig(ContextDrafter(ref, taps), max_num_batched_tokens=budget)
    run = Run(one.engine, ref.prompts, greedy_params())
    while sum(map(len, run.tokens)) < 8 * 12:
        one.step(run)
    one.engine.detach_drafter()
    for _ in range(3):
        one.step(run)
    assert one.engine.drafter_state == "none"
    heir = ContextDrafter(ref, taps)
    one.replace(heir)
    assert one.finish(run) == ref.continuations
    assert heir.num_checked > 8
    assert one.engine.stats().num_replayed_tokens > 100
    assert one.engine.stats().num_drafters_attached == 2


@pytest.mark.slow
def test_hits_on_blocks_of_the_incarnation_before_are_replayed(ref, taps, rig):
    one = rig(ContextDrafter(ref, taps))
    one.run(ref.prompts, greedy_params(SHORT))
    heir = ContextDrafter(ref, taps)
    one.replace(heir)
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    assert one.finish(run) == first(ref)
    assert sum(output.num_cached_tokens for output in run.last.values()) > 100
    assert one.engine.stats().num_replayed_tokens > 100
    assert all(output.metrics.num_drafts > 0 for output in run.last.values())


@pytest.mark.parametrize("alive", [True, False], ids=["silent", "dead"])
@pytest.mark.parametrize("what", ["acquire", "wait"])
@pytest.mark.parametrize("after", [0, 5])
def test_losing_the_drafter_costs_no_request(ref, taps, rig, what, after, alive):
    drafter = ContextDrafter(ref, taps)
    one = rig(drafter, lambda end: FailingEnd(end, what, after, alive), drafter_timeout_s=1e-9)
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    for _ in range(after + 4):
        one.step(run)
    assert one.engine.drafter_state == "lost"
    assert one.engine.stats().drafter_state == "lost"
    heir = ContextDrafter(ref, taps)
    one.replace(heir)
    assert one.engine.drafter_state == "attached"
    assert one.finish(run) == first(ref)
    assert heir.num_checked > 0
    assert one.engine.stats().num_replayed_tokens > 0


def test_after_a_loss_decoding_goes_on_plainly(ref, rig):
    one = rig(eagle_drafter(ref.loaded, TREE), lambda end: FailingEnd(end, "wait", 3, False))
    assert one.run(ref.prompts, greedy_params(SHORT)) == first(ref)
    assert one.engine.drafter_state == "lost"


def test_a_reply_of_another_incarnation_is_no_reply(ref, rig):
    """The drafter is replaced between a round and its reply: trees of the old drafter must not be verified."""
    one = rig(eagle_drafter(ref.loaded, TREE))
    run = Run(one.engine, ref.prompts, greedy_params(SHORT))
    for _ in range(5):
        run.step()
    one.channel.attach(2)
    run.step()
    assert one.engine.drafter_state == "lost"
    assert one.finish(run) == first(ref)


def test_only_sequences_that_can_use_a_tree_are_drafted_for(ref, taps):
    """With one token to go, or two, a drafted token could not be emitted before the bonus token."""
    engine = new_engine(ref.loaded, engine_config(), ContextDrafter(ref, taps))
    run = Run(engine, ref.prompts[:3], [greedy_params(1), greedy_params(2), greedy_params(3)])
    run.finish()
    assert [run.last[index].metrics.num_drafts for index in range(3)] == [0, 0, 1]
    engine.model.remove_taps()
