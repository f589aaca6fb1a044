"""Prompt lookup copies what followed the latest tokens before."""

import pytest
import torch

from tests.runtime.draft_world import World
from tests.runtime.drafters.test_drafter_kinds import LLAMA, checkpoint
from tests.runtime.models import CHAIN, TREE
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.choice import check_settings, parse_drafter
from wingbeat.runtime.ngram.lookup_window import lookup_window
from wingbeat.runtime.ngram.ngram_drafter import build_ngram


def looked_up(history, speculation=CHAIN, **settings):
    world = World(speculation, 0, (len(history),))
    slot = world.slots[0]
    world.tokens[slot, : len(history)] = torch.tensor(history)
    drafter = build_ngram("ngram", None, speculation, DrafterOptions(settings=settings))
    tree = drafter.propose(world.batch(proposals=[slot]))
    count = int(tree.num_valid[0])
    assert tree.parents[0, :count].tolist() == list(range(-1, count - 1))
    assert tree.depths[0, :count].tolist() == list(range(count))
    assert tree.token_ids[0, 0] == history[-1]
    return tree.token_ids[0, 1:count].tolist()


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2], [3, 4, 5, 6, 7]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 8, 1, 2], [4, 9, 8, 1, 2]),
        ([5, 1, 2, 3, 9, 6, 1, 2, 4, 5, 1, 2], [3, 9, 6, 1, 2]),
        ([1, 2, 1, 2], [1, 2]),
        ([7, 7, 7], [7]),
        ([1, 2, 3, 4], []),
        ([1, 1], []),
        ([1], []),
    ],
    ids=["copy", "latest", "longest-first", "loop", "short-loop", "nothing", "too-short", "one"],
)
def test_prompt_lookup_copies_what_followed(history, expected):
    assert looked_up(history) == expected
    assert looked_up(history, TREE) == expected


LONG = [9, 1, 2, 3, 4, 5, 8, 2, 3, 4, 5, 7, 0, 1, 2, 3, 4, 5]
"""The last five tokens were followed by 8, the last four by 7, more lately."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [7, 0, 1, 2, 3]),
        ({"prompt_lookup_max": 5, "prompt_lookup_min": 2}, [8, 2, 3, 4, 5]),
        ({"prompt_lookup_max": 5}, [8, 2, 3, 4, 5]),
        ({"prompt_lookup_max": 6}, []),
        ({"prompt_lookup_min": 5}, [8, 2, 3, 4, 5]),
        ({"prompt_lookup_max": 9, "prompt_lookup_min": 6}, []),
        ({"prompt_lookup_max": 1}, [7, 0, 1, 2, 3]),
    ],
    ids=str,
)
def test_the_window_bounds_what_is_looked_up(settings, expected):
    assert looked_up(LONG, **settings) == expected


def test_one_token_is_enough_where_that_is_asked_for():
    assert looked_up([1, 2, 3, 1]) == []
    assert looked_up([1, 2, 3, 1], prompt_lookup_max=1) == [2, 3, 1]


def test_a_window_that_is_none_and_one_of_another_drafter_are_refused():
    with pytest.raises(ValueError, match="prompt_lookup_min is 5 and prompt_lookup_max is 3: the minimum is above"):
        lookup_window({"prompt_lookup_min": 5, "prompt_lookup_max": 3})
    with pytest.raises(ValueError, match="prompt_lookup_min is 5 and prompt_lookup_max is 3"):
        check_settings(parse_drafter("ngram", None), {"prompt_lookup_min": 5, "prompt_lookup_max": 3})
    with pytest.raises(
        ValueError, match="prompt_lookup_max is 3 and drafter is none: only drafter ngram has this setting"
    ):
        check_settings(parse_drafter("none", None), {"prompt_lookup_max": 3})


def test_auto_is_prompt_lookup_where_the_model_predicts_one_token(tmp_path):
    assert parse_drafter("auto", checkpoint(tmp_path, LLAMA, {"lm_head.weight": (4, 4)})).kind == "ngram"
