"""How many tokens a round yields: greedy chain drafting, simulated offline on the verifier's own greedy text."""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.drafters.eagle_head import EagleHead
from wingbeat.runtime.training.unroll import matches
from wingbeat.runtime.training.verifier import FrozenVerifier


class Acceptance(NamedTuple):
    """Outcome of greedy chain drafting over a set of prompts."""

    length: float
    """Tokens per round: the accepted ones and the bonus token."""
    by_depth: list[float]
    """Share of drafts at each depth that are right, given that all before them were."""
    num_rounds: int


@torch.no_grad()
def greedy_acceptance(
    head: EagleHead, verifier: FrozenVerifier, prompts: Tensor, *, num_tokens: int, num_steps: int
) -> Acceptance:
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
    taps = verifier.observe(text).taps.to(head.fc.weight.dtype)
    hits = matches(head, text, taps, num_steps).cpu()
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
    length = 1 + float(accepted.sum()) / rounds
    by_depth = (accepted / drafted.clamp_min(1)).tolist()
    return Acceptance(round(length, 3), [round(share, 3) for share in by_depth], rounds)
