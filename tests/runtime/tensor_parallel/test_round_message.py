"""A pass of the model as bytes: everything arrives as it was, and nothing that is no part of a pass is unpacked."""

import pickle

import pytest
import torch

from wingbeat.runtime.tensor_parallel.round_message import PoolShape, RoundMessage, pack, unpack
from wingbeat.runtime.verifier.layers.attention import AttentionMetadata, AttentionSegment
from wingbeat.runtime.verifier.layers.packing import Tiles


def test_every_part_of_a_pass_arrives():
    ids = torch.arange(5)[None]
    mask = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    tiles = Tiles.of(torch.tensor([[True, False], [True, True]]))
    segment = AttentionSegment(3, 1, 2, ids[:, ::2], {0: mask, 4: None}, slice(2, 5), tiles, tile_masks={})
    attention = AttentionMetadata([], ids[0], [segment, segment._replace(tiles=None)])
    moves = ((ids[0], ids[0] + 1),)
    sent = RoundMessage(ids, ids + 7, torch.tensor([0, 4]), attention, True, PoolShape(1, 20, 16), moves)
    got = unpack(*pack(sent))
    assert (got.is_packed, got.pool) == (True, PoolShape(1, 20, 16))
    first, second = got.attention.segments
    assert (first.start, first.run, first.masks[4], second.tiles) == (3, slice(2, 5), None, None)
    for arrived, part in (
        (got.positions, ids + 7),
        (got.logits_rows, sent.logits_rows),
        (first.block_tables, ids[:, ::2]),
        (first.masks[0], mask),
        (first.tiles.rows, tiles.rows),
        (got.moves[0][1], ids[0] + 1),
    ):
        assert torch.equal(arrived, part)


def test_a_message_that_names_anything_else_is_refused():
    with pytest.raises(pickle.UnpicklingError, match=r"no place for builtins\.eval"):
        unpack(pickle.dumps(eval), torch.zeros(0, dtype=torch.uint8))
