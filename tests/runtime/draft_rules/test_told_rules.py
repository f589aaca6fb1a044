"""Sampling rules that a drafter is told: each is checked by what was sent, and by what was drafted."""

from collections import Counter
from dataclasses import replace

from tests.runtime.engine.test_told_to_drafter import COUNT, DRAFTED_BY, SHAPES, Pair
from tests.runtime.models import TREE, greedy_params
from wingbeat.runtime.protocol.sampling_rules import RuleKinds


def drafted_tokens(passes) -> Counter:
    return Counter(token_id for one in passes for tree in one.token_ids for token_id in tree)


@DRAFTED_BY
@SHAPES
def test_tokens_that_a_request_bans_are_told_and_not_drafted(shape, draft_by):
    free = drafted_tokens(draft_by(lambda: Pair(shape).run([greedy_params(COUNT)] * 2)))
    banned = tuple((token_id,) for token_id, _ in free.most_common(20))
    passes = draft_by(lambda: Pair(shape).run([greedy_params(COUNT, bad_words=banned)] * 2))
    assert {one.header.sampling_rules for one in passes} == {RuleKinds.NUMBERS | RuleKinds.LISTED}
    assert drafted_tokens(passes)
    assert not drafted_tokens(passes) & Counter({token_id for (token_id,) in banned})


@DRAFTED_BY
@SHAPES
def test_a_filter_that_leaves_a_single_token_has_a_single_token_drafted(shape, draft_by):
    params = replace(greedy_params(COUNT), temperature=1.0, top_k=1, seed=3)
    passes = draft_by(lambda: Pair(shape).run([params] * 2))
    assert {one.header.sampling_rules for one in passes} == {RuleKinds.NUMBERS}
    assert {depths.count(1) for one in passes for depths in one.depths} == {1}


@DRAFTED_BY
def test_penalties_are_told_and_move_drafts_away_from_what_was_written(draft_by):
    def repeated(params, kinds):
        run = Pair(TREE).run([params] * 4)
        assert {one.header.sampling_rules for one in run} == {kinds}
        trees = [tree for one in run for tree in one.token_ids if tree]
        return sum(len(tree) - len(set(tree)) for tree in trees) / len(trees)

    told = RuleKinds.NUMBERS | RuleKinds.PENALTIES
    free = draft_by(lambda: repeated(greedy_params(COUNT), 0))
    penalised = draft_by(lambda: repeated(greedy_params(COUNT, presence_penalty=2.0, frequency_penalty=2.0), told))
    assert penalised < free


@DRAFTED_BY
def test_where_few_tokens_are_allowed_no_other_is_drafted(draft_by):
    allowed = tuple(range(100, 140))
    passes = draft_by(lambda: Pair(TREE).run([greedy_params(COUNT, allowed_token_ids=allowed)] * 2))
    assert {one.header.sampling_rules for one in passes} == {RuleKinds.NUMBERS | RuleKinds.LISTED}
    assert drafted_tokens(passes)
    assert drafted_tokens(passes).keys() <= set(allowed)
