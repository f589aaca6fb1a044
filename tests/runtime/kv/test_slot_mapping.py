"""Addresses of stored positions in the pool."""

import torch

from wingbeat.kernels.kv.reference import slot_mapping

TABLES = torch.tensor([[5, 2, 9], [1, 7, 3]])


def test_a_position_lies_in_its_block_at_its_offset():
    positions = torch.tensor([[0, 3, 4, 11], [7, 8, 9, 1]])
    expected = [[5 * 4, 5 * 4 + 3, 2 * 4, 9 * 4 + 3], [7 * 4 + 3, 3 * 4, 3 * 4 + 1, 1 * 4 + 1]]
    assert slot_mapping(TABLES, positions, 4).tolist() == expected


def test_what_does_not_count_goes_to_block_0_wherever_it_lies():
    positions = torch.tensor([[-1, 12, 5, 400], [2, -9, 12, 6]])
    counted = torch.tensor([[False, False, True, False], [True, False, False, True]])
    assert slot_mapping(TABLES, positions, 4, counted).tolist() == [[0, 0, 9, 0], [6, 0, 0, 30]]
