"""How many tokens a round yields: greedy chain drafting, simulated offline on the verifier's own greedy text."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier

Matches = Callable[[Tensor, Tensor, int], Tensor]
"""From texts int64 [batch, length], their taps and a length of chains to whether drafts are right: `Family.matches`."""


class HeadAcceptance(NamedTuple):
    """Outcome of greedy chain drafting over a set of prompts."""

    length: float
    """Tokens per round: the accepted ones and the bonus token."""
    by_depth: list[float]
    """Share of drafts at each depth that are right, given that all before them were."""
    num_rounds: int

    @classmethod
    def of_counts(cls, accepted: Sequence[float], drafted: Sequence[float], num_rounds: int) -> "HeadAcceptance":
        """From the drafts at each depth that were right, and those whose predecessors all were."""
        by_depth = [round(right / max(1, tried), 3) for right, tried in zip(accepted, drafted, strict=True)]
        return cls(round(1 + sum(accepted) / max(1, num_rounds), 3), by_depth, num_rounds)


class ChainCount:
    """Rounds of greedy chains over texts, counted.

    Args:
        num_steps: length of the chains.
    """

    def __init__(self, num_steps: int) -> None:
        self._drafted, self._accepted, self._rounds = torch.zeros(num_steps), torch.zeros(num_steps), 0

    def add(self, hits: Tensor, begin: int, end: int) -> None:
        """The rounds that commit the tokens from `begin` to `end` of one text.

        Args:
            hits: bool [N, num_steps], as `Family.matches` gives them.
        """
        committed = begin
        while committed < end:
            # The round behind the committed token c uses the chain of index c - 1, whose features are known.
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
    """Rounds of greedy chains over recorded answers, without a verifier.

    Exact where the answer was written greedily; behind a sampled one, a draft counts where the sample equals it.
    """
    count = ChainCount(num_steps)
    for record in records:
        begin, end = max(1, first_learnt(record)), len(record.token_ids) - num_steps - 2
        if begin < end:
            count.add(matches(record.token_ids.long()[None], record.taps[None], num_steps)[0], begin, end)
    return count.acceptance


def first_learnt(record: Record) -> int:
    """The first token of a record that is to be learnt; its length where none is."""
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

    Exact for greedy decoding, up to rounding that depends on batch shapes: a draft counts only while all before it
    equal the verifier's tokens, and there the head has read those same tokens.

    Args:
        prompts: int64 [num_prompts, prompt_length].
    """
    start = prompts.shape[1]
    greedy = torch.zeros(len(prompts))
    # Chains of the last tokens need text to be compared with.
    text = verifier.continue_text(prompts, start + num_tokens + num_steps + 1, greedy)
    hits = matches(text, verifier.observe(text).taps, num_steps).cpu()
    count = ChainCount(num_steps)
    for row in hits:
        count.add(row, start, start + num_tokens)
    return count.acceptance
