"""Drafts of one-pass heads behind a root are tokens that a grammar allows."""

import pytest
import torch

from tests.runtime.models import CHAIN
from tests.runtime.one_pass.one_pass_drafts import TAPS, fed, load, trees_of
from tests.runtime.one_pass.one_pass_world import VOCAB, random_tensors, raw_config


@pytest.mark.parametrize("family", ["dflash", "dspark-rnn", "dflash2"])
def test_what_no_grammar_allows_is_not_drafted_behind_the_root(tmp_path, family):
    raw = raw_config(family, TAPS, 1)
    drafter, world = fed(load(tmp_path, raw, random_tensors(raw)), CHAIN)
    first = trees_of(drafter, world).token_ids[:, 1]
    words = torch.full((len(first), -(-VOCAB // 32)), -1, dtype=torch.int32)
    rows = torch.arange(len(first))
    words[rows, first // 32] &= ~(1 << (first % 32)).to(torch.int32)
    with torch.inference_mode():
        batch = world.batch(proposals=world.slots)._replace(allowed_tokens=words)
        assert not bool((drafter.propose(batch).token_ids[:, 1] == first).any())
