"""Drafting in shadow: what a head would have drafted in the rounds of requests that were served, had it been asked.

The verifier's text does not depend on who drafts, so a recorded request says what every draft would have come to: a
chain of drafts is accepted as far as it equals the text. Greedy chains stand for what is served, trees included.
"""

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.training.family import Family, TrainedHead

CONTEXT_BUCKETS = (256, 1024, 4096)
"""Tokens of context: what one bucket ends with; the last has no end."""
MOST_TOKENS = 2048
"""Of a request that is drafted for: its last ones."""


class Drafted(NamedTuple):
    """A head's rounds over one request, by bucket of context."""

    rounds: dict[int, int]
    tokens: dict[int, int]

    @property
    def length(self) -> float:
        """Tokens per round."""
        return sum(self.tokens.values()) / max(1, sum(self.rounds.values()))


@torch.no_grad()
def draft_in_shadow(
    family: Family, head: TrainedHead, record: Record, chain: int, columns: Tensor | None = None
) -> Drafted | None:
    """Rounds over the answer of a request; None where that is too short.

    Args:
        columns: of the record's taps, those that the head reads; None where it reads all.
    """
    begin = max(0, len(record.token_ids) - MOST_TOKENS)
    taps = record.taps[begin:] if columns is None else record.taps[begin:, columns]
    token_ids, learnt = record.token_ids[begin:].long(), record.loss_mask[begin:]
    if not bool(learnt.any()) or len(token_ids) < chain + 3:
        return None
    hits = family.matches(head, token_ids[None], taps[None].float(), chain)[0]
    accepted = hits.long().cumprod(1).sum(1).tolist()
    # The chain at index i drafts behind the token at i + 1, which is the root of the round.
    index = max(int(learnt.int().argmax()) - 1, 0)
    rounds: dict[int, int] = {}
    tokens: dict[int, int] = {}
    while index < len(accepted):
        bucket = bisect_left(CONTEXT_BUCKETS, record.position + begin + index + 2)
        rounds[bucket] = rounds.get(bucket, 0) + 1
        tokens[bucket] = tokens.get(bucket, 0) + accepted[index] + 1
        index += accepted[index] + 1
    return Drafted(rounds, tokens) if rounds else None
