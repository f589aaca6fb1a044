"""Prompt lookup: drafts the tokens that followed the previous occurrence of the sequence's latest tokens.

Needs no model.

Source: Saxena, Prompt Lookup Decoding (2023).
"""

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterOptions
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.ngram.lookup_window import LookupWindow, lookup_window
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree

SCORE_BY_MATCH = -0.5
"""Log-probability assigned to each drafted token, because prompt lookup has no model that computes one."""


class NgramDrafter(Drafter):
    """Drafts chains of tokens that are copied from the sequence's history."""

    def __init__(self, speculation: SpeculationConfig, window: LookupWindow = LookupWindow()) -> None:
        self.window = window
        self.num_nodes = speculation.num_nodes
        self.chain = speculation.max_path - 1

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """Does nothing, because this drafter stores no state; see `Drafter.resize`."""

    def commit(self, batch: DraftBatch) -> None:
        """Does nothing, because drafts use only the token history in the channel; see `Drafter.commit`."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Chains of the tokens after each sequence's latest match; bare roots for sequences without a match."""
        slots = batch.proposal_slots
        lens = batch.committed_lens[slots]
        history = batch.token_ids[slots, : batch.max_committed_len]
        after = self._latest_match(history, lens)
        steps = torch.arange(self.num_nodes, device=history.device)
        source = after[:, None] + steps - 1
        found = (after > 0)[:, None] & (source < lens[:, None]) & (steps <= self.chain) & (steps > 0)
        last = history.shape[1] - 1
        drafted = torch.where(found, history.gather(1, source.clamp(0, last)), 0)
        roots = history.gather(1, (lens - 1)[:, None])
        depths = torch.where(found, steps, 0)
        return TokenTree(
            token_ids=torch.where(steps == 0, roots, drafted),
            parents=torch.where(found | (steps == 0), steps - 1, 0),
            depths=depths,
            scores=torch.where(found, steps * SCORE_BY_MATCH, torch.where(steps == 0, 0.0, float("-inf"))),
            num_valid=1 + found.sum(dim=1),
        )

    def _latest_match(self, history: Tensor, lens: Tensor) -> Tensor:
        """Finds, for each history, the longest suffix that also occurs earlier in the history.

        Returns int64 [num_reqs]: the position after the suffix's latest earlier occurrence; 0 if no suffix occurs
        earlier.
        """
        columns = torch.arange(history.shape[1], device=history.device)
        same = columns < lens[:, None]
        after = torch.zeros_like(lens)
        for length in range(1, self.window.longest + 1):
            suffix = history.gather(1, (lens - length).clamp_min(0)[:, None])
            same &= (history.roll(length, dims=1) == suffix) & (columns >= length) & (lens > length)[:, None]
            if length >= self.window.shortest:
                latest = torch.where(same, columns, 0).amax(dim=1)
                after = torch.where(latest > 0, latest, after)
        return after


def build_ngram(
    source: str, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions
) -> NgramDrafter:
    """Builder called by `wingbeat.runtime.drafters.registry`."""
    return NgramDrafter(speculation, lookup_window(options.settings))
