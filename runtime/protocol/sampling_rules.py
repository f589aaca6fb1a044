"""Requests' own rules of sampling as a drafter is told them: a row per slot, and tokens whose logits are changed."""

from enum import IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

MOST_BIASED = 64
"""Tokens of a request whose biases and bans are told; those of the largest are. What is left out costs speed alone."""


class RuleKinds(IntFlag):
    """What a drafter has to look at."""

    NUMBERS = 1
    LISTED = 2
    """Tokens are biased or banned, or the only ones."""
    PENALTIES = 4
    """Histories count."""

    @classmethod
    def every(cls) -> "RuleKinds":
        """All of it."""
        return cls.NUMBERS | cls.LISTED | cls.PENALTIES


class RuleColumns(NamedTuple):
    """Columns of `SamplingRules.numbers`, by name; as they are where a request has no rule."""

    top_k: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    num_prompt_tokens: float = 0.0
    only_listed: float = 0.0
    """1 where nothing may follow but the tokens that are listed."""


NUM_RULES = len(RuleColumns._fields)


class SamplingRules(NamedTuple):
    """Of every slot."""

    numbers: Tensor
    """float32 [num_slots, NUM_RULES]: `RuleColumns`."""
    token_ids: Tensor
    """int64 [num_slots, MOST_BIASED]: -1 behind those that are listed."""
    biases: Tensor
    """float32 [num_slots, MOST_BIASED]: what is added to their logits; -inf bans."""


def prompt_lens(rules: SamplingRules) -> Tensor:
    """float32 [num_slots]: a view of them."""
    return rules.numbers[:, RuleColumns._fields.index("num_prompt_tokens")]


def no_rules(num_slots: int, device: torch.device | str = "cpu") -> SamplingRules:
    """Rows of slots that have none."""
    numbers = torch.empty(num_slots, NUM_RULES, device=device)
    for column, value in enumerate(RuleColumns()):
        # Filled, not uploaded: a copy from pageable memory would wait for the device.
        numbers[:, column].fill_(value)
    token_ids = torch.full((num_slots, MOST_BIASED), -1, dtype=torch.int64, device=device)
    return SamplingRules(numbers, token_ids, torch.zeros(num_slots, MOST_BIASED, device=device))
