"""Computes the tokens per round of greedy chain drafting, simulated without an engine on greedy text of the
verifier.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier

Matches = Callable[[Tensor, Tensor, int], Tensor]
"""Function (texts int64 [batch, length], taps, chain length) -> bool tensor: whether each draft is right; see
`Family.matches`.
"""


class HeadAcceptance(NamedTuple):
    """Result of greedy chain drafting over a set of prompts."""

    length: float
    """Tokens per round: accepted tokens plus the bonus token."""
    by_depth: list[float]
    """Acceptance at each depth: the share of right drafts among the drafts whose predecessors in the chain were all
    right.
    """
    num_rounds: int

    @classmethod
    def of_counts(cls, accepted: Sequence[float], drafted: Sequence[float], num_rounds: int) -> "HeadAcceptance":
        """Build from counts by depth. `accepted` counts right drafts whose predecessors are all right; `drafted` counts
        all drafts whose predecessors are right.
        """
        by_depth = [round(right / max(1, tried), 3) for right, tried in zip(accepted, drafted, strict=True)]
        return cls(round(1 + sum(accepted) / max(1, num_rounds), 3), by_depth, num_rounds)


class AcceptanceCounter:
    """Counts rounds of greedy chains over texts.

    Args:
        num_steps: length of the chains.
    """

    def __init__(self, num_steps: int) -> None:
        self._drafted, self._accepted, self._rounds = torch.zeros(num_steps), torch.zeros(num_steps), 0

    def add(self, hits: Tensor, begin: int, end: int) -> None:
        """Count the rounds that commit the tokens from `begin` up to `end` of one text.

        Args:
            hits: bool [N, num_steps], as returned by `Family.matches`.
            begin, end: range of token indices.
        """
        committed = begin
        while committed < end:
            # If token c is the last committed token, the next round's chain starts at index c - 1, the last index whose
            # features are known.
            count = int(hits[committed - 1].long().cumprod(0).sum())
            self._accepted[:count] += 1
            self._drafted[: count + 1] += 1
            committed += count + 1
            self._rounds += 1

    @property
    def acceptance(self) -> HeadAcceptance:
        """The result so far."""
        return HeadAcceptance.of_counts(self._accepted.tolist(), self._drafted.tolist(), self._rounds)


@torch.no_grad()
def recorded_acceptance(matches: Matches, records: Iterable[Record], num_steps: int) -> HeadAcceptance:
    """Count rounds of greedy chains over recorded answers, without a verifier.

    The count is exact for greedy answers; in a sampled answer a draft counts as right if it equals the sampled token.
    """
    count = AcceptanceCounter(num_steps)
    for record in records:
        begin, end = max(1, first_learnt(record)), len(record.token_ids) - num_steps - 2
        if begin < end:
            count.add(matches(record.token_ids.long()[None], record.taps[None], num_steps)[0], begin, end)
    return count.acceptance


def first_learnt(record: Record) -> int:
    """Index of a record's first token that is to be learnt; the record's length if there is no such token."""
    learnt = record.loss_mask.nonzero()
    return int(learnt[0]) if len(learnt) else len(record.token_ids)


@torch.no_grad()
def greedy_acceptance(
    matches: Matches,
    verifier: FrozenVerifier,
    prompts: Tensor,
    *,
    num_tokens: int,
    num_steps: int,
) -> HeadAcceptance:
    """Simulate rounds of greedy chains of `num_steps` over `num_tokens` new tokens per prompt.

    Up to rounding that depends on batch shapes, the result is exact for greedy decoding. The head reads the verifier's
    tokens instead of its own drafts, but a draft counts only if all previous drafts of its chain equal these tokens.

    Args:
        matches: see `Matches`.
        verifier: the verifier.
        prompts: int64 [num_prompts, prompt_length].
        num_tokens: new tokens per prompt.
        num_steps: length of the chains.
    """
    start = prompts.shape[1]
    greedy = torch.zeros(len(prompts))
    # More tokens are generated than are counted, so that the chains that start at the last counted tokens have text
    # with which they can be compared.
    text = verifier.continue_text(prompts, start + num_tokens + num_steps + 1, greedy)
    hits = matches(text, verifier.observe(text).taps, num_steps).cpu()
    count = AcceptanceCounter(num_steps)
    for row in hits:
        count.add(row, start, start + num_tokens)
    return count.acceptance
