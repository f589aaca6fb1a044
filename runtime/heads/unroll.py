"""Training-time test of EAGLE-3: unrolls a head over its own predictions during training, in the same way as in
drafting.

Step j of the chain that starts at index i reads token i + 1 + j and predicts token i + 2 + j. All chains run at once:
the chain of index i stays at row i, and at each step the token that it reads is one position later. Source: EAGLE-3
(arXiv 2503.01840), section 3.2 and figure 6.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.heads.contract import DraftHead


@dataclass
class UnrolledStep:
    """A step of the followed chains of a batch; N chains per sequence."""

    head: DraftHead
    offset: int
    """Column i of the logits predicts the token at index i + offset."""
    hidden: Tensor
    """Input of the logits: [batch, N, H], or [chains, H] if only some chains are followed.

    In EAGLE-1 this is the predicted feature at index i + offset - 1.
    """
    chains: Tensor | None
    """int64 [chains]: flat indices of the followed chains, out of batch * N; None if all chains are followed."""
    kept: Tensor | None = None
    """bool [chains], or [batch * N]: the chains to follow after this step, set by the caller; None keeps all."""

    @property
    def logits(self) -> Tensor:
        """Logits [..., draft_vocab_size] of the step, computed on access."""
        return self.head.logits(self.hidden)


class _SequenceChains(NamedTuple):
    """Chains of one sequence, in a batch whose positions are flattened."""

    rows: slice
    """Positions that the sequence's chains attend to."""
    chains: slice
    """Range of the sequence's chains among all followed chains."""
    future: Tensor
    """bool [chains, rows]: True for positions after the start of the row's chain."""


class ChainAttention:
    """Attention of the chains. Step j of the chain that starts at index i sees the keys computed from the verifier's
    features up to index i, and the chain's own keys of steps 1 to j.

    These are the same keys as in drafting, where the keys of the committed prefix are computed from the verifier's
    features, and the keys of a drafted token's ancestors from features that the head predicted.

    Args:
        scaling: factor of query-key products.
        every: all chains of each sequence.
        followed: the followed chains of each sequence.
    """

    def __init__(self, scaling: float, every: list[_SequenceChains], followed: list[_SequenceChains]) -> None:
        self.scaling = scaling
        self._every, self._followed = every, followed
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def follow(self, kept: Tensor, followed: list[_SequenceChains]) -> None:
        """Drops the other chains' own keys and values. `kept`: bool, of the chains that were followed so far."""
        self._followed = followed
        for part in (self._keys, self._values):
            part[1:] = [one[kept] for one in part[1:]]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Query [.., Hq, D], key [.., Hkv, D] and value [.., Hkv, Dv] of the next step -> [.., Hq, Dv].

        The first step passes keys and values of every position; later steps pass only those of the followed chains.
        """
        shape = query.shape
        query, key, value = (part.flatten(0, -3) for part in (query, key, value))
        self._keys.append(key)
        self._values.append(value)
        sequences = self._every if len(query) == self._every[-1].chains.stop else self._followed
        # Sequences are processed one at a time: the scores of a sequence stay in a CPU's cache, and shorter sequences
        # need no padding.
        return torch.cat([self._of_sequence(query, one) for one in sequences]).view(*shape[:-1], -1)

    def _of_sequence(self, query: Tensor, sequence: _SequenceChains) -> Tensor:
        """Attention output [chains, Hq, Dv] of one sequence's chains."""
        chains = sequence.chains
        # Query heads that share a key head are contiguous: [Hkv, groups, chains, D].
        groups = query.shape[1] // self._keys[0].shape[1]
        query = query[chains].unflatten(1, (-1, groups)).permute(1, 2, 0, 3) * self.scaling
        keys, values = (part[0][sequence.rows].transpose(0, 1) for part in (self._keys, self._values))
        own_keys, own_values = (
            [one[chains].transpose(0, 1).unsqueeze(1) for one in part[1:]] for part in (self._keys, self._values)
        )
        true_scores = (query.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (groups, -1))
        true_scores = true_scores.masked_fill(sequence.future, float("-inf"))
        own_scores = [(query * own).sum(-1, keepdim=True) for own in own_keys]
        weights = torch.cat([true_scores, *own_scores], dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
        true_weights, *own_weights = weights.split([keys.shape[1]] + [1] * len(own_keys), dim=-1)
        mixed = (true_weights.flatten(1, 2) @ values).unflatten(1, (groups, -1))
        for weight, own in zip(own_weights, own_values, strict=True):
            mixed = mixed + weight * own
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def unroll(
    head: DraftHead, tokens: Tensor, taps: Tensor, num_steps: int, chains: Tensor | None = None
) -> Iterator[UnrolledStep]:
    """Run all chains of `num_steps` steps that fit into the sequences. The chains read the sequences' tokens.

    As long as the head's greedy drafts equal the sequence's tokens, a chain computes exactly what greedy drafting does.
    A caller that sets a step's `kept` ends the other chains; without a chain left, the iteration ends.

    Args:
        head: the head to unroll.
        tokens: int64 [batch, length].
        taps: [batch, length, num_taps * Ht].
        num_steps: steps per chain.
        chains: int64 [chains], ascending: flat indices of the chains to follow, out of batch * N; None follows all
            chains.
    """
    batch, num_chains = tokens.shape[0], tokens.shape[1] - num_steps - 1

    def read(rows: Tensor, step: int) -> Tensor:
        """Selects from rows [batch, N, ..] the rows that a step reads.

        The first step reads all rows, because later steps see their keys; later steps read the followed chains only.
        """
        if chains is None:
            return rows
        return rows.flatten(0, 1)[chains] if step else rows.flatten(0, 1)

    every = _by_sequence(batch, num_chains, torch.arange(batch * num_chains, device=tokens.device))
    followed = every if chains is None else _by_sequence(batch, num_chains, chains)
    attends = [ChainAttention(head.scaling, every, followed) for _ in range(head.num_layers)]
    positions = torch.arange(num_chains, device=tokens.device).expand(batch, num_chains)
    # Under autocast `fc` returns bfloat16; the conversion keeps the residual stream in the weights' precision.
    features = read(head.fuse(taps[:, :num_chains].to(head.dtype)).to(head.dtype), 0)
    for index in range(num_steps):
        now = slice(1 + index, 1 + index + num_chains)
        rotary = head.rotary(read(positions, index) + index)
        hidden = head.run_layers(read(tokens[:, now], index), features, rotary, attends, None if index else chains)
        step = UnrolledStep(head, index + 2, hidden, chains)
        yield step
        features = head.feedback(hidden)
        if step.kept is not None:
            if chains is None:
                features, chains = features.flatten(0, 1), torch.arange(batch * num_chains, device=tokens.device)
            features, chains = features[step.kept], chains[step.kept]
            if not len(chains):
                return
            followed = _by_sequence(batch, num_chains, chains)
            for attend in attends:
                attend.follow(step.kept, followed)


def _by_sequence(batch: int, num_chains: int, chains: Tensor) -> list[_SequenceChains]:
    """Splits the followed chains by sequence; a sequence without followed chains is left out."""
    counts = torch.bincount(chains // num_chains, minlength=batch).tolist()
    found, start = [], 0
    for sequence, count in enumerate(counts):
        if count:
            begins = chains[start : start + count] - sequence * num_chains
            seen = int(begins[-1]) + 1
            future = torch.arange(seen, device=chains.device) > begins[:, None]
            rows = slice(sequence * num_chains, sequence * num_chains + seen)
            found.append(_SequenceChains(rows, slice(start, start + count), future))
            start += count
    return found


@torch.no_grad()
def matches(head: DraftHead, token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
    """Whether the greedy draft of each step equals the sequence's token -> bool [batch, N, num_steps]."""
    hits = []
    for step in unroll(head, token_ids, taps, num_steps):
        drafted = head.draft_token_ids[step.logits.argmax(-1)]
        hits.append(drafted == token_ids[:, step.offset : step.offset + drafted.shape[1]])
    return torch.stack(hits, dim=-1)
