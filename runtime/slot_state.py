"""Per-sequence state on the device, one row per slot, at addresses that never change."""

import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.sequence import Sequence


class SlotState:
    """What the device must know of every running sequence between rounds. All tensors are [max_num_seqs, ...]."""

    def __init__(self, config: EngineConfig, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        rows = config.max_num_seqs

        def column(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.committed_lens = column(torch.int64)
        self.last_token_ids = column(torch.int64)
        self.epochs = column(torch.int64)
        self.block_tables = column(torch.int64, config.max_blocks_per_seq)
        self.seeds = column(torch.int64)
        self.temperatures = column(torch.float32)
        self.top_ks = column(torch.int64)
        self.top_ps = column(torch.float32)
        self.min_ps = column(torch.float32)

    def admit(self, seq: Sequence) -> None:
        """Fill the row of a sequence that just got its slot."""
        slot, params = seq.slot, seq.request.params
        self.committed_lens[slot] = len(seq.token_ids)
        self.last_token_ids[slot] = seq.token_ids[-1]
        self.epochs[slot] = seq.epoch
        self.seeds[slot] = params.seed
        self.temperatures[slot] = params.temperature
        self.top_ks[slot] = params.top_k
        self.top_ps[slot] = params.top_p
        self.min_ps[slot] = params.min_p

    def sync_blocks(self, seq: Sequence) -> None:
        """Append the blocks a sequence got since the last call to its row of the block table."""
        if seq.num_synced_blocks < len(seq.blocks):
            new = torch.tensor(seq.blocks[seq.num_synced_blocks :], device=self.device)
            self.block_tables[seq.slot, seq.num_synced_blocks : len(seq.blocks)] = new
            seq.num_synced_blocks = len(seq.blocks)
