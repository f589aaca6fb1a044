"""A user-defined drafter: after each token it proposes the token that followed last time, in any request."""

import torch

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterOptions
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree

SCORE_PER_TOKEN = -1.0
"""Log-probability assigned to each drafted token; the table has no better estimate."""


class BigramDrafter(Drafter):
    """Drafts chains from a table that maps each token to its latest follower.

    The drafter reads the token history only, so `needs` keeps the value of `Drafter`. A drafter that runs a model
    declares there which hidden states it reads, and that it keeps state per position.
    """

    def __init__(self, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> None:
        self.device = torch.device(options.device)
        self.depth = speculation.max_path - 1
        self.follower = torch.full((target.vocab_size,), -1, device=self.device)
        """int64 [vocab_size]: latest follower of each token; -1 if it has none yet."""
        self.num_read = torch.zeros(0, dtype=torch.int64, device=self.device)
        """int64 [num_slots]: number of history tokens that are already in the table."""
        self.epochs = self.num_read

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`; the only state per slot is how much of its history has been read."""
        more = self.num_read.new_zeros(max(num_slots - len(self.num_read), 0))
        self.num_read, self.epochs = torch.cat([self.num_read, more]), torch.cat([self.epochs, more])

    def commit(self, batch: DraftBatch) -> None:
        """Does nothing, because the history is read in `propose`; see `Drafter.commit`."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Returns a chain per proposal slot, as long as followers are known; see `Drafter.propose`."""
        self._read(batch)
        slots = batch.proposal_slots.to(self.device)
        tokens = [batch.token_ids[slots, batch.committed_lens[slots] - 1]]
        known = [torch.ones_like(tokens[0], dtype=torch.bool)]
        for _ in range(self.depth):
            after = self.follower[tokens[-1]]
            known.append(known[-1] & (after >= 0))
            tokens.append(after.clamp_min(0))
        real = torch.stack(known, dim=1)
        # A node's depth is its index in the chain; entries past `num_valid` are ignored.
        depths = torch.arange(self.depth + 1, device=self.device).expand(len(slots), -1)
        return TokenTree(
            token_ids=torch.stack(tokens, dim=1),
            parents=depths - 1,
            depths=depths,
            scores=depths * SCORE_PER_TOKEN,
            num_valid=real.sum(dim=1),
        )

    def _read(self, batch: DraftBatch) -> None:
        """Adds the new tokens of the proposing sequences to the table."""
        slots = batch.proposal_slots.to(self.device)
        self.num_read[slots] = torch.where(self.epochs[slots] == batch.epochs[slots], self.num_read[slots], 0)
        history, lens = batch.token_ids[slots, : batch.max_committed_len], batch.committed_lens[slots]
        columns = torch.arange(1, history.shape[1], device=self.device)
        new = (columns >= self.num_read[slots, None]) & (columns < lens[:, None])
        self.follower[history[:, :-1][new]] = history[:, 1:][new]
        self.num_read[slots], self.epochs[slots] = lens, batch.epochs[slots]
