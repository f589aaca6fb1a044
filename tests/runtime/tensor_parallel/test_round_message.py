"""A pass of the model as bytes: everything arrives as it was, and nothing that is no part of a pass is unpacked."""

import pickle

import pytest
import torch

from wingbeat.runtime.round.rows import Rows, Segment
from wingbeat.runtime.tensor_parallel.round_message import GraphOrder, PoolShape, RoundMessage, pack, unpack


def test_every_part_of_a_pass_arrives():
    ids = torch.arange(5)[None]
    words = torch.tensor([[[1], [3]]])
    segment = Segment(3, 1, 2, ids[:, ::2], ids[0, :1], ids[:, 1:3], words)
    segments = [segment, segment._replace(mask_words=None)]
    rows = Rows(ids, ids + 7, ids[0], segments, [], torch.tensor([0, 4]))
    moves = ((ids[0], ids[0] + 1),)
    sent = RoundMessage(PoolShape(1, 20, 16), moves, rows=rows)
    got = unpack(*pack(sent))
    assert got.pool == PoolShape(1, 20, 16)
    first, second = got.rows.segments
    assert (first.start, first.row_starts, second.mask_words) == (3, None, None)
    for arrived, part in (
        (got.rows.positions, ids + 7),
        (got.rows.logits_rows, rows.logits_rows),
        (first.block_tables, ids[:, ::2]),
        (first.mask_words, words),
        (first.positions, ids[:, 1:3]),
        (got.moves[0][1], ids[0] + 1),
    ):
        assert torch.equal(arrived, part)


def test_a_step_of_a_graph_arrives_without_a_number_of_a_tensor():
    sent = RoundMessage(None, (), (("adapters", ((), None)),), order=GraphOrder("replay", 3))
    form, numbers = pack(sent)
    assert len(numbers) == 0
    assert unpack(form, numbers) == sent


def test_a_message_that_names_anything_else_is_refused():
    with pytest.raises(pickle.UnpicklingError, match=r"must not contain builtins\.eval"):
        unpack(pickle.dumps(eval), torch.zeros(0, dtype=torch.uint8))
