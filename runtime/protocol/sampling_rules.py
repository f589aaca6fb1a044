"""Sampling rules of requests as sent to a drafter: a row of numbers per slot, and tokens whose logits are changed."""

from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

MOST_BIASED = 64
"""Maximum number of biased or banned tokens that are sent for a request, largest changes first. Leaving tokens out
costs only speed."""


class RuleKinds(IntFlag):
    """Kinds of sampling rules that a drafter must apply."""

    NUMBERS = 1
    LISTED = 2
    """Some tokens are biased or banned, or only listed tokens are allowed."""
    PENALTIES = 4
    """Penalties depend on the token history."""

    @classmethod
    def every(cls) -> "RuleKinds":
        """Returns the flags of all kinds."""
        return cls.NUMBERS | cls.LISTED | cls.PENALTIES


class RuleColumns(NamedTuple):
    """Columns of `SamplingRules.numbers`, by name; the defaults are the values of a request without rules."""

    top_k: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    num_prompt_tokens: float = 0.0
    only_listed: float = 0.0
    """1 if only the listed tokens are allowed."""


NUM_RULES = len(RuleColumns._fields)


class SamplingRules(NamedTuple):
    """Sampling rules of all slots."""

    numbers: Tensor
    """float32 [num_slots, NUM_RULES]: columns as in `RuleColumns`."""
    token_ids: Tensor
    """int64 [num_slots, MOST_BIASED]: listed tokens, padded with -1."""
    biases: Tensor
    """float32 [num_slots, MOST_BIASED]: values added to the listed tokens' logits; -inf bans a token."""


def no_rules(num_slots: int, device: torch.device | str = "cpu") -> SamplingRules:
    """Returns rules of `num_slots` slots that have no effect."""
    numbers = torch.empty(num_slots, NUM_RULES, device=device)
    for column, value in enumerate(RuleColumns()):
        # Columns are filled on the device, because uploading them from pageable memory would wait for the device.
        numbers[:, column].fill_(value)
    token_ids = torch.full((num_slots, MOST_BIASED), -1, dtype=torch.int64, device=device)
    return SamplingRules(numbers, token_ids, torch.zeros(num_slots, MOST_BIASED, device=device))
