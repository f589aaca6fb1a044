"""A drafter of one's own: after each token comes what came after it last time, in whatever request that was."""

import torch

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterOptions
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree

SCORE_PER_TOKEN = -1.0
"""Log-probability that a drafted token is given; a table of followers has no better idea."""


class BigramDrafter(Drafter):
    """Chains by a table from each token to its latest follower.

    It reads the history of tokens alone, so `needs` stays as `Drafter` has it. A drafter that runs a model would say
    there which hidden states it wants and that it keeps state per position.
    """

    def __init__(self, target: TargetDescription, speculation: SpeculationConfig, options: DrafterOptions) -> None:
        self.device = torch.device(options.device)
        self.depth = speculation.max_path - 1
        self.follower = torch.full((target.vocab_size,), -1, device=self.device)
        """int64 [vocab_size]; -1 where a token has none yet."""
        self.num_read = torch.zeros(0, dtype=torch.int64, device=self.device)
        """int64 [num_slots]: tokens of the history that are in the table."""
        self.epochs = self.num_read

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`; what is stored per slot is only what was read of its history."""
        more = self.num_read.new_zeros(max(num_slots - len(self.num_read), 0))
        self.num_read, self.epochs = torch.cat([self.num_read, more]), torch.cat([self.epochs, more])

    def commit(self, batch: DraftBatch) -> None:
        """Nothing to take in: the history says it all; see `Drafter.commit`."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """A chain per proposal slot, as long as followers are known; see `Drafter.propose`."""
        self._read(batch)
        slots = batch.proposal_slots.to(self.device)
        tokens = [batch.token_ids[slots, batch.committed_lens[slots] - 1]]
        known = [torch.ones_like(tokens[0], dtype=torch.bool)]
        for _ in range(self.depth):
            after = self.follower[tokens[-1]]
            known.append(known[-1] & (after >= 0))
            tokens.append(after.clamp_min(0))
        real = torch.stack(known, dim=1)
        # A node's depth is its place in the chain; what lies past `num_valid` is never looked at.
        depths = torch.arange(self.depth + 1, device=self.device).expand(len(slots), -1)
        return TokenTree(
            token_ids=torch.stack(tokens, dim=1),
            parents=depths - 1,
            depths=depths,
            scores=depths * SCORE_PER_TOKEN,
            num_valid=real.sum(dim=1),
        )

    def _read(self, batch: DraftBatch) -> None:
        """Put what the proposing sequences have gained into the table."""
        slots = batch.proposal_slots.to(self.device)
        self.num_read[slots] = torch.where(self.epochs[slots] == batch.epochs[slots], self.num_read[slots], 0)
        history, lens = batch.token_ids[slots, : batch.max_committed_len], batch.committed_lens[slots]
        columns = torch.arange(1, history.shape[1], device=self.device)
        new = (columns >= self.num_read[slots, None]) & (columns < lens[:, None])
        self.follower[history[:, :-1][new]] = history[:, 1:][new]
        self.num_read[slots], self.epochs[slots] = lens, batch.epochs[slots]
