"""Drafting with an EAGLE head: chains and EAGLE-2 dynamic trees, draft KV paged under the verifier's block ids.

Pair i = (features at position i, token i + 1) has RoPE position i. Committed pairs 0..L-2 of a sequence of L tokens
live in the paged pool and come from the verifier's taps only; drafted pairs live in a workspace thrown away after each
tree. On a device that is not the host, decodes and trees are the fixed-shape stages of `eagle_stages`.
"""

import torch
from torch import Tensor

from wingbeat.kernels.kv.reference import store_kv
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterNeeds
from wingbeat.runtime.drafters.draft_pool import check_tree_shape, grown
from wingbeat.runtime.drafters.eagle_stages import DraftKV, EagleStages, private_blocks
from wingbeat.runtime.drafters.growth import Growth, Level
from wingbeat.runtime.drafters.workspace import Workspace
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.graphs.graph_runner import GraphStats
from wingbeat.runtime.heads.contract import DraftHead, HeadConvention
from wingbeat.runtime.protocol.messages import ChannelSpec, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.verifier.attention import AttentionSegment, attend_in_blocks, attend_segments, build_segment
from wingbeat.runtime.verifier.speed_up import lay_out_linears


class EagleDrafter(Drafter):
    """A draft head and its KV.

    Args:
        head: weights, on the device to draft on.
        speculation: shape of the trees.
        graph_device: captures every batch size and depth whenever a verifier is attached; None runs eagerly.
        fixed_shapes: run the stages of other devices on the CPU too; a graph device implies it.
    """

    def __init__(
        self,
        head: DraftHead,
        speculation: SpeculationConfig,
        graph_device: GraphDevice | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        self.head = head.eval().requires_grad_(False)
        lay_out_linears(self.head)
        self.speculation = speculation
        self.needs = DrafterNeeds(head.tap_layers, keeps_context=True)
        self.trained_positions = head.max_position_embeddings
        self.device = head.device
        self.dtype = head.dtype
        self.scaling = head.scaling
        self.growth = Growth(speculation, head.draft_token_ids)
        self.block_size = 0
        self._hidden = torch.zeros(0)
        self._cache = (torch.zeros(0), torch.zeros(0))
        self._graph_device = graph_device
        self._fixed_shapes = fixed_shapes or graph_device is not None or self.device.type != "cpu"
        # Dense masks are quick on the host alone.
        self._attend_segments = attend_in_blocks if self._fixed_shapes else attend_segments
        self._stages: EagleStages | None = None
        self._num_slots = self._num_blocks = 0

    @property
    def graph_stats(self) -> GraphStats | None:
        """Of the stages; None before the first verifier is attached, and where decodes and trees have no stages."""
        return None if self._stages is None else self._stages.stats

    def read_as(self, convention: HeadConvention) -> None:
        """See `Drafter.read_as`."""
        self.head = self.head.with_convention(convention)
        self.needs = self.needs._replace(tap_layers=convention.tap_layers)

    def resize(self, spec: ChannelSpec, num_slots: int, num_blocks: int) -> None:
        """See `Drafter.resize`."""
        head = self.head
        if spec.taps_size != head.taps_size:
            raise ValueError(f"the verifier sends taps of size {spec.taps_size}: this head needs {head.taps_size}")
        check_tree_shape(spec, self.speculation.num_nodes, self.speculation.max_path)
        if spec.block_size != self.block_size:
            self._num_blocks = 0
        self.block_size = spec.block_size
        # Room is never given back: a later verifier may fit into it, and then nothing moves.
        num_slots = self._num_slots = max(num_slots, self._num_slots)
        num_blocks = self._num_blocks = max(num_blocks, self._num_blocks)
        extra_slots = extra_blocks = 0
        if self._fixed_shapes:
            extra_slots, extra_blocks = 1, num_slots * private_blocks(self.speculation, self.block_size)
        shape = (num_blocks + extra_blocks, spec.block_size, head.num_key_value_heads, head.head_dim)
        before = (*self._cache, self._hidden)
        self._cache = tuple(grown(old, shape, self.dtype, self.device) for old in self._cache)
        self._hidden = grown(self._hidden, (num_slots + extra_slots, head.hidden_size), self.dtype, self.device)
        moved = any(old is not new for old, new in zip(before, (*self._cache, self._hidden), strict=True))
        if self._fixed_shapes and (moved or self._stages is None or not self._stages.fit(spec)):
            self._stages = None  # its graphs' memory is free for the next ones
            kv = DraftKV(*self._cache, self._hidden, first_private=num_blocks)
            self._stages = EagleStages(self.head, self.speculation, spec, kv, self._graph_device)
            if self.device.type == "cuda":
                self._warm_up(spec, num_slots)

    @torch.inference_mode()
    def _warm_up(self, spec: ChannelSpec, spare_slot: int) -> None:
        """Run a chunk of nobody's: the time in which kernels compile must not pass for the silence of a stuck one."""
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        length = min(spec.max_prefill_tokens, spec.max_model_len)
        by_slot = torch.zeros(spare_slot + 1, dtype=torch.int64, device=self.device)
        batch = DraftBatch(
            decode_slots=torch.zeros(0, dtype=torch.int64),
            decode_positions=none,
            decode_num_tokens=none,
            decode_token_ids=none.view(0, spec.max_path),
            decode_taps=none.new_zeros(0, spec.max_path, spec.taps_size, dtype=spec.taps_dtype),
            chunk_slots=[spare_slot],
            chunk_positions=[0],
            chunk_lens=[length],
            chunk_next_token_ids=none.new_zeros(length),
            chunk_taps=none.new_zeros(length, spec.taps_size, dtype=spec.taps_dtype),
            proposal_slots=torch.zeros(0, dtype=torch.int64),
            epochs=by_slot,
            committed_lens=by_slot,
            block_tables=by_slot.new_zeros(spare_slot + 1, spec.max_blocks_per_seq),
            temperatures=by_slot.float(),
            seeds=by_slot,
            token_ids=by_slot[:, None],
            max_committed_len=spec.max_model_len,
        )
        self._commit_rows(batch, with_decodes=False)

    def draft(self, batch: DraftBatch) -> TokenTree | None:
        """One pass; in fixed shapes decodes and trees are one stage; see `Drafter.draft`."""
        if self._stages is None:
            return super().draft(batch)
        if batch.chunk_slots:
            self._commit_rows(batch, with_decodes=False)
        if batch.proposal_slots.numel():
            return self._stages.propose(batch, self.growth.depth(batch))
        if batch.decode_slots.numel():
            self._stages.commit(batch)
        return None

    def commit(self, batch: DraftBatch) -> None:
        """Recompute draft KV of decided tokens from the verifier's taps; see `Drafter.commit`."""
        if self._stages is None:
            if batch.decode_slots.numel() or batch.chunk_slots:
                self._commit_rows(batch, with_decodes=True)
            return
        if batch.chunk_slots:
            self._commit_rows(batch, with_decodes=False)
        if batch.decode_slots.numel():
            self._stages.commit(batch)

    def _commit_rows(self, batch: DraftBatch, with_decodes: bool) -> None:
        """Chunks, and decodes where asked for, in shapes that follow the data.

        All rows run in one pass: with a single layer, a row's key and value depend on its own inputs only, so a decode
        may follow the chunk that completes its context in the same pass. And nobody asks for more of a sequence than
        its keys, its values and the hidden state of its last row.
        """
        token_ids, taps, positions, kv_slots = [], [], [], []
        last_rows, slots = [], []
        row = taken = 0
        if with_decodes and batch.decode_slots.numel():
            steps = torch.arange(batch.decode_token_ids.shape[1], device=self.device)
            real = (steps < batch.decode_num_tokens[:, None]).flatten().nonzero()[:, 0]
            storage = batch.decode_positions[:, None] + steps
            token_ids.append(batch.decode_token_ids.flatten()[real])
            taps.append(batch.decode_taps.flatten(0, 1)[real])
            positions.append(storage.flatten()[real])
            kv_slots.append(self._kv_slots(batch.block_tables[batch.decode_slots], storage).flatten()[real])
            last_rows.append(batch.decode_num_tokens.cumsum(0) - 1)
            slots.append(batch.decode_slots)
            row = len(real)
        chunk_rows: list[tuple[int, int]] = []
        # A decode of the same sequence comes later in its context: its hidden state must win.
        decoding = set(batch.decode_slots.tolist()) if row and batch.chunk_slots else set()
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            storage = torch.arange(start, start + length, device=self.device)
            token_ids.append(batch.chunk_next_token_ids[taken : taken + length])
            taps.append(batch.chunk_taps[taken : taken + length])
            positions.append(storage)
            kv_slots.append(self._kv_slots(batch.block_tables[slot : slot + 1], storage[None])[0])
            row, taken = row + length, taken + length
            if slot not in decoding:
                chunk_rows.append((row - 1, slot))
        if chunk_rows:
            rows, of_slots = upload(list(zip(*chunk_rows, strict=True)), self.device)
            last_rows.append(rows)
            slots.append(of_slots)
        self._run_commit(
            torch.cat(token_ids),
            torch.cat(taps),
            torch.cat(positions),
            torch.cat(kv_slots),
            torch.cat(slots),
            torch.cat(last_rows),
            batch,
        )

    def _run_commit(
        self,
        token_ids: Tensor,
        taps: Tensor,
        positions: Tensor,
        kv_slots: Tensor,
        slots: Tensor,
        last_rows: Tensor,
        batch: DraftBatch,
    ) -> None:
        last = positions[last_rows]
        segment = self._segment(last[:, None], last, batch.block_tables[slots], batch.max_committed_len)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            store_kv(key, value, *self._cache, kv_slots)
            return self._attend_segments(query, *self._cache, [segment], self.scaling)

        rotary = self.head.rotary(positions)
        self._hidden[slots] = self.head(token_ids, self.head.fuse(taps), rotary, attend, last_rows)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Grow a tree per proposal slot from the last committed pair; see `Drafter.propose`."""
        depth = self.growth.depth(batch)
        if self._stages is not None:
            return self._stages.propose(batch._replace(**_no_decodes(batch)), depth)
        slots = batch.proposal_slots
        lens = batch.committed_lens[slots]
        workspace = Workspace(self._cache, batch, lens, self.block_size, self.growth.top_k, depth - 1)
        drafting = _Drafting(self.head, workspace, lens, self._hidden[slots][:, None], depth)
        roots = batch.token_ids[slots, lens - 1]
        return self.growth.grow(batch, slots, roots, self.head.logits(drafting.hidden), drafting.expand)

    def _segment(self, storage: Tensor, context: Tensor, tables: Tensor, longest: int) -> AttentionSegment:
        """Causal rows behind a context; `longest` bounds the keys they see."""
        tables = tables[:, : min(-(-longest // self.block_size), tables.shape[1])]
        if self._fixed_shapes:
            return AttentionSegment(0, *storage.shape, tables, {}, num_context=context, positions=storage)
        return build_segment(0, storage, context, None, tables, self.block_size, (0,), self.dtype)

    def _kv_slots(self, tables: Tensor, storage: Tensor) -> Tensor:
        blocks = tables.gather(1, (storage // self.block_size).clamp_max(tables.shape[1] - 1))
        return blocks * self.block_size + storage % self.block_size


class _Drafting:
    """The drafted pairs of one propose.

    Args:
        lens: int64 [num_reqs]: committed tokens.
        hidden: [num_reqs, 1, H]: the head's output at the last committed pairs.
        depth: most levels.
    """

    def __init__(self, head: DraftHead, workspace: Workspace, lens: Tensor, hidden: Tensor, depth: int) -> None:
        self.head = head
        self.workspace = workspace
        self.hidden = hidden
        """[num_reqs, width, H]: the head's output at the nodes run last."""
        self._cos, self._sin = head.rotary(lens[:, None] - 1 + torch.arange(depth - 1, device=lens.device))

    def expand(self, level: Level) -> Tensor:
        """See `wingbeat.runtime.drafters.growth.Expand`."""
        hidden, now = self.hidden, slice(level.depth - 1, level.depth)
        if level.visible is not None:
            hidden = hidden.gather(1, level.parents[..., None].expand(-1, -1, hidden.shape[2]))
        attend = self.workspace.attend(level.depth - 1, level.visible, self.head.scaling)
        rotary = (self._cos[:, now], self._sin[:, now])
        self.hidden = self.head(level.token_ids, self.head.feedback(hidden), rotary, attend)
        return self.head.logits(self.hidden)


def _no_decodes(batch: DraftBatch) -> dict[str, Tensor]:
    """The fields of a batch's decodes, without rows."""
    return {name: part[:0] for name, part in batch._asdict().items() if name.startswith("decode_")}
