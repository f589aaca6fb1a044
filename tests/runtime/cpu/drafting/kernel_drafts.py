"""Rounds that go through a channel and are answered by drafters on the CPU's kernels."""

import pytest
import torch

from tests.near_ties import ROUNDING, check_same_trees
from tests.needs import needs
from tests.runtime.draft_world import MIXED, NUM_SLOTS, VOCAB, channel_spec
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import NUM_BINS
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.protocol.messages import RoundHeader

WITH_RULE = pytest.mark.parametrize(
    "with_rule", [pytest.param(False, id="whole"), pytest.param(True, id="rule", marks=needs("adaptive"))]
)


def assert_same(tree, expected):
    largest = float(expected.scores[expected.scores.isfinite()].abs().max())
    check_same_trees(tree, expected, ROUNDING + 1e-5 * largest)


def reply_of(drafter, with_rule, spoil=lambda outcome: None):
    """Reply of a drafter to a round with one prompt chunk and two decodes, all three of which request a tree."""
    channel = InProcessChannel(channel_spec(drafter.speculation, drafter.head.taps_size))
    worker = DraftWorker(drafter)
    worker.attach("only", channel.attach(2))
    end, generator = channel.verifier_end, torch.Generator().manual_seed(1)
    outcome = end.acquire_outcome(1.0)
    for field in (outcome.decode_token_ids, outcome.chunk_next_token_ids, end.token_ids):
        field.copy_(torch.randint(0, VOCAB, field.shape, generator=generator))
    for field in (outcome.decode_taps, outcome.chunk_taps):
        field.copy_(torch.randn(field.shape, generator=generator))
    outcome.block_tables.copy_(1 + torch.arange(outcome.block_tables.numel()).view_as(outcome.block_tables))
    outcome.chunk_slots[0], outcome.chunk_positions[0], outcome.chunk_lens[0] = 2, 0, 7
    outcome.decode_slots[:2], outcome.decode_positions[:2] = torch.tensor([0, 1]), 0
    outcome.decode_num_tokens[:2] = torch.tensor([1, 2])
    outcome.proposal_slots[:3] = torch.tensor([2, 0, 1])
    outcome.committed_lens[:3] = torch.tensor([2, 3, 8])
    outcome.epochs.copy_(torch.arange(NUM_SLOTS))
    outcome.temperatures.copy_(torch.tensor(MIXED))
    outcome.growth_limits.copy_(torch.tensor([0.2, 0.02]))
    outcome.acceptance_table.copy_(torch.linspace(0.1, 0.9, 2 * NUM_BINS).view(2, -1))
    RoundHeader(0, 2, 1, 3, drafter.speculation.max_path - 1, 8, int(with_rule)).write(outcome.header)
    spoil(outcome)
    round_number = end.publish_outcome()
    assert worker.run_once()
    return end.wait_reply(round_number, 1.0)
