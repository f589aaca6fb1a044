"""Shadow drafting: computes what a head would have drafted in the rounds of recorded requests.

The verifier's text does not depend on the drafter, so the text of a recorded request determines which drafts would be
accepted: a chain is accepted as far as it equals the text. Greedy chains are computed as a substitute for the drafts
    that are served, which may also be trees.
"""

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.training.family import Family, TrainedHead

CONTEXT_BUCKETS = (256, 1024, 4096)
"""Upper bounds of the buckets of context length in tokens; the last bucket has no upper bound."""
MOST_TOKENS = 2048
"""Maximum number of tokens of a request for which a head drafts, counted from the request's end."""


class Drafted(NamedTuple):
    """By bucket of context length: the number of rounds that a head needs for a request, and the number of tokens that
    these rounds emit.
    """

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
    # The chain at index i drafts the tokens after the token at i + 1, which is the root of the round.
    index = max(int(learnt.int().argmax()) - 1, 0)
    rounds: dict[int, int] = {}
    tokens: dict[int, int] = {}
    while index < len(accepted):
        bucket = bisect_left(CONTEXT_BUCKETS, record.position + begin + index + 2)
        rounds[bucket] = rounds.get(bucket, 0) + 1
        tokens[bucket] = tokens.get(bucket, 0) + accepted[index] + 1
        index += accepted[index] + 1
    return Drafted(rounds, tokens) if rounds else None
