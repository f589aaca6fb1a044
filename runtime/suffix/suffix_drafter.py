"""The drafter `suffix`: continues contexts that occurred before, with suffix automata over the texts of requests.

Needs no model and no hidden states; `suffix_texts` holds the texts and grows the drafts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterOptions
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.suffix.suffix_texts import MAX_SHARED_TOKENS, KnownText, SuffixLimits, SuffixTexts, TextNode

_PREFIX = "suffix_decoding_"


class SuffixDrafter(Drafter):
    """Drafts chains, or trees if the speculation config allows branches, with tokens copied from earlier text.

    Args:
        speculation: shape of the trees.
        max_shared_tokens: see `SuffixTexts`.
        max_tokens_per_pass: maximum number of tokens added per pass. A longer prompt is added in several passes, so
            that other requests need not wait. Its request gets no drafts before the whole prompt is added.
        limits: further limits.
    """

    def __init__(
        self,
        speculation: SpeculationConfig,
        max_shared_tokens: int = MAX_SHARED_TOKENS,
        max_tokens_per_pass: int = 1024,
        limits: SuffixLimits = SuffixLimits(),
    ) -> None:
        self.speculation, self.limits = speculation, limits
        self.max_tokens_per_pass = max_tokens_per_pass
        self._requests: dict[int, KnownText] = {}
        self._texts = SuffixTexts(speculation, max_shared_tokens, limits)

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """Does nothing, because texts are stored by slot in memory that grows as needed; see `Drafter.resize`."""

    def draft(self, batch: DraftBatch) -> TokenTree | None:
        """Adds new tokens, then drafts; see `Drafter.draft`."""
        self.commit(batch)
        return self._propose(batch) if batch.proposal_slots.numel() else None

    def commit(self, batch: DraftBatch) -> None:
        """Add the new tokens of the sequences that decode and of the sequences that request a tree."""
        lens, epochs = batch.committed_lens.tolist(), batch.epochs.tolist()
        budget = self.max_tokens_per_pass
        for slot in dict.fromkeys(batch.proposal_slots.tolist() + batch.decode_slots.tolist()):
            request = self._requests.get(slot)
            history, length = batch.token_ids[slot], lens[slot]
            if request is None or request.epoch != epochs[slot] or not _begins(request, history, length):
                request = self._requests[slot] = KnownText(epochs[slot], shared_from=length)
            until = min(length, request.num_known + budget)
            if until > request.num_known:
                budget -= until - request.num_known
                self._texts.take_in(request, history[request.num_known : until].tolist())

    def propose(self, batch: DraftBatch) -> TokenTree:
        """A tree for each sequence, with the likeliest continuations of the sequence's longest known context; a bare
        root if no context is known.
        """
        self.commit(batch)
        return self._propose(batch)

    def _propose(self, batch: DraftBatch) -> TokenTree:
        slots = batch.proposal_slots
        lens = batch.committed_lens[slots]
        roots = batch.token_ids[slots, lens - 1].tolist()
        most = self.speculation.max_path - 1
        levels = most if batch.max_levels is None else min(most, batch.max_levels)
        trees = _Trees([], [], [], [], [])
        for slot, length, root in zip(slots.tolist(), lens.tolist(), roots, strict=True):
            request = self._requests[slot]
            nodes = self._texts.grow(request, levels) if request.num_known >= length else []
            trees.add(root, nodes, self.speculation.num_nodes)
        return trees.tensors()


class _Trees(NamedTuple):
    """Columns of a `TokenTree`, filled row by row."""

    token_ids: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]
    scores: list[list[float]]
    num_valid: list[int]

    def add(self, root: int, nodes: list[TextNode], num_nodes: int) -> None:
        padding = [0] * (num_nodes - 1 - len(nodes))
        self.token_ids.append([root, *(node.token_id for node in nodes), *padding])
        self.parents.append([-1, *(node.parent for node in nodes), *padding])
        self.depths.append([0, *(node.depth for node in nodes), *padding])
        self.scores.append([0.0, *(node.score for node in nodes), *(float("-inf") for _ in padding)])
        self.num_valid.append(1 + len(nodes))

    def tensors(self) -> TokenTree:
        return TokenTree(
            torch.tensor(self.token_ids),
            torch.tensor(self.parents),
            torch.tensor(self.depths),
            torch.tensor(self.scores, dtype=torch.float32),
            torch.tensor(self.num_valid),
        )


def _begins(request: KnownText, history: Tensor, length: int) -> bool:
    """Whether the known tokens can be the beginning of a token history.

    The check is needed because the slot may now belong to another verifier, whose epochs are unrelated. Only the last
    known token is compared, because a wrong result lowers speed but does not change answers.
    """
    known = request.num_known
    return known <= length and (not known or history[known - 1].item() == request.last_token_id)


def build_suffix(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> SuffixDrafter:
    """Builder called by `wingbeat.runtime.drafters.registry`."""
    given = {name.removeprefix(_PREFIX): value for name, value in options.settings.items()}
    return SuffixDrafter(speculation, limits=SuffixLimits(**given))
