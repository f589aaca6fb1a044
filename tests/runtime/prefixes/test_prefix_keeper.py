"""Pinned prefixes of an engine: found by every request, never evicted, bounded, and gone once released."""

import pytest

from tests.runtime.models import CHAIN, Run, greedy_params, reference
from tests.runtime.prefix_world import Kept, finish, prefix_of
from wingbeat.runtime.prefixes.prefix_keeper import INVALID, NO_ROOM

REF = "llama"
PROMPT = 4
"""Index of a reference prompt of 64 tokens."""


@pytest.fixture
def kept(request):
    """Makes engines, one at a time."""
    made = []

    def make(folder=None, **fields):
        made.append(Kept(reference(REF).loaded, folder, **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()


def refused(one: Kept, tokens, **fields):
    return one.keeper.save(prefix_of(tokens, **fields)).result(0)


def test_a_saved_prefix_is_a_hit_after_everything_else_was_evicted(kept):
    ref, one = reference(REF), kept(speculation=CHAIN, num_kv_blocks=90)
    prompt = ref.prompts[PROMPT]
    one.save(prefix_of(prompt[:42]))
    others = [[token] * 60 for token in range(8)]
    one.run(others, 40)
    assert one.engine.scheduler.num_preemptions > 0
    tokens, cached = one.run([prompt], 20)
    assert (tokens[0], cached) == (ref.continuations[PROMPT][:20], [40])


def test_what_is_pinned_is_counted_and_shown(kept):
    one = kept()
    prompt = reference(REF).prompts[PROMPT]
    one.save(prefix_of(prompt[:42]))
    one.save(prefix_of(prompt[:33], name="shorter"))
    told = one.keeper.describe()
    assert (told["pinned_tokens"], told["max_pinned_tokens"]) == (40, 49 * 4)
    block_bytes = one.engine.cache.block_bytes
    assert told["prefixes"] == [
        {"name": "system", "version": 1, "blocks": 10, "bytes": 10 * block_bytes, "saved": None},
        {"name": "shorter", "version": 1, "blocks": 8, "bytes": 8 * block_bytes, "saved": None},
    ]
    stats = one.engine.stats()
    assert (stats.num_pinned_blocks, stats.num_free_blocks) == (10, 199 - 10)


def test_a_prefix_that_is_let_go_of_is_evicted_as_any_other(kept):
    one = kept(num_kv_blocks=90)
    prompt = reference(REF).prompts[PROMPT]
    one.save(prefix_of(prompt))
    one.keeper.keep([("system", 2, None)]).result(10)
    assert (one.names, one.engine.stats().num_pinned_blocks) == ([], 0)
    one.run([[token] * 60 for token in range(8)], 40)
    assert one.run([prompt], 2)[1] == [0]


def test_a_later_prefix_of_a_name_takes_the_place_of_the_one_before(kept):
    one = kept()
    first, second = [5] * 16, [6] * 24
    one.save(prefix_of(first))
    done = one.keeper.save(prefix_of(second, version=2))
    finish(one.engine, one.keeper)
    assert done.result(0) is None
    assert one.names == ["system", "system"]
    one.keeper.keep([("system", 2, prefix_of(second, version=2))]).result(10)
    assert one.engine.stats().num_pinned_blocks == 6
    one.keeper.keep([("system", 1, prefix_of(first))]).result(10)
    finish(one.engine, one.keeper)
    assert one.engine.stats().num_pinned_blocks == 6


def test_a_prefix_that_is_not_kept_after_all_is_dropped(kept):
    one = kept()
    one.keeper.save(prefix_of([5] * 16))
    finish(one.engine, one.keeper)
    one.keeper.drop("system", 1)
    one.keeper.drop("system", 1)
    assert one.engine.stats().num_pinned_blocks == 0


def test_what_is_missing_of_the_names_that_there_are_is_computed(kept):
    one = kept()
    prompt = reference(REF).prompts[PROMPT]
    one.keeper.keep([("system", 3, prefix_of(prompt, version=3))])
    assert one.names == []
    finish(one.engine, one.keeper)
    assert one.names == ["system"]
    assert one.run([[*prompt, 1]], 2)[1] == [64]


def test_a_prefix_that_goes_while_it_is_computed_is_not_pinned(kept):
    one = kept(max_num_batched_tokens=8)
    done = one.keeper.save(prefix_of([5] * 40))
    one.engine.step()
    one.keeper.keep([("system", 2, None)]).result(10)
    assert "was deleted" in done.result(0).reason
    finish(one.engine, one.keeper)
    assert (one.names, one.engine.stats().num_pinned_blocks) == ([], 0)


def test_more_than_may_be_pinned_is_refused_with_what_is_left(kept):
    one = kept(max_pinned_tokens=48)
    one.save(prefix_of([5] * 24))
    refusal = refused(one, [6] * 40, name="other")
    assert refusal.code == NO_ROOM
    assert refusal.reason == "needs 40 more pinned tokens: 24 of 48 (max_pinned_tokens) are left"
    one.save(prefix_of([5] * 24 + [7] * 24, name="longer"))
    assert one.engine.stats().num_pinned_blocks == 12


def test_prefixes_that_are_still_computed_count(kept):
    one = kept(max_pinned_tokens=48)
    one.keeper.save(prefix_of([5] * 40))
    assert refused(one, [6] * 16, name="other").code == NO_ROOM


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([5] * 3, "has 3 tokens: a prefix needs at least 4, one KV block"),
        ([5] * 300, "has 300 tokens: max_model_len is 256"),
        ([5] * 8 + [97], "cannot be computed: prompt holds token id 97: the vocabulary has 97"),
    ],
)
def test_what_cannot_be_a_prefix_is_refused(kept, tokens, reason):
    if tokens[-1] == 97:
        tokens = [97] * 4
    assert refused(kept(num_kv_blocks=1000), tokens) == (INVALID, reason)


def test_without_a_prefix_cache_there_are_no_prefixes(kept):
    assert "caches no prefixes" in refused(kept(enable_prefix_caching=False), [5] * 8).reason


def test_a_sequence_of_max_model_len_fits_beside_all_that_may_be_pinned(kept):
    ref, one = reference(REF), kept(num_kv_blocks=80)
    most = one.keeper.describe()["max_pinned_tokens"]
    assert most == (80 - 1 - one.engine.config.max_blocks_per_seq) * 4 < 79 // 4 * 4
    one.save(prefix_of([5] * most))
    run = Run(one.engine, ref.prompts[:3], greedy_params(256 - 40))
    run.finish()
    assert [len(tokens) for tokens in run.tokens] == [216, 216, 216]


def test_a_bound_that_leaves_no_room_for_a_sequence_is_refused_at_the_start(kept):
    with pytest.raises(ValueError, match="max_pinned_tokens is 60: beside a sequence of max_model_len 256"):
        kept(num_kv_blocks=80, max_pinned_tokens=60)


def test_a_prefix_that_cannot_be_computed_is_refused_with_the_reason(kept, monkeypatch):
    one = kept()
    done = one.keeper.save(prefix_of([5] * 16))
    monkeypatch.setattr(one.engine.drafting, "admit", lambda seq: 1 / 0)
    finish(one.engine, one.keeper)
    assert done.result(0).code == INVALID
    assert "could not be computed: request prefix system 1: ZeroDivisionError" in done.result(0).reason
    assert (one.names, one.engine.stats().num_pinned_blocks) == ([], 0)
