"""A drafter's pass as CUDA graphs: one for every batch size and depth, fed through fixed addresses.

Knows no kind of drafter: what it captures are two functions of tensors that a drafter hands it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.drafters.base import DraftBatch
from wingbeat.runtime.drafters.draft_pool import DraftPool
from wingbeat.runtime.drafters.growth import Growth, Roots, SlotTables
from wingbeat.runtime.drafters.rule_tables import RuleTables
from wingbeat.runtime.graphs.buckets import bucket_for, draft_batches
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import (
    Bucket,
    GraphPool,
    GraphRunner,
    GraphStats,
    Stage,
)
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import copy_all, upload_into


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
    first_token_ids: Tensor | None = None
    """int64 [num_reqs]: the token at the first position; None where nobody asked for it."""
    position_deltas: Tensor | None = None
    """int64 [num_reqs]: as `Roots.position_deltas`."""

    def rotated(self, positions: Tensor) -> Tensor:
        """Positions that pairs at int64 [num_reqs, width] are rotated by."""
        return positions if self.position_deltas is None else positions + self.position_deltas[:, None]

    def spread(self) -> tuple[Tensor, Tensor]:
        """Positions int64 [num_reqs, width] of the columns, and bool [num_reqs, width] which of them count."""
        steps = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return self.positions[:, None] + steps, steps < self.num_tokens[:, None]

    def trimmed(self) -> "DecidedRows":
        """Without the columns that count for no sequence; numbers of the rows must lie on the host."""
        width = max(int(self.num_tokens.max()), 1)
        return self._replace(token_ids=self.token_ids[:, :width], taps=self.taps[:, :width])


class PassRows(NamedTuple):
    """Inputs of both stages: `DecidedRows`, and beside them who wants a tree, which need not be the same slots."""

    slots: Tensor
    """int64 [num_reqs, 2]: of the decode, and of the tree; rows of either that pad have nobody's."""
    positions: Tensor
    num_tokens: Tensor
    token_ids: Tensor
    taps: Tensor
    first_token_ids: Tensor
    levels: Tensor
    """int64 [num_reqs, depth]: as many columns as the trees have levels; what is in them is not read."""


class Committed(NamedTuple):
    """`draft_accept` has no outputs: the drafter keeps what it computes."""


CommitFunction = Callable[[DecidedRows, Tensor], None]
"""(decodes, block tables by slot): takes decided tokens in."""
DraftFunction = Callable[[DecidedRows, Roots, Tensor], TokenTree]
"""(decodes, roots, block tables by slot) -> trees: takes decided tokens in, then grows a tree from each root. Each slot
of a decode that counts is a root's, too."""


class DraftStages:
    """The stages of a drafter at every batch bucket and depth.

    Args:
        commit, draft: rows of slot num_slots of the pool, which pad, must change nothing of anybody's.
        growth: used by `draft`.
        pool: the drafter's; its addresses must not change.
        graph_device: captures the stages.
        reads_history: decodes come with the token at their first position.
        moves: sequences may be rotated by other positions than theirs.
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
        self.spec = spec
        self.device, self.dtype = pool.device, pool.dtype
        self.spare_slot = pool.num_slots
        self.buckets = draft_batches(pool.num_slots, spec.max_path, growth.top_k)
        with torch.inference_mode(mode=False):
            self.tables, self.trees = self._by_slot(pool.num_slots + 1)
            self._rules = RuleTables(pool.num_slots, growth.draft_token_ids, growth.columns)
            growth.prepare(self.buckets)
        self._pool = GraphPool(graph_device)
        accepts = [Bucket(n, spec.max_path) for n in self.buckets]
        proposals = [Bucket(n, depth) for n in self.buckets for depth in growth.depths]
        self._accept = GraphRunner(Stage.DRAFT_ACCEPT, self._commit, self._padding, accepts, self._pool)
        self._proposal = GraphRunner(Stage.DRAFT_PROPOSAL, self._draft, self._padding, proposals, self._pool)
        # Beside it, because rules cost a level six launches and more, of which nobody else should know.
        self._ruled = GraphRunner(Stage.DRAFT_RULED, self._draft_ruled, self._padding, proposals, self._pool)
        runners = (self._accept, self._proposal, self._ruled)
        for runner in runners:
            _fill(runner, self._padding)
        self._pool.capture(*runners)

    @property
    def stats(self) -> GraphStats:
        """Captured and failed graphs, and how often each stage ran."""
        return self._pool.stats

    def fit(self, spec: ChannelSpec) -> bool:
        """Whether the stages serve a channel of this shape too, as far as its slots and blocks have room."""
        mine = self.spec
        return (spec.block_size, spec.max_blocks_per_seq) == (mine.block_size, mine.max_blocks_per_seq)

    def commit(self, batch: DraftBatch) -> None:
        """Take in the decodes, of which there is one at least."""
        count = len(batch.decode_slots)
        bucket = Bucket(bucket_for(count, self.buckets), self.spec.max_path)
        self._load(self._accept.inputs(bucket), batch, [])
        self._accept.replay(bucket, count)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Take in the decodes and grow a tree per proposal slot, also into `trees`; valid until the next pass.

        Decodes that nobody proposes for have trees too, so that a sequence's decided tokens and its root can be run
        together; nobody reads those.
        """
        proposals = batch.proposal_slots.tolist()
        asked = set(proposals)
        slots = proposals + [slot for slot in batch.decode_slots.tolist() if slot not in asked]
        bucket = Bucket(bucket_for(len(slots), self.buckets), self.growth.depth(batch))
        ruled = batch.sampling_rules is not None or batch.allowed_tokens is not None
        runner = self._ruled if ruled else self._proposal
        rows = runner.inputs(bucket)
        self._load(rows, batch, slots)
        if ruled:
            self._rules.load(batch, rows.slots[: len(proposals), 1])
        return runner.replay(bucket, len(proposals))

    def _by_slot(self, num_slots: int) -> tuple[SlotTables, TokenTree]:
        """Tables of everybody and nobody, whose sequence has one token, and room for the trees."""
        ones = torch.ones(num_slots, dtype=torch.int64, device=self.device)
        last_token_ids, seeds = torch.zeros_like(ones), torch.zeros_like(ones)
        blocks = ones.new_zeros(num_slots, self.spec.max_blocks_per_seq)
        ids, parents, depths = (ones.new_zeros(num_slots, self.spec.num_nodes) for _ in range(3))
        deltas = torch.zeros_like(ones) if self.moves else None
        tables = SlotTables(ones, last_token_ids, seeds, seeds.to(torch.float32), blocks, deltas)
        return tables, TokenTree(ids, parents, depths, ids.to(torch.float32), torch.ones_like(ones))

    def _load(self, rows: PassRows, batch: DraftBatch, tree_slots: list[int]) -> None:
        """Everything a pass reads, in two launches where it lies on the GPU: rows past those of the batch are nobody's.

        What else is in those stays what it was: tokens that exist, of a decode that does not count.
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
            # A round that ended a sequence, which its host does not know yet, may have taken it past its history.
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
        """A decode without tokens, whose KV is dropped, and a tree over no context, in the row's private blocks."""
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
        """`draft_accept`."""
        self.commit_decodes(self._decodes(rows), self.tables.block_tables)
        return Committed()

    def _draft(self, rows: PassRows) -> TokenTree:
        """`draft_proposal`: all levels of a tree after its sequence's decode."""
        return self._grow(rows, self._roots(rows))

    def _draft_ruled(self, rows: PassRows) -> TokenTree:
        """`draft_ruled`: likewise."""
        return self._grow(rows, self._rules.attach(self._roots(rows)))

    def _roots(self, rows: PassRows) -> Roots:
        return self.growth.roots_of(self.tables, rows.slots[:, 1].contiguous(), rows.levels.shape[1])

    def _grow(self, rows: PassRows, roots: Roots) -> TokenTree:
        trees = self.draft(self._decodes(rows), roots, self.tables.block_tables)
        for into, field in zip(self.trees, trees, strict=True):
            (into[:, : field.shape[1]] if field.dim() == 2 else into)[roots.slots] = field
        return trees


@torch.inference_mode()
def _fill(runner: GraphRunner, padding_row: Callable[[int], tuple]) -> None:
    """Put padding into the static inputs, whose fresh memory may hold tokens that do not exist."""
    for bucket in runner.buckets:
        for view, row in zip(runner.inputs(bucket), padding_row(bucket.size), strict=True):
            view.copy_(row)
