"""Sequences for tests of drafters, without a verifier: ragged, with random tokens and taps."""

import torch

from tests.runtime.models import CHAIN, TREE
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree

VOCAB, BLOCK_SIZE, MAX_LEN, NUM_SLOTS = 97, 4, 64, 9
BLOCKS_PER_SEQ = MAX_LEN // BLOCK_SIZE + 6
MIXED = (0.0, 0.8, 0.0, 1.2, 0.7, 0.0, 0.9, 0.3, 0.5)
"""Temperatures by slot."""
SHAPES = {"chain": CHAIN, "tree": TREE, "whole": SpeculationConfig(3, 3, 30), "one": SpeculationConfig(1, 3, 3)}


def taps_size(drafter: StagedDrafter) -> int:
    """Number of values per position that the verifier sends to this drafter."""
    owner = getattr(drafter, "head", drafter)
    return getattr(drafter, "taps_size", getattr(owner, "taps_size", 0))


def channel_spec(speculation, taps_size):
    return ChannelSpec(
        NUM_SLOTS,
        speculation.num_nodes,
        speculation.max_path,
        64,
        taps_size,
        MAX_LEN,
        BLOCKS_PER_SEQ,
        BLOCK_SIZE,
        1 + NUM_SLOTS * BLOCKS_PER_SEQ,
    )


def watch_proposals(drafter: StagedDrafter) -> list[tuple[list[int], TokenTree]]:
    """Returns a list to which every tree that the drafter proposes is added, behind its sequence's tokens."""
    propose, seen = drafter.propose, []

    def watched(batch):
        trees = propose(batch)
        for row, slot in enumerate(batch.proposal_slots.tolist()):
            history = batch.token_ids[slot, : batch.committed_lens[slot]].tolist()
            seen.append((history, TokenTree(*(field[row : row + 1] for field in trees))))
        return trees

    drafter.propose = watched
    return seen


class World:
    """Ragged sequences with random taps, in shuffled slots and blocks; feeds a drafter as the engine would."""

    def __init__(self, speculation, taps_size, lens, temperatures=(0.0,) * NUM_SLOTS):
        generator = torch.Generator().manual_seed(sum(lens))
        self.max_path, self.taps_size = speculation.max_path, taps_size
        self.slots = torch.randperm(NUM_SLOTS, generator=generator)[: len(lens)].tolist()
        blocks = torch.randperm(NUM_SLOTS * BLOCKS_PER_SEQ, generator=generator) + 1
        self.tables = blocks.view(NUM_SLOTS, BLOCKS_PER_SEQ)
        self.tokens = torch.randint(0, VOCAB, (NUM_SLOTS, MAX_LEN + 1), generator=generator)
        self.taps = torch.randn(NUM_SLOTS, MAX_LEN + 1, taps_size, generator=generator)
        self.temperatures = torch.tensor(temperatures)
        self.seeds = torch.arange(NUM_SLOTS) + 1000
        self.lens = torch.ones(NUM_SLOTS, dtype=torch.int64)
        self.lens[self.slots] = torch.tensor(lens)

    def batch(self, decodes=(), chunks=(), proposals=(), max_levels=None, device="cpu"):
        """Build a `DraftBatch`; decodes and chunks are triples of slot, first position and number of pairs."""
        decode_tokens = torch.full((len(decodes), self.max_path), 3)
        decode_taps = torch.full((len(decodes), self.max_path, self.taps_size), 7.0)
        for row, (slot, start, count) in enumerate(decodes):
            decode_tokens[row, :count] = self.tokens[slot, start + 1 : start + count + 1]
            decode_taps[row, :count] = self.taps[slot, start : start + count]
        columns = [torch.tensor([decode[field] for decode in decodes], dtype=torch.int64) for field in range(3)]
        batch = DraftBatch(
            *columns,
            decode_tokens,
            decode_taps,
            *([chunk[field] for chunk in chunks] for field in range(3)),
            torch.cat([self.tokens[slot, start + 1 : start + n + 1] for slot, start, n in chunks] or [columns[0]]),
            torch.cat([self.taps[slot, start : start + n] for slot, start, n in chunks] or [decode_taps[:0, 0]]),
            torch.tensor(proposals, dtype=torch.int64),
            torch.zeros_like(self.lens),
            self.lens,
            self.tables,
            self.temperatures,
            self.seeds,
            self.tokens,
            int(self.lens.max()),
            max_levels,
        )
        on_host = (
            "decode_slots",
            "proposal_slots",
            "chunk_slots",
            "chunk_positions",
            "chunk_lens",
            "max_committed_len",
            "max_levels",
        )
        moved = {
            k: v.to(device) for k, v in batch._asdict().items() if k not in on_host and isinstance(v, torch.Tensor)
        }
        return batch._replace(**moved)

    def feed(self, drafter, device="cpu"):
        """Commit all pairs in three passes: half the prompt, the rest of it, then a decode of up to three pairs."""
        halves = [(slot, int(self.lens[slot] - 1) // 2) for slot in self.slots]
        drafter.commit(self.batch(chunks=[(slot, 0, half) for slot, half in halves if half], device=device))
        ends = {slot: max(half, int(self.lens[slot]) - 1 - min(self.max_path, 3)) for slot, half in halves}
        drafter.commit(
            self.batch(
                chunks=[(slot, half, ends[slot] - half) for slot, half in halves if ends[slot] > half], device=device
            )
        )
        decodes = [(slot, ends[slot], int(self.lens[slot]) - 1 - ends[slot]) for slot in self.slots]
        drafter.commit(self.batch(decodes=decodes, device=device))

    def drafted_twice(self, drafter):
        """Slots in another order, and trees: of the fed sequences, and after up to three accepted tokens of each."""
        slots = self.slots[1:] + self.slots[:1]
        yield slots, drafter.propose(self.batch(proposals=slots))
        most = min(3, self.max_path)
        decodes = [(slot, int(self.lens[slot]) - 1, most - index % 2) for index, slot in enumerate(slots)]
        for slot, _, count in decodes:
            self.lens[slot] += count
        yield slots, drafter.draft(self.batch(decodes=decodes, proposals=slots))
