"""Tokens that sequences have, by column of a drafter's logits: the torch reference against a plain loop."""

import pytest
import torch

from wingbeat.kernels.sampling.history import count_tokens, find_columns
from wingbeat.kernels.sampling.processors import Histories

pytestmark = [pytest.mark.usefixtures("poisoned_memory")]


def histories_of(width: int) -> Histories:
    """Histories of five slots, three of which have rows; with tokens outside the draft vocabulary and empty places."""
    generator = torch.Generator().manual_seed(width)
    token_ids = torch.randint(0, 60, (5, width + 3), generator=generator)[:, :width]
    token_ids[:, 3::7] = -1
    lens = torch.tensor([width, width + 9, min(3, width), 0, width // 2])
    return Histories(token_ids, lens, torch.tensor([2.0, 5.0, 9.0, 0.0, 1.0]), torch.tensor([4, 1, 2]))


def tables(num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables with values left over from an earlier round."""
    return torch.ones(3, num_columns, dtype=torch.bool), torch.full((3, num_columns), 7, dtype=torch.int32)


def draft_ids(num_columns: int) -> torch.Tensor:
    return torch.randperm(60, generator=torch.Generator().manual_seed(1))[:num_columns]


@pytest.mark.parametrize(("width", "num_columns"), [(40, 33), (5, 60), (13, 1)])
def test_counts_are_those_of_a_loop(width, num_columns):
    told, ids = histories_of(width), draft_ids(num_columns)
    in_prompt, in_output = tables(num_columns)
    count_tokens(told, *ids.sort(), in_prompt, in_output)
    prompts, outputs = torch.zeros_like(in_prompt), torch.zeros_like(in_output)
    for row, slot in enumerate(told.slots.tolist()):
        for step, token in enumerate(told.token_ids[slot, : int(told.lens[slot])].tolist()):
            if token in ids.tolist():
                column = ids.tolist().index(token)
                if step < told.num_prompt_tokens[slot]:
                    prompts[row, column] = True
                else:
                    outputs[row, column] += 1
    assert torch.equal(in_prompt, prompts)
    assert torch.equal(in_output, outputs)


def test_columns_are_found_by_token():
    ids = torch.tensor([30, 4, 9])
    assert find_columns(torch.tensor([[9, 4, 5], [31, -1, 30]]), *ids.sort()).tolist() == [[2, 1, -1], [-1, -1, 0]]
