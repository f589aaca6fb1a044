"""How many tokens a round yields: greedy chain drafting, simulated offline on the verifier's own greedy text."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier


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


@torch.no_grad()
def greedy_acceptance(
    matches: Callable[[Tensor, Tensor, int], Tensor],
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
        matches: from text int64 [batch, length], its taps and a length of chains to whether a head's drafts are right,
            see `Family.matches`.
        prompts: int64 [num_prompts, prompt_length].
    """
    start = prompts.shape[1]
    greedy = torch.zeros(len(prompts))
    # Chains of the last tokens need text to be compared with.
    text = verifier.continue_text(prompts, start + num_tokens + num_steps + 1, greedy)
    hits = matches(text, verifier.observe(text).taps, num_steps).cpu()
    drafted, accepted, rounds = torch.zeros(num_steps), torch.zeros(num_steps), 0
    for row in hits:
        # The round that drafts after the committed token c uses the chain of index c - 1, whose features are known.
        committed = start
        while committed < start + num_tokens:
            chain = row[committed - 1]
            count = int(chain.long().cumprod(0).sum())
            accepted[:count] += 1
            drafted[: count + 1] += 1
            committed += count + 1
            rounds += 1
    return HeadAcceptance.of_counts(accepted.tolist(), drafted.tolist(), rounds)
