"""A drafter's pass captured as CUDA graphs: one graph per batch size and depth, with inputs at fixed addresses.

This module does not depend on the kind of drafter, because the graphs capture two functions that the drafter passes in.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.decided_rows import CommitFunction, DecidedRows
from wingbeat.runtime.drafters.draft_pool import DraftPool
from wingbeat.runtime.drafters.growth import TREES, Growth, Roots, SlotTables
from wingbeat.runtime.drafters.prompt_stage import PromptStage
from wingbeat.runtime.graphs.buckets import bucket_for, draft_batches
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import (
    Bucket,
    GraphPool,
    GraphRunner,
    GraphStats,
    Stage,
)
from wingbeat.runtime.graphs.marks import events_of
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import copy_all, upload_into


class PassRows(NamedTuple):
    """Inputs of the captured stages: the fields of `DecidedRows`, and the slots that request a tree."""

    slots: Tensor
    """int64 [num_reqs, 2]: slot of the decode, and slot of the tree, which may be another slot; padding has the spare
    slot."""
    positions: Tensor
    num_tokens: Tensor
    token_ids: Tensor
    taps: Tensor
    first_token_ids: Tensor
    levels: Tensor
    """int64 [num_reqs, depth]: only the tensor's shape is used, as the number of levels; the values are not read."""


class Committed(NamedTuple):
    """Output of `draft_accept`; empty, since the drafter stores the committed state in its pool."""


DraftFunction = Callable[[DecidedRows, Roots, Tensor], TokenTree]
"""Function (decodes, roots, block tables by slot) -> trees. The function commits the decoded tokens, then grows a tree
from each root. The slot of every non-padding decode is also the slot of a root."""


class DraftStages:
    """The captured stages of a drafter for every batch bucket and depth.

    Args:
        commit, draft: functions to capture. Rows with slot num_slots are padding; for such rows, the functions must not
        change any sequence's state.
        growth: the `Growth` that `draft` uses.
        pool: the drafter's KV pool; its addresses must not change.
        graph_device: captures the stages.
        reads_history: whether `commit` needs the token at each decode's first position.
        moves: whether the RoPE positions of a sequence's tokens may differ from the tokens' positions.
    """

    def __init__(
        self,
        commit: CommitFunction,
        draft: DraftFunction,
        growth: Growth,
        spec: ChannelSpec,
        pool: DraftPool,
        graph_device: GraphDevice,
        reads_history: bool = False,
        moves: bool = False,
    ) -> None:
        self.reads_history, self.moves = reads_history, moves
        self.commit_decodes, self.draft, self.growth = commit, draft, growth
        self.spec, self.graph_device = spec, graph_device
        self.device, self.dtype = pool.device, pool.dtype
        self.spare_slot = pool.num_slots
        self.buckets = draft_batches(pool.num_slots, spec.max_path, growth.top_k)
        with torch.inference_mode(mode=False):
            self.tables, self.trees = self._by_slot(pool.num_slots + 1)
            self._rules = None if growth.rules is None else growth.rules.tables(pool.num_slots)
            growth.prepare(self.buckets)
        self._pool = GraphPool(graph_device, events_of(graph_device))
        growth.mark = self._pool.mark
        accepts = [Bucket(n, spec.max_path) for n in self.buckets]
        proposals = [Bucket(n, depth) for n in self.buckets for depth in growth.depths]
        self._accept = GraphRunner(Stage.DRAFT_ACCEPT, self._commit, self._padding, accepts, self._pool)
        self._proposal = GraphRunner(Stage.DRAFT_PROPOSAL, self._draft, self._padding, proposals, self._pool)
        args = (commit, spec, self.tables, self.spare_slot, self.dtype, self._pool, reads_history)
        self.prompts = PromptStage(*args)
        runners = [self._accept, self._proposal]
        if self._rules is not None:
            # Rounds with rules have graphs of their own, because rules add six or more launches per level, which would
            # slow down rounds without rules.
            self._ruled = GraphRunner(Stage.DRAFT_RULED, self._draft_ruled, self._padding, proposals, self._pool)
            runners.append(self._ruled)
        for runner in runners:
            _fill(runner, self._padding)
        self._pool.capture(self.prompts.runner, *runners)

    @property
    def stage_s(self) -> dict[str, float]:
        """Device seconds of measured replays that grew trees: of COMMIT, of TREES, and of each level by its number."""
        return self._pool.stage_s

    @property
    def stats(self) -> GraphStats:
        """Numbers of captured graphs, failed captures, and replays per stage."""
        return self._pool.stats

    def fit(self, spec: ChannelSpec) -> bool:
        """Whether the stages also serve a channel of this shape.

        The caller checks that the channel's slots and blocks fit.
        """
        mine = self.spec
        return (spec.block_size, spec.max_blocks_per_seq) == (mine.block_size, mine.max_blocks_per_seq)

    def commit(self, batch: DraftBatch) -> None:
        """Commit the decodes of a batch, of which there must be at least one."""
        count = len(batch.decode_slots)
        bucket = Bucket(bucket_for(count, self.buckets), self.spec.max_path)
        self._load(self._accept.inputs(bucket), batch, [])
        self._accept.replay(bucket, count)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Commit the decodes and grow one tree per proposal slot.

        The returned trees are also written into `trees`. Both copies are valid until the next pass.

        Decodes without a proposal also get a tree, so that the committed tokens and the root of a sequence run in one
        graph. The trees of such decodes are not read.
        """
        proposals = batch.proposal_slots.tolist()
        asked = set(proposals)
        slots = proposals + [slot for slot in batch.decode_slots.tolist() if slot not in asked]
        bucket = Bucket(bucket_for(len(slots), self.buckets), self.growth.depth(batch))
        has_rules = batch.sampling_rules is not None or batch.allowed_tokens is not None
        ruled = has_rules and self._rules is not None
        runner = self._ruled if ruled else self._proposal
        rows = runner.inputs(bucket)
        self._load(rows, batch, slots)
        if ruled:
            self._rules.load(batch, rows.slots[: len(proposals), 1])
        return runner.replay(bucket, len(proposals))

    def _by_slot(self, num_slots: int) -> tuple[SlotTables, TokenTree]:
        """Returns slot tables filled with one-token padding sequences, and buffers for the trees.

        The last row is spare.
        """
        ones = torch.ones(num_slots, dtype=torch.int64, device=self.device)
        last_token_ids, seeds = torch.zeros_like(ones), torch.zeros_like(ones)
        blocks = ones.new_zeros(num_slots, self.spec.max_blocks_per_seq)
        ids, parents, depths = (ones.new_zeros(num_slots, self.spec.num_nodes) for _ in range(3))
        deltas = torch.zeros_like(ones) if self.moves else None
        tables = SlotTables(ones, last_token_ids, seeds, seeds.to(torch.float32), blocks, deltas)
        return tables, TokenTree(ids, parents, depths, ids.to(torch.float32), torch.ones_like(ones))

    def _load(self, rows: PassRows, batch: DraftBatch, tree_slots: list[int]) -> None:
        """Copies all inputs of a pass, in two launches if the inputs are on the GPU.

        Rows past the end of the batch get the spare slot.

        The other fields of such rows keep the values of earlier passes, which are valid token ids and have no effect.
        """
        num_reqs, nobody = len(rows.slots), self.spare_slot
        columns = [[*slots, *[nobody] * (num_reqs - len(slots))] for slots in (batch.decode_slots.tolist(), tree_slots)]
        upload_into(rows.slots, list(zip(*columns, strict=True)))
        num_slots, num_blocks = batch.block_tables.shape
        count, width = batch.decode_token_ids.shape
        tables, last_token_ids = self.tables, batch.last_token_ids
        if last_token_ids is None:
            last = (batch.committed_lens - 1).clamp(0, batch.token_ids.shape[1] - 1)
            last_token_ids = batch.token_ids.gather(1, last[:, None])[:, 0]
        copies = [(rows.taps[:count, :width], batch.decode_taps)] if self.spec.taps_size else []
        if self.reads_history and count:
            # Positions are clamped, because the device may have advanced a sequence past the end of its history in
            # the sequence's last round, which the host has not processed yet.
            positions = batch.decode_positions.clamp(0, batch.token_ids.shape[1] - 1)
            copies.append((rows.first_token_ids[:count], batch.token_ids[rows.slots[:count, 0], positions]))
        if self.moves and batch.position_deltas is not None:
            copies.append((tables.position_deltas[:num_slots], batch.position_deltas))
        copy_all(
            [
                *copies,
                (tables.committed_lens[:num_slots], batch.committed_lens),
                (tables.last_token_ids[:num_slots], last_token_ids),
                (tables.seeds[:num_slots], batch.seeds),
                (tables.temperatures[:num_slots], batch.temperatures),
                (tables.block_tables[:num_slots, :num_blocks], batch.block_tables),
                (rows.positions[:count], batch.decode_positions),
                (rows.num_tokens[:count], batch.decode_num_tokens),
                (rows.token_ids[:count, :width], batch.decode_token_ids),
            ]
        )

    def _padding(self, depth: int) -> PassRows:
        """Returns a padding row: a decode without tokens, whose KV is not stored, and a tree over an empty context."""
        none = torch.zeros(1, dtype=torch.int64, device=self.device)
        width = self.spec.max_path
        taps = torch.zeros(1, width, self.spec.taps_size, dtype=self.dtype, device=self.device)
        slots = none.new_full((1, 2), self.spare_slot)
        return PassRows(slots, none, none, none.new_zeros(1, width), taps, none, none.new_zeros(1, depth))

    def _decodes(self, rows: PassRows) -> DecidedRows:
        slots = rows.slots[:, 0].contiguous()
        real = slots != self.spare_slot
        positions, num_tokens = rows.positions * real, rows.num_tokens * real
        deltas = self.tables.position_deltas[slots] if self.moves else None
        return DecidedRows(slots, positions, num_tokens, rows.token_ids, rows.taps, rows.first_token_ids, deltas)

    def _commit(self, rows: PassRows) -> Committed:
        """Runs the `draft_accept` stage: commits the decodes."""
        self.commit_decodes(self._decodes(rows), self.tables.block_tables)
        return Committed()

    def _draft(self, rows: PassRows) -> TokenTree:
        """Runs the `draft_proposal` stage: commits the decodes, then grows all levels of the trees."""
        return self._grow(rows, self._roots(rows))

    def _draft_ruled(self, rows: PassRows) -> TokenTree:
        """Runs the `draft_ruled` stage: as `draft_proposal`, but under the requests' sampling rules."""
        return self._grow(rows, self._rules.attach(self._roots(rows)))

    def _roots(self, rows: PassRows) -> Roots:
        return self.growth.roots_of(self.tables, rows.slots[:, 1].contiguous(), rows.levels.shape[1])

    def _grow(self, rows: PassRows, roots: Roots) -> TokenTree:
        trees = self.draft(self._decodes(rows), roots, self.tables.block_tables)
        for into, field in zip(self.trees, trees, strict=True):
            (into[:, : field.shape[1]] if field.dim() == 2 else into)[roots.slots] = field
        self._pool.mark(TREES)
        return trees


@torch.inference_mode()
def _fill(runner: GraphRunner, padding_row: Callable[[int], tuple]) -> None:
    """Fills the static inputs with padding, because uninitialised memory may hold invalid token ids."""
    for bucket in runner.buckets:
        for view, row in zip(runner.inputs(bucket), padding_row(bucket.size), strict=True):
            view.copy_(row)
