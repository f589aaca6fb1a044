"""Walks over the slots of a block. A walk computes candidate tokens from the slots' hidden states and the tokens
drafted before.

A walk visits the levels of a tree in order and carries state from each level to the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wingbeat.runtime.drafters.growth import Growth, Level, Roots, Rules
from wingbeat.runtime.heads.contract import Continuations
from wingbeat.runtime.one_pass.backbone import Backbone
from wingbeat.runtime.one_pass.config import LatticeConfig, MarkovConfig, MarkovKind
from wingbeat.runtime.protocol.messages import TokenTree

ChooseCandidates = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Function (logits [num_reqs, num_drafted, draft_vocab_size], K) -> for each level of the tree, target ids int64
[num_reqs, num_levels, K] of the K chosen tokens, and their scores. A constant may be added to all scores of a slot.
"""


class Walk(ABC):
    """Candidate tokens after the nodes of a block's trees, level by level."""

    @abstractmethod
    def step(self, depth: int, token_ids: Tensor, parents: Tensor) -> Continuations:
        """Returns the candidate tokens after some nodes.

        Args:
            depth: depth of the nodes, 0 for the anchors; must increase by 1 per call.
            token_ids: int64 [num_reqs, width]: target ids of the nodes' tokens.
            parents: int64 [num_reqs, width]: index of each node's parent among the nodes of the previous call.
        """


def grow_along(growth: Growth, roots: Roots, walk: Walk, rules: Rules = ()) -> TokenTree:
    """Grow one tree per root along a walk, whose slots for all levels were computed in one pass."""

    def expand(level: Level) -> Continuations:
        return walk.step(level.depth, level.token_ids, level.parents)

    no_parents = torch.zeros_like(roots.token_ids)[:, None]
    return growth.grow(roots, walk.step(0, roots.token_ids[:, None], no_parents), expand, rules)


class MarginalWalk(Walk):
    """Independent slots: the candidate tokens after a node depend only on the node's depth.

    Args:
        logits: [num_reqs, num_drafted, draft_vocab_size].
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.split(1, dim=1)

    def step(self, depth: int, token_ids: Tensor, parents: Tensor) -> Continuations:
        """See `Walk.step`."""
        return Continuations(self.logits[depth])


class MarkovHead(nn.Module):
    """DSpark's correction of a slot's logits depending on the previous token, and its prediction of acceptance.

    Source: arXiv 2607.05147. Dimension names: r rank.
    """

    def __init__(self, config: MarkovConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        rank, kind = config.rank, config.kind if config.rank else MarkovKind.VANILLA
        self.config = config
        self.markov_w1 = nn.Embedding(vocab_size, rank) if rank else None
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False) if rank else None
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind is MarkovKind.GATED else None
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank) if kind is MarkovKind.RNN else None
        inputs = hidden_size + (rank if config.confidence_reads_token else 0)
        self.confidence = nn.Linear(inputs, 1) if config.has_confidence else None

    def correction(self, hidden: Tensor, embedded: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the vector that W2 multiplies, and the next state, each [num_reqs, width, r].

        Args:
            hidden: [num_reqs, width, H]: hidden states of the slot.
            embedded: [num_reqs, width, r]: W1 embeddings of the previous tokens.
            state: state that the call for the preceding slot returned; None in the first call.
        """
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, None
        if self.joint_proj is None:
            return embedded, None
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)


class MarkovWalk(Walk):
    """DSpark: the logits of each slot are corrected depending on the token drafted before it.

    Args:
        logits: [num_reqs, num_drafted, draft_vocab_size].
        hidden: [num_reqs, num_drafted, H].
    """

    def __init__(self, head: MarkovHead, logits: Tensor, hidden: Tensor) -> None:
        self.head, self.logits, self.hidden = head, logits.split(1, dim=1), hidden.split(1, dim=1)
        self.state: Tensor | None = None

    def step(self, depth: int, token_ids: Tensor, parents: Tensor) -> Continuations:
        """See `Walk.step`."""
        head, logits = self.head, self.logits[depth]
        hidden = self.hidden[depth].expand(-1, token_ids.shape[1], -1)
        read = [hidden]
        if head.markov_w1 is not None:
            embedded = head.markov_w1(token_ids)
            if self.state is not None:
                self.state = self.state.gather(1, parents[..., None].expand(-1, -1, self.state.shape[2]))
            factor, self.state = head.correction(hidden, embedded, self.state)
            logits = logits + head.markov_w2(factor)
            if head.config.confidence_reads_token:
                read.append(embedded)
        if head.confidence is None:
            return Continuations(logits)
        confidence = torch.sigmoid(head.confidence(torch.cat(read, dim=-1)).to(torch.float32))[..., 0]
        return Continuations(logits, confidence=confidence)


class CandidateSelector(nn.Module):
    """DFlash2's codebooks for scoring pairs of candidates of neighbouring slots. Dimension names: r rank."""

    def __init__(self, config: LatticeConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, config.rank))
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)


class LatticeWalk(Walk):
    """DFlash2: each slot has a few candidates. A candidate's score is the sum of a score of its own and a score of its
    pair with the previous token.

    Args:
        selector: scores pairs of candidates.
        head: supplies the token map of the logits.
        logits: [num_reqs, num_drafted, draft_vocab_size].
        hidden: [num_reqs, num_drafted, H].
        choose: selects each slot's candidates; None selects the likeliest tokens.
    """

    def __init__(
        self,
        selector: CandidateSelector,
        head: Backbone,
        logits: Tensor,
        hidden: Tensor,
        choose: ChooseCandidates | None = None,
    ) -> None:
        self.selector = selector
        if choose is None:
            best = logits.topk(selector.top_k, dim=-1)
            self.token_ids, self.unary = head.draft_token_ids[best.indices], best.values
        else:
            self.token_ids, self.unary = choose(logits, selector.top_k)
        self.successors = selector.successor_codebook[self.token_ids]
        self.projected = selector.hidden_projection(hidden[:, : self.unary.shape[1]])

    def step(self, depth: int, token_ids: Tensor, parents: Tensor) -> Continuations:
        """See `Walk.step`."""
        given = self.selector.predecessor_codebook[token_ids] * self.projected[:, depth : depth + 1]
        scores = self.unary[:, depth : depth + 1] + given @ self.successors[:, depth].transpose(1, 2)
        return Continuations(scores, token_ids=self.token_ids[:, depth])
