"""Shadow drafting: computes what a head would have drafted in the rounds of recorded requests.

The verifier's text does not depend on the drafter, so a recorded request decides the outcome of every draft: a chain is
accepted as far as it equals the text. Greedy chains are used as a proxy for served drafts, trees included.
"""

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.training.family import Family, TrainedHead

CONTEXT_BUCKETS = (256, 1024, 4096)
"""Upper bounds of the buckets, in tokens of context; the last bucket has none."""
MOST_TOKENS = 2048
"""Most tokens of a request that are drafted for, counted from its end."""


class Drafted(NamedTuple):
    """Rounds of a head over one request and the tokens they emitted, by bucket of context."""

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
    """Drafts over the answer of a request; returns None if the answer is too short.

    Args:
        columns: columns of the record's taps that the head reads; None for all.
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
