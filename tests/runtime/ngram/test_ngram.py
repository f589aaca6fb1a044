"""Prompt lookup copies what followed the latest tokens before."""

import pytest
import torch

from tests.runtime.draft_world import World
from tests.runtime.drafters.test_drafter_kinds import LLAMA, checkpoint
from tests.runtime.models import CHAIN, TREE
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.ngram.ngram_drafter import NgramDrafter


def looked_up(history, speculation=CHAIN):
    world = World(speculation, 0, (len(history),))
    slot = world.slots[0]
    world.tokens[slot, : len(history)] = torch.tensor(history)
    tree = NgramDrafter(speculation).propose(world.batch(proposals=[slot]))
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


def test_auto_is_prompt_lookup_where_the_model_predicts_one_token(tmp_path):
    assert parse_drafter("auto", checkpoint(tmp_path, LLAMA, {"lm_head.weight": (4, 4)})).kind == "ngram"
