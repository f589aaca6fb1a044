"""Per-sequence state on the device, one row per slot, at fixed addresses."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.round.reference import SlotColumns
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.processors import ProcessorTables
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence

_PUBLISHED = ("epochs", "block_tables", "temperatures", "seeds", "position_deltas")
_ENDS = ("committed_lens", "last_token_ids")


class DecodeRows(NamedTuple):
    """Data about a round's decodes, copied from the host to the device, in the order of `SchedulerOutput.decodes`.

    Instances are never modified, because the next round may reuse them.
    """

    slots: Tensor
    """int64 [num_decodes]"""
    wanted: Tensor
    """bool [num_decodes]: whether a tree was requested for the decode and KV blocks are free for the tree."""


class SlotState:
    """State of every running sequence that persists between rounds. All tensors have the shape [max_num_seqs + 1, ...].

    The last row belongs to no sequence: padding rows of a batch point to it, and its block table holds block 0 alone.
    """

    def __init__(
        self, config: EngineConfig, vocab_size: int, device: torch.device, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self.processors = ProcessorTables(
            config.max_num_seqs, config.speculation.num_nodes, vocab_size, eos_token_ids, device
        )
        self.published_rules: Any = first_result("published_rules", config.max_num_seqs, device)
        """Sampling rules as told to drafters; None if drafters are told no rules."""
        self.vocab_size = vocab_size
        self.device = device
        self.spare = config.max_num_seqs
        """Slot of padding rows."""
        rows = config.max_num_seqs + 1

        def column(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self.committed_lens = column(torch.int64)
        self.last_token_ids = column(torch.int64)
        self.epochs = column(torch.int64)
        self.position_deltas = column(torch.int64)
        """Offset added to the rotary positions of tokens after a sequence's media spans; written by `move`."""
        self.block_tables = column(torch.int64, config.max_blocks_per_seq)
        self.seeds = column(torch.int64)
        self.temperatures = column(torch.float32)
        self.top_ks = column(torch.int64)
        self.top_ps = column(torch.float32)
        self.min_ps = column(torch.float32)
        self.columns = SlotColumns(self.committed_lens, self.last_token_ids, self.epochs, self.block_tables)
        self._published = {name: getattr(self, name)[:-1] for name in _PUBLISHED}
        self._ends = {name: getattr(self, name)[:-1] for name in _ENDS}
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self._latest_columns: tuple[list[int], list[bool]] = [], []
        self._latest_rows = DecodeRows(none, none.bool())
        self._num_changes = dict.fromkeys(self._published, 0)
        self._written: dict[tuple[int, str], int | tuple[int, ...]] = {}
        self.committed_lens[self.spare :].fill_(1)  # the spare slot is a sequence of one token, which no round extends

    def publish(self, outcome: Outcome) -> list[tuple[Tensor, Tensor]]:
        """Returns the copies, (target, source), that bring a drafter's buffer up to date with the slot state.

        Most columns seldom change; columns that have not changed since they were written to this buffer are left out.
        """
        copies = [(getattr(outcome, name), by_slot) for name, by_slot in self._ends.items()]
        rules, whole = self.published_rules, (outcome.epochs.data_ptr(), "all")
        version = (*self._num_changes.values(), 0 if rules is None else rules.num_changes)
        if self._written.get(whole) == version:
            return copies
        self._written[whole] = version
        for name, by_slot in self._published.items():
            target, changes = getattr(outcome, name), self._num_changes[name]
            if self._written.get((target.data_ptr(), name)) != changes:
                self._written[target.data_ptr(), name] = changes
                copies.append((target, by_slot))
        written = outcome.biases.data_ptr(), "rules"
        if rules is not None and self._written.get(written, 0) != rules.num_changes:
            self._written[written] = rules.num_changes
            copies += rules.copies(outcome.rules)
        return copies

    def forget_published(self) -> None:
        """Makes the next `publish` copy all columns; called when the drafter has new buffers, perhaps at old
        addresses."""
        self._written.clear()

    def load(self, plan: SchedulerOutput) -> DecodeRows:
        """Updates the slot rows of a round's sequences and returns the decodes' rows.

        Called before other work of the round is enqueued.
        """
        if plan.admitted:
            self._admit(plan.admitted)
            self.processors.admit(plan.admitted)
            if self.published_rules is not None:
                self.published_rules.admit(plan.admitted)
        self._append_blocks([*plan.decodes, *(chunk.seq for chunk in plan.chunks)])
        columns = [seq.slot for seq in plan.decodes], plan.with_trees()
        if columns != self._latest_columns:  # the batch seldom changes between rounds
            slots, wanted = upload(columns, self.device).unbind()
            self._latest_columns, self._latest_rows = columns, DecodeRows(slots, wanted.bool())
        return self._latest_rows

    def _admit(self, seqs: list[Sequence]) -> None:
        params = [seq.request.params for seq in seqs]
        slots, lens, last_token_ids, epochs, seeds, top_ks = upload(
            [
                [seq.slot for seq in seqs],
                [len(seq.token_ids) for seq in seqs],
                [seq.token_ids[-1] for seq in seqs],
                [seq.epoch for seq in seqs],
                [param.seed for param in params],
                [param.top_k for param in params],
            ],
            self.device,
        )
        temperatures, top_ps, min_ps = upload(
            [[param.temperature, param.top_p, param.min_p] for param in params], self.device, torch.float32
        ).T
        self.committed_lens[slots] = lens
        self.last_token_ids[slots] = last_token_ids
        self.epochs[slots] = epochs
        for name in ("epochs", "temperatures", "seeds"):
            self._num_changes[name] += 1
        self.seeds[slots] = seeds
        self.temperatures[slots] = temperatures
        self.top_ks[slots] = top_ks
        self.top_ps[slots] = top_ps
        self.min_ps[slots] = min_ps

    def move(self, slot: int, delta: int) -> None:
        """Sets the offset of rotary positions after a sequence's media spans."""
        self.position_deltas[slot] = delta
        self._num_changes["position_deltas"] += 1

    def _append_blocks(self, seqs: list[Sequence]) -> None:
        """Writes into `block_tables` the blocks that sequences got since the last call."""
        slots: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for seq in seqs:
            begin, end = seq.num_synced_blocks, len(seq.blocks)
            if begin < end:
                slots += [seq.slot] * (end - begin)
                columns += range(begin, end)
                blocks += seq.blocks[begin:]
                seq.num_synced_blocks = end
        if slots:
            rows, places, ids = upload([slots, columns, blocks], self.device)
            self.block_tables[rows, places] = ids
            self._num_changes["block_tables"] += 1
