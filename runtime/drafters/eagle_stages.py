"""An EAGLE drafter's pass as CUDA graphs: one for every batch size and depth, fed through fixed addresses."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.draft_pool import DraftPool
from wingbeat.runtime.drafters.growth import Growth, Roots
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import (
    Bucket,
    GraphPool,
    GraphRunner,
    GraphStats,
    Stage,
    batch_buckets,
    bucket_for,
)
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import upload


class DecidedRows(NamedTuple):
    """Decided tokens, one sequence a row; without tokens a row is padding. Inputs of `draft_accept`."""

    slots: Tensor
    """int64 [num_reqs]"""
    positions: Tensor
    """int64 [num_reqs]: first position computed."""
    num_tokens: Tensor
    """int64 [num_reqs]: pairs that count, 0..max_path."""
    token_ids: Tensor
    """int64 [num_reqs, max_path]"""
    taps: Tensor
    """[num_reqs, max_path, taps_size]"""


class ProposalRows(NamedTuple):
    """Inputs of `draft_proposal`: `DecidedRows`, and beside them the `Roots`, which need not be of the same slots."""

    decode_slots: Tensor
    decode_positions: Tensor
    decode_num_tokens: Tensor
    decode_token_ids: Tensor
    decode_taps: Tensor
    slots: Tensor
    token_ids: Tensor
    positions: Tensor
    temperatures: Tensor
    seeds: Tensor

    @property
    def decodes(self) -> DecidedRows:
        """The first half."""
        return DecidedRows(*self[:5])

    @property
    def roots(self) -> Roots:
        """The second half."""
        return Roots(*self[5:])


class CommittedRows(NamedTuple):
    """Outputs of `draft_accept`."""

    hidden: Tensor
    """[num_reqs, hidden_size]: the head's output at each row's last pair."""


class EagleStages:
    """The stages of a drafter at every batch bucket and depth.

    Args:
        commit: (decodes, block tables by slot) -> hidden states of their last pairs.
        grow: (roots, block tables by slot) -> trees.
        growth: that `grow` uses.
        pool: of the drafter; its addresses must not change. Slot num_slots belongs to nobody: padding goes there.
        graph_device: captures the stages.
    """

    def __init__(
        self,
        commit: Callable[[DecidedRows, Tensor], Tensor],
        grow: Callable[[Roots, Tensor], TokenTree],
        growth: Growth,
        spec: ChannelSpec,
        pool: DraftPool,
        graph_device: GraphDevice,
    ) -> None:
        self.commit_decodes, self.grow, self.growth = commit, grow, growth
        self.spec = spec
        self.device, self.dtype = pool.device, pool.dtype
        self.spare_slot = pool.num_slots
        self.buckets = batch_buckets(pool.num_slots)
        with torch.inference_mode(mode=False):
            shape = (pool.num_slots + 1, spec.max_blocks_per_seq)
            self._block_tables = torch.zeros(shape, dtype=torch.int64, device=self.device)
            growth.prepare(self.buckets)
        self._pool = GraphPool(graph_device)
        accepts = [Bucket(n, spec.max_path) for n in self.buckets]
        proposals = [Bucket(n, depth) for n in self.buckets for depth in range(1, spec.max_path)]
        self._accept = GraphRunner(Stage.DRAFT_ACCEPT, self._commit, self._padding_decode, accepts, self._pool)
        self._proposal = GraphRunner(
            Stage.DRAFT_PROPOSAL, self._commit_and_grow, self._padding_proposal, proposals, self._pool
        )
        _fill(self._accept, self._padding_decode)
        _fill(self._proposal, self._padding_proposal)
        self._pool.capture(self._accept, self._proposal)

    @property
    def stats(self) -> GraphStats:
        """What was captured, what failed, and how often each stage ran."""
        return self._pool.stats

    def fit(self, spec: ChannelSpec) -> bool:
        """Whether the stages serve a channel of this shape too, as far as its slots and blocks have room."""
        mine = self.spec
        return (spec.block_size, spec.max_blocks_per_seq) == (mine.block_size, mine.max_blocks_per_seq)

    def commit(self, batch: DraftBatch) -> None:
        """Draft KV and hidden states of the decodes, of which there is one at least."""
        count = len(batch.decode_slots)
        bucket = Bucket(bucket_for(count, self.buckets), self.spec.max_path)
        rows = self._accept.inputs(bucket)
        [slots] = self._upload_slots(bucket.num_reqs, batch.decode_slots)
        self._load(rows, slots, batch)
        self._accept.replay(bucket, count)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Commit the decodes and grow a tree per proposal slot; valid until the next pass."""
        count, depth = len(batch.proposal_slots), self.growth.depth(batch)
        bucket = Bucket(bucket_for(max(count, len(batch.decode_slots)), self.buckets), depth)
        rows = self._proposal.inputs(bucket)
        decode_slots, slots = self._upload_slots(bucket.num_reqs, batch.decode_slots, batch.proposal_slots)
        self._load(rows.decodes, decode_slots, batch)
        rows.slots.copy_(slots)
        self.growth.roots(batch, slots[:count], into=Roots(*(part[:count] for part in rows.roots)))
        if count < bucket.num_reqs:
            rows.positions[count:].fill_(1)
        return self._proposal.replay(bucket, count)

    def _load(self, rows: DecidedRows, slots: Tensor, batch: DraftBatch) -> None:
        """Copy a batch's decodes into the first of the rows, the others becoming padding, and its block tables."""
        num_slots, num_blocks = batch.block_tables.shape
        self._block_tables[:num_slots, :num_blocks].copy_(batch.block_tables)
        count, width = batch.decode_token_ids.shape
        rows.slots.copy_(slots)
        rows.positions[:count].copy_(batch.decode_positions)
        rows.num_tokens[:count].copy_(batch.decode_num_tokens)
        rows.token_ids[:count, :width].copy_(batch.decode_token_ids)
        rows.taps[:count, :width].copy_(batch.decode_taps)
        if count < len(rows.slots):
            rows.positions[count:].zero_()
            rows.num_tokens[count:].zero_()

    def _upload_slots(self, num_reqs: int, *columns: Tensor) -> Tensor:
        """Host slots on the device, padded with the spare one: int64 [len(columns), num_reqs]."""
        padded = [[*slots.tolist(), *[self.spare_slot] * (num_reqs - len(slots))] for slots in columns]
        return upload(padded, self.device)

    def _padding_decode(self, max_path: int) -> DecidedRows:
        """A row without tokens: its KV is dropped, its hidden state goes to the spare slot."""
        none = torch.zeros(1, dtype=torch.int64, device=self.device)
        taps = torch.zeros(1, max_path, self.spec.taps_size, dtype=self.dtype, device=self.device)
        return DecidedRows(none + self.spare_slot, none, none, none.new_zeros(1, max_path), taps)

    def _padding_proposal(self, depth: int) -> ProposalRows:
        """A decode without tokens, and a tree over no context, whose pairs go into the row's private blocks."""
        decode = self._padding_decode(self.spec.max_path)
        none = decode.positions
        return ProposalRows(*decode, decode.slots, none, none.new_ones(1, depth), none.float(), none)

    def _commit(self, rows: DecidedRows) -> CommittedRows:
        """`draft_accept`."""
        return CommittedRows(self.commit_decodes(rows, self._block_tables))

    def _commit_and_grow(self, rows: ProposalRows) -> TokenTree:
        """`draft_proposal`: all levels of a tree after its sequence's decode."""
        self.commit_decodes(rows.decodes, self._block_tables)
        return self.grow(rows.roots, self._block_tables)


@torch.inference_mode()
def _fill(runner: GraphRunner, padding_row: Callable[[int], tuple]) -> None:
    """Put padding into the static inputs, whose fresh memory may hold tokens that do not exist."""
    for bucket in runner.buckets:
        for view, row in zip(runner.inputs(bucket), padding_row(bucket.size), strict=True):
            view.copy_(row)
