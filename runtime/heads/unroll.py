"""Training-time test: a head unrolled over its own predictions, as it will be used.

Step j of the chain that starts at index i reads token i + 1 + j and predicts token i + 2 + j. All chains run at once:
index i keeps its place while the tokens shift. Source: EAGLE-3 (arXiv 2503.01840), section 3.2 and figure 6.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.heads.contract import Attend, DraftHead


class UnrolledStep(NamedTuple):
    """One step of all chains of a batch; N chains per sequence."""

    head: DraftHead
    offset: int
    """Column i of the logits predicts the token at index i + offset."""
    hidden: Tensor
    """[batch, N, H] that the logits are made of: in EAGLE-1 the prediction of the feature at index i + offset - 1."""

    @property
    def logits(self) -> Tensor:
        """[batch, N, draft_vocab_size], made when they are asked for."""
        return self.head.logits(self.hidden)


class ChainAttention:
    """Attention of step j at index i: the true features' keys up to i, then the chain's own keys of steps 1..j.

    That is what drafting does: the committed prefix is recomputed from true features, and a drafted token sees its
    ancestors' keys, which were made from predicted features.

    Args:
        scaling: of the products of queries and keys.
    """

    def __init__(self, scaling: float) -> None:
        self.scaling = scaling
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, N, Hq, D], key and value [B, N, Hkv, D] of the next step -> [B, N, Hq, D]."""
        groups = query.shape[2] // key.shape[2]
        self._keys.append(key.transpose(1, 2).unsqueeze(2))
        self._values.append(value.transpose(1, 2).unsqueeze(2))
        query = query.transpose(1, 2).unflatten(1, (key.shape[2], groups)) * self.scaling
        length = query.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        true_scores = (query @ self._keys[0].transpose(-1, -2)).masked_fill(future, float("-inf"))
        own_scores = [(query * own).sum(-1, keepdim=True) for own in self._keys[1:]]
        weights = torch.cat([true_scores, *own_scores], dim=-1).float().softmax(-1).to(value.dtype)
        true_weights, *own_weights = weights.split([length] + [1] * len(own_scores), dim=-1)
        mixed = true_weights @ self._values[0]
        for weight, own in zip(own_weights, self._values[1:], strict=True):
            mixed = mixed + weight * own
        return mixed.flatten(1, 2).transpose(1, 2)


def unroll(
    head: DraftHead, tokens: Tensor, taps: Tensor, num_steps: int, axes: Tensor | None = None
) -> Iterator[UnrolledStep]:
    """Run every chain of `num_steps` steps that fits into the sequences, with the sequences' own tokens.

    Where all tokens of a chain so far equal the head's choices, this is exactly greedy drafting.

    Args:
        tokens: int64 [batch, length], or their embeddings [batch, length, H].
        taps: [batch, length, num_taps * Ht].
        axes: int64 [3, batch, length], where the tokens stand in grids; None where they are a text.
    """
    num_chains = tokens.shape[1] - num_steps - 1
    attends: list[Attend] = [ChainAttention(head.scaling) for _ in range(head.num_layers)]
    positions = torch.arange(num_chains, device=tokens.device)
    # Under autocast fc gives bfloat16; the residual stream stays in the weights' precision.
    features = head.fuse(taps[:, :num_chains].to(head.dtype)).to(head.dtype)
    for step in range(num_steps):
        now = slice(1 + step, 1 + step + num_chains)
        rotary = head.rotary(positions + step) if axes is None else head.rotary_in_grids(axes[:, :, now] - 1)
        hidden = head.run_layers(tokens[:, now], features, rotary, attends)
        yield UnrolledStep(head, step + 2, hidden)
        features = head.feedback(hidden)


@torch.no_grad()
def matches(head: DraftHead, token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
    """Whether the greedy draft of each step is the sequence's token -> bool [batch, N, num_steps]."""
    hits = []
    for step in unroll(head, token_ids, taps, num_steps):
        drafted = head.draft_token_ids[step.logits.argmax(-1)]
        hits.append(drafted == token_ids[:, step.offset : step.offset + drafted.shape[1]])
    return torch.stack(hits, dim=-1)
