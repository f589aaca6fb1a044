"""`StagedDrafter`: a drafter with weights, whose passes run eagerly or as CUDA graphs.

A subclass implements three operations: committing prompt chunks, in shapes that depend on the data; committing decodes,
in fixed shapes; and growing trees, in fixed shapes. `draft_stages` captures the last two.
"""

import gc
from abc import abstractmethod

import torch
from torch import Tensor

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterOptions
from wingbeat.runtime.drafters.decided_rows import DecidedRows
from wingbeat.runtime.drafters.draft_pool import DraftPool, check_tree_shape
from wingbeat.runtime.drafters.draft_stages import DraftStages
from wingbeat.runtime.drafters.growth import COMMIT, Growth, Roots, Rules
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.graphs.graph_runner import GraphStats
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import upload


class StagedDrafter(Drafter):
    """A drafter with its own KV pool.

    Args:
        speculation: shape of the trees.
        pool: KV pool, on the device of the weights.
        growth: grows the trees.
        graph_device: captures passes of every batch size and depth whenever a verifier is attached; None runs passes
            eagerly.
    """

    reads_history = False
    """Whether captured commits need the token at each decode's first position."""

    def __init__(
        self, speculation: SpeculationConfig, pool: DraftPool, growth: Growth, graph_device: GraphDevice | None
    ) -> None:
        self.speculation = speculation
        self.pool, self.growth = pool, growth
        self.device, self.dtype = pool.device, pool.dtype
        self.fixed_shapes = graph_device is not None or pool.device.type != "cpu"
        """Whether shapes are independent of the data; on CPUs, the attribute may be set to True before a verifier is
        attached.
        """
        self._graph_device = graph_device
        self._stages: DraftStages | None = None
        self._moves = False
        """Whether the RoPE positions of text tokens after media spans may differ from the tokens' positions."""

    @property
    def graph_stats(self) -> GraphStats | None:
        """Statistics of the captured stages; None if nothing is captured or no verifier was attached yet."""
        return None if self._stages is None else self._stages.stats

    @property
    def stages(self) -> DraftStages | None:
        """The captured stages; None if passes run eagerly or no verifier was attached yet."""
        return self._stages

    @property
    def stage_counts(self) -> dict[str, int]:
        """See `Drafter.stage_counts`."""
        return {} if self.graph_stats is None else self.graph_stats.counts()

    @property
    def trees_by_slot(self) -> TokenTree | None:
        """See `Drafter.trees_by_slot`."""
        return None if self._stages is None else self._stages.trees

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`; captures the graphs again if an address or shape has changed."""
        self._check_taps(spec)
        check_tree_shape(spec, self.speculation.num_nodes, self.speculation.max_path)
        moved = self.pool.resize(spec, num_slots, num_blocks)
        # The additional last row is for padding.
        self._resize_state(self.pool.num_slots + 1)
        stages, self._moves = self._stages, self._moves or spec.num_axes > 0
        fit = stages is not None and stages.fit(spec) and stages.moves == self._moves
        if self._graph_device is not None and (moved or not fit):
            self._stages = stages = None
            # stages and their runners form a reference cycle; collecting it frees the old graphs' memory for the new
            # graphs
            gc.collect()
            self._stages = stages = DraftStages(
                self._commit_decodes,
                self._draft,
                self.growth,
                spec,
                self.pool,
                self._graph_device,
                reads_history=self.reads_history,
                moves=self._moves,
            )
            self.stage_s = stages.stage_s
        if moved and self.device.type == "cuda":
            self._warm_up(spec)

    def draft(self, batch: DraftBatch) -> TokenTree | None:
        """Run one pass; see `Drafter.draft`. If passes are captured, decodes and trees run in one graph."""
        if self._stages is None or not batch.proposal_slots.numel():
            return super().draft(batch)
        if batch.chunk_slots:
            self._commit_prompts(batch)
        self.on_committed()
        return self._stages.propose(batch)

    def commit(self, batch: DraftBatch) -> None:
        """Commit decided tokens; see `Drafter.commit`.

        Chunks are committed first, because a sequence may decode in the same pass that completes the sequence's
        context.
        """
        if batch.chunk_slots:
            self._commit_prompts(batch)
        if not batch.decode_slots.numel():
            return
        if self._stages is not None:
            self._stages.commit(batch)
            return
        slots = upload(batch.decode_slots.tolist(), self.device)
        rows = DecidedRows(
            *(slots, batch.decode_positions, batch.decode_num_tokens, batch.decode_token_ids, batch.decode_taps),
            position_deltas=None if batch.position_deltas is None else batch.position_deltas[slots],
        )
        self._commit_decodes(rows, self.pool.table_columns(batch.block_tables, batch.max_committed_len))

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Grow a tree per proposal slot; see `Drafter.propose`."""
        if self._stages is not None:
            return self._stages.propose(batch.without_commits())
        roots = self.growth.roots(batch, upload(batch.proposal_slots.tolist(), self.device))
        block_tables = self.pool.table_columns(batch.block_tables, batch.max_committed_len - 1)
        return self._grow(roots, block_tables, batch.growth_rules)

    @abstractmethod
    def _check_taps(self, spec: ChannelSpec) -> None:
        """Raises ValueError if the verifier does not send the taps that the weights need."""

    def _resize_state(self, num_rows: int) -> None:
        """Grows the state by slot to num_rows rows, keeping its content."""
        return

    def _commit_prompts(self, batch: DraftBatch) -> None:
        """Commits the chunks of a batch that has chunks, by captured passes where their inputs allow."""
        if self._stages is not None and self._stages.prompts.takes(batch):
            self._stages.prompts.commit(batch)
        else:
            self._commit_chunks(batch)

    @abstractmethod
    def _commit_chunks(self, batch: DraftBatch) -> None:
        """Commits the chunks of a batch that has chunks."""

    @abstractmethod
    def _commit_decodes(self, rows: DecidedRows, block_tables: Tensor) -> None:
        """Commits decoded tokens; block tables int64 [num_slots, num_blocks] are indexed by slot, as in `_grow`."""

    @abstractmethod
    def _grow(self, roots: Roots, block_tables: Tensor, rules: Rules = ()) -> TokenTree:
        """Grows one tree per root."""

    def _draft(self, rows: DecidedRows, roots: Roots, block_tables: Tensor) -> TokenTree:
        """See `wingbeat.runtime.drafters.draft_stages.DraftFunction`."""
        self._commit_decodes(rows, block_tables)
        self.growth.mark(COMMIT)
        return self._grow(roots, block_tables)

    @torch.inference_mode()
    def _warm_up(self, spec: ChannelSpec) -> None:
        """Runs a padding chunk, so that kernels are compiled now.

        A drafter that compiled kernels during a later round would seem stuck.
        """
        self._commit_chunks(_nobodys_chunk(spec, self.pool.num_slots, self.device))


def graph_device_of(options: DrafterOptions, device: torch.device) -> GraphDevice | None:
    """Return the device that captures a drafter's passes; None if passes run eagerly."""
    return CudaGraphDevice(device) if options.cuda_graphs and device.type == "cuda" else None


def _nobodys_chunk(spec: ChannelSpec, slot: int, device: torch.device) -> DraftBatch:
    """Returns a batch with one chunk of maximum length, in block 0, for the spare slot, which is the last slot."""
    length = min(spec.max_prefill_tokens, spec.max_model_len)
    by_slot = torch.zeros(slot + 1, dtype=torch.int64, device=device)
    no_slots = torch.zeros(0, dtype=torch.int64)
    taps = torch.zeros(length, spec.taps_size, dtype=spec.taps_dtype, device=device)
    return DraftBatch(
        decode_slots=no_slots,
        decode_positions=by_slot[:0],
        decode_num_tokens=by_slot[:0],
        decode_token_ids=by_slot.new_zeros(0, spec.max_path),
        decode_taps=taps.new_zeros(0, spec.max_path, spec.taps_size),
        chunk_slots=[slot],
        chunk_positions=[0],
        chunk_lens=[length],
        chunk_next_token_ids=by_slot.new_zeros(length),
        chunk_taps=taps,
        proposal_slots=no_slots,
        epochs=by_slot,
        committed_lens=by_slot + length,
        block_tables=by_slot.new_zeros(slot + 1, spec.max_blocks_per_seq),
        temperatures=by_slot.to(torch.float32),
        seeds=by_slot,
        token_ids=by_slot.new_zeros(slot + 1, length),
        max_committed_len=length,
    )
