"""Bounds by vLLM's `suffix_decoding_...`: match and draft together, remembered requests, levels, shares."""

import pytest

from tests.runtime.suffix.test_suffix import OPENING, TREE, Slots
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.suffix.part import drafter_kinds
from wingbeat.runtime.suffix.suffix_drafter import build_suffix
from wingbeat.runtime.suffix.suffix_texts import SuffixLimits

LONG = SpeculationConfig(draft_steps=40, draft_top_k=1, verify_tree_size=41)
TEXT = list(range(100, 140))


def slots(speculation=LONG, **limits):
    return Slots(speculation, limits=SuffixLimits(**limits))


def test_the_settings_are_those_of_the_drafter():
    given = {setting.name: setting.number(1) for kind in drafter_kinds for setting in kind.settings}
    drafter = build_suffix("suffix", None, LONG, DrafterOptions(settings=given))
    assert drafter.limits == SuffixLimits(1, 1, 1.0, 1.0)


@pytest.mark.parametrize("matched", [1, 4, 7])
@pytest.mark.parametrize(
    ("factor", "expected"),
    [(0.0, [0, 0, 0]), (0.5, [0, 2, 3]), (1.0, [1, 4, 7]), (2.0, [2, 8, 14]), (None, [4, 16, 28])],
)
def test_a_draft_has_so_many_levels_for_each_token_of_its_context(matched, factor, expected):
    drafted = slots(max_spec_factor=factor).drafted(0, [*TEXT, 7, *TEXT[:matched]])
    assert drafted == TEXT[matched : matched + expected[[1, 4, 7].index(matched)]]


@pytest.mark.parametrize("matched", [1, 6, 20])
@pytest.mark.parametrize("depth", [2, 8, 24])
def test_context_and_draft_have_a_depth_together(matched, depth):
    """Any end of a context has matched as well: the one that leaves most room counts."""
    drafted = slots(max_tree_depth=depth, max_spec_factor=1.0).drafted(0, [*TEXT, 7, *TEXT[:matched]])
    most = max(min(length, depth - length) for length in range(1, min(matched, depth - 1) + 1))
    assert drafted == TEXT[matched : matched + most]
    assert len(drafted) <= depth - 1


@pytest.mark.parametrize(
    ("least", "expected"), [(0.0, [3, 5]), (0.5, [3, 5]), (0.51, [3]), (0.75, [3]), (0.8, []), (1.0, [])]
)
def test_a_path_that_followed_more_rarely_is_not_drafted(least, expected):
    """3 followed in three of four times, and 5 behind it in two: shares of 0.75 and 0.5."""
    history = [1, 2, 3, 5, 90, 1, 2, 3, 5, 91, 1, 2, 3, 6, 92, 1, 2, 4, 93, 1, 2]
    speculation = SpeculationConfig(draft_steps=2, draft_top_k=1, verify_tree_size=3)
    assert slots(speculation, min_token_prob=least).drafted(0, history) == expected


def test_what_always_followed_has_a_share_of_one():
    assert slots(min_token_prob=1.0, max_spec_factor=1.0).drafted(0, [*TEXT, 7, *TEXT[:5]]) == TEXT[5:10]


def test_trees_are_bounded_by_shares_too():
    history = [1, 2, 3, 90, 1, 2, 3, 91, 1, 2, 4, 92, 1, 2]
    one = slots(TREE, min_token_prob=0.5)
    one.write(0, history)
    tree = one.tree(0)
    first_level = [
        token for token, depth in zip(tree.token_ids[0].tolist(), tree.depths[0].tolist(), strict=True) if depth == 1
    ]
    assert first_level == [3]


def remembered(one, count):
    """Whether each of so many requests' outputs is drafted from, the first ones first."""
    for index in range(count):
        first = 1000 * (index + 1)
        one.drafted(0, OPENING, begin=True)
        one.drafted(0, [*OPENING, *range(first, first + 6)])
    found = []
    for index in range(count):
        first = 1000 * (index + 1)
        one.write(1, [first, first + 1, first + 2], begin=True)
        tree = one.tree(1)
        found.append(int(tree.num_valid[0]) > 1)
    return found


@pytest.mark.parametrize("most", [0, 1, 2, 3, 6])
def test_so_many_requests_are_remembered_and_the_oldest_forgotten_first(most):
    found = remembered(slots(max_cached_requests=most), 9)
    assert sum(found) <= most
    assert sum(found) >= most // 2
    assert found == sorted(found), "those that are remembered are the latest"


def test_without_a_bound_all_are_remembered():
    assert all(remembered(slots(), 9))


def test_a_request_of_its_own_text_is_drafted_for_where_none_is_remembered():
    assert slots(max_cached_requests=0).drafted(0, [1, 2, 3, 4, 1, 2])[:2] == [3, 4]
