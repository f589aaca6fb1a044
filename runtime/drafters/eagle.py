"""Drafting with an EAGLE head: chains and EAGLE-2 dynamic trees, draft KV paged under the verifier's block ids.

Pair i = (features at position i, token i + 1) has RoPE position i. Committed pairs 0..L-2 of a sequence of L tokens
live in the paged pool and come from the verifier's taps only; drafted pairs live in a workspace thrown away after each
tree. On a device that is not the host, decodes and trees are the fixed-shape stages of `eagle_stages`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.attention import masked_attention
from wingbeat.kernels.candidates import Candidates, Coupling, top_candidates
from wingbeat.kernels.kv_cache import store_kv
from wingbeat.kernels.tree_growth import TreeTable
from wingbeat.runtime.acceptance import GrowthRule
from wingbeat.runtime.attention import AttentionSegment, attend_in_blocks, attend_segments, build_segment
from wingbeat.runtime.batch import ChannelSpec, TokenTree
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.cuda_graph import GraphStats
from wingbeat.runtime.drafters.base import DraftBatch, Drafter, DrafterNeeds
from wingbeat.runtime.drafters.draft_head import Attend, DraftHead, HeadConvention
from wingbeat.runtime.drafters.eagle_stages import DraftKV, EagleStages, private_blocks
from wingbeat.runtime.graph_device import GraphDevice
from wingbeat.runtime.transfer import upload


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
        self.speculation = speculation
        self.needs = DrafterNeeds(head.tap_layers, keeps_context=True)
        self.trained_positions = head.max_position_embeddings
        self.device = head.device
        self.dtype = head.dtype
        self.scaling = head.scaling
        self.block_size = 0
        self._hidden = torch.zeros(0)
        self._cache = (torch.zeros(0), torch.zeros(0))
        self._tables: dict[int, TreeTable] = {}
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
        if (spec.num_nodes, spec.max_path) != (self.speculation.num_nodes, self.speculation.max_path):
            raise ValueError(
                f"the channel carries trees of {spec.num_nodes} nodes and paths of {spec.max_path}: this drafter grows "
                f"{self.speculation.num_nodes} and {self.speculation.max_path}"
            )
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
        self._cache = tuple(_grown(old, shape, self.dtype, self.device) for old in self._cache)
        self._hidden = _grown(self._hidden, (num_slots + extra_slots, head.hidden_size), self.dtype, self.device)
        moved = any(old is not new for old, new in zip(before, (*self._cache, self._hidden), strict=True))
        if self._fixed_shapes and (moved or self._stages is None or not self._stages.fit(spec)):
            self._stages = None  # its graphs' memory is free for the next ones
            kv = DraftKV(*self._cache, self._hidden, first_private=num_blocks)
            self._stages = EagleStages(self.head, self.speculation, spec, kv, self._graph_device)

    def draft(self, batch: DraftBatch) -> TokenTree | None:
        """One pass; in fixed shapes decodes and trees are one stage; see `Drafter.draft`."""
        if self._stages is None:
            return super().draft(batch)
        if batch.chunk_slots:
            self._commit_rows(batch, with_decodes=False)
        if batch.proposal_slots.numel():
            return self._stages.propose(batch, self._depth(batch))
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
        may follow the chunk that completes its context in the same pass.
        """
        num_decodes, max_path = batch.decode_token_ids.shape if with_decodes else (0, 0)
        token_ids, taps, positions, kv_slots = [], [], [], []
        segments: list[AttentionSegment] = []
        last_rows, slots = [], []
        if num_decodes:
            steps = torch.arange(max_path, device=self.device)
            storage = batch.decode_positions[:, None] + steps
            real = steps < batch.decode_num_tokens[:, None]
            tables = batch.block_tables[batch.decode_slots]
            # Padding pairs may lie past the longest sequence: they count in the gathered context too.
            longest = batch.max_committed_len + max_path
            segments.append(self._segment(0, storage, batch.decode_positions, tables, longest))
            token_ids.append(batch.decode_token_ids.flatten())
            taps.append(batch.decode_taps.flatten(0, 1))
            positions.append(storage.flatten())
            kv_slots.append(torch.where(real, self._kv_slots(tables, storage), 0).flatten())
            last_rows.append(torch.arange(num_decodes, device=self.device) * max_path + batch.decode_num_tokens - 1)
            slots.append(batch.decode_slots)
        row, taken = num_decodes * max_path, 0
        chunk_rows: list[tuple[int, int]] = []
        # A decode of the same sequence comes later in its context: its hidden state must win.
        decoding = set(batch.decode_slots.tolist()) if num_decodes and batch.chunk_slots else set()
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            storage = torch.arange(start, start + length, device=self.device)[None]
            tables = batch.block_tables[slot : slot + 1]
            context = torch.full((1,), start, device=self.device)
            segments.append(self._segment(row, storage, context, tables, start + length))
            token_ids.append(batch.chunk_next_token_ids[taken : taken + length])
            taps.append(batch.chunk_taps[taken : taken + length])
            positions.append(storage[0])
            kv_slots.append(self._kv_slots(tables, storage)[0])
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
            segments,
            torch.cat(slots),
            torch.cat(last_rows),
        )

    def _run_commit(
        self,
        token_ids: Tensor,
        taps: Tensor,
        positions: Tensor,
        kv_slots: Tensor,
        segments: list[AttentionSegment],
        slots: Tensor,
        last_rows: Tensor,
    ) -> None:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            store_kv(key, value, *self._cache, kv_slots)
            return self._attend_segments(query, *self._cache, segments, self.scaling)

        hidden = self.head(token_ids, self.head.fuse(taps), self.head.rotary(positions), attend)
        self._hidden[slots] = hidden[last_rows]

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Grow a tree per proposal slot from the last committed pair; see `Drafter.propose`."""
        top_k, steps = self.speculation.draft_top_k, self._depth(batch)
        if self._stages is not None:
            return self._stages.propose(batch._replace(**_no_decodes(batch)), steps)
        slots = batch.proposal_slots
        lens = batch.committed_lens[slots]
        start = _Start(
            hidden=self._hidden[slots][:, None],
            lens=lens,
            roots=batch.token_ids[slots].gather(1, (lens - 1)[:, None]),
            coupling=self._coupling(batch, lens),
            workspace=_Workspace(self._cache, batch, lens, self.block_size, top_k, steps - 1),
            rules=batch.growth_rules,
        )
        return self._grow_chain(start, steps) if top_k == 1 else self._grow_tree(start, top_k, steps)

    def _depth(self, batch: DraftBatch) -> int:
        most = self.speculation.max_path - 1
        return most if batch.max_levels is None else min(most, batch.max_levels)

    def _grow_chain(self, start: "_Start", steps: int) -> TokenTree:
        """The likeliest token after each token: what `_grow_tree` does with top_k 1, in a third of the operations."""
        hidden, steps_taken = start.hidden, torch.arange(steps + 1, device=self.device)
        cos, sin = self.head.rotary(start.lens[:, None] - 1 + steps_taken[: steps - 1])
        token_ids, log_probs = self._candidates(hidden, start.coupling, 0)
        drafted, scores = [token_ids[:, 0]], [log_probs[:, 0]]
        chosen = torch.zeros(len(start.lens), 1, dtype=torch.int64)
        for level in range(1, steps):
            if not self._another_level_pays(start, log_probs, chosen, level):
                break
            attend = start.workspace.attend(level - 1, None, self.scaling)
            now = slice(level - 1, level)
            hidden = self.head(drafted[-1], self.head.feedback(hidden), (cos[:, now], sin[:, now]), attend)
            token_ids, log_probs = self._candidates(hidden, start.coupling, level)
            drafted.append(token_ids[:, 0])
            scores.append(log_probs[:, 0])
        grown = len(drafted)
        steps_taken = steps_taken[: grown + 1].expand(len(start.lens), -1)
        return TokenTree(
            token_ids=torch.cat([start.roots, *drafted], dim=1),
            parents=steps_taken - 1,
            depths=steps_taken,
            scores=torch.cat([torch.zeros_like(scores[0]), *scores], dim=1).cumsum(dim=1),
            num_valid=torch.full_like(start.lens, grown + 1),
        )

    def _grow_tree(self, start: "_Start", top_k: int, steps: int) -> TokenTree:
        """EAGLE-2's dynamic tree: each level expands the top_k best nodes of the level before."""
        num_reqs, hidden = start.hidden.shape[0], start.hidden
        table = self._table(num_reqs)
        token_ids, log_probs = self._candidates(hidden, start.coupling, 0)
        frontier = table.add_level(0, token_ids, log_probs)
        visible = torch.zeros(num_reqs, 1, top_k * (steps - 1), dtype=torch.bool, device=self.device)
        own = torch.arange(top_k, device=self.device)[None, :, None].expand(num_reqs, -1, -1)
        for level in range(1, steps):
            chosen = frontier.table_index - table.level_start(level - 1)
            if not self._another_level_pays(start, log_probs, chosen, level):
                break
            parent = frontier.frontier_parent[..., None]
            features = self.head.feedback(hidden.gather(1, parent.expand(-1, -1, hidden.shape[2])))
            visible = visible.gather(1, parent.expand(-1, -1, visible.shape[2]))
            visible = visible.scatter(2, own + (level - 1) * top_k, True)
            rotary = self.head.rotary((start.lens - 2 + level)[:, None].expand(-1, top_k))
            attend = start.workspace.attend(level - 1, visible, self.scaling)
            hidden = self.head(frontier.token_ids, features, rotary, attend)
            token_ids, log_probs = self._candidates(hidden, start.coupling, level)
            frontier = table.add_level(level, token_ids, log_probs)
        return TokenTree(*table.finalize(start.roots[:, 0], self.speculation.num_nodes))

    def _another_level_pays(self, start: "_Start", log_probs: Tensor, chosen: Tensor, depth: int) -> bool:
        """Whether any verifier's rule wants a level below `depth`."""
        if not start.rules:
            return True
        if log_probs.numel() == len(log_probs):
            chains = log_probs.flatten().tolist()
            return any([rule.pays_for_chains(chains[rows], depth) for rows, rule in start.rules])
        given, expanded = log_probs.numpy(), chosen.numpy()
        # Every rule is asked: each keeps the path probabilities of its rows.
        return any([rule.pays(given[rows], expanded[rows], depth) for rows, rule in start.rules])

    def _coupling(self, batch: DraftBatch, lens: Tensor) -> Coupling | None:
        slots = batch.proposal_slots
        temperatures = batch.temperatures[slots]
        if not bool((temperatures > 0).any()):
            return None
        return Coupling(temperatures, batch.seeds[slots], lens)

    def _candidates(self, hidden: Tensor, coupling: Coupling | None, level: int) -> Candidates:
        """Best top_k continuations of hidden [num_reqs, width, H]: target ids and log-probabilities."""
        if coupling is not None:
            coupling = coupling._replace(positions=coupling.positions + level)
        logits, top_k = self.head.logits(hidden), self.speculation.draft_top_k
        return top_candidates(logits, self.head.draft_token_ids, top_k, coupling)

    def _segment(self, start: int, storage: Tensor, context: Tensor, tables: Tensor, longest: int) -> AttentionSegment:
        """Causal rows behind a context; `longest` bounds the keys they see."""
        tables = tables[:, : min(-(-longest // self.block_size), tables.shape[1])]
        if self._fixed_shapes:
            return AttentionSegment(start, *storage.shape, tables, {}, num_context=context, positions=storage)
        return build_segment(start, storage, context, None, tables, self.block_size, (0,), self.dtype)

    def _kv_slots(self, tables: Tensor, storage: Tensor) -> Tensor:
        blocks = tables.gather(1, (storage // self.block_size).clamp_max(tables.shape[1] - 1))
        return blocks * self.block_size + storage % self.block_size

    def _table(self, num_reqs: int) -> TreeTable:
        if num_reqs not in self._tables:
            depth = self.speculation.max_path - 1
            self._tables[num_reqs] = TreeTable(num_reqs, self.speculation.draft_top_k, depth, self.device)
        return self._tables[num_reqs]


class _Start(NamedTuple):
    """Where the trees of one propose begin."""

    hidden: Tensor
    """[num_reqs, 1, H]: the head's output at the last committed pair."""
    lens: Tensor
    """int64 [num_reqs]: committed tokens."""
    roots: Tensor
    """int64 [num_reqs, 1]"""
    coupling: Coupling | None
    """Noise of the first drafted token; None where all requests are known to be greedy."""
    workspace: "_Workspace"
    rules: tuple[tuple[slice, GrowthRule], ...]


class _Workspace:
    """Keys and values of one propose: the committed context, gathered once, and behind it the drafted pairs."""

    def __init__(
        self, cache: tuple[Tensor, Tensor], batch: DraftBatch, lens: Tensor, block_size: int, top_k: int, levels: int
    ) -> None:
        self.top_k = top_k
        num_blocks = max(-(-(batch.max_committed_len - 1) // block_size), 1)
        tables = batch.block_tables[batch.proposal_slots, :num_blocks]
        # The context of one chain ends where its drafted pairs begin: nothing has to be masked.
        self.alone = len(lens) == 1 and top_k == 1
        self.num_context = int(lens[0]) - 1 if self.alone else num_blocks * block_size
        num_reqs, num_keys = len(lens), self.num_context + levels * top_k
        self.keys, self.values = (part.new_empty(num_reqs, num_keys, *part.shape[2:]) for part in cache)
        for tensor, part in zip((self.keys, self.values), cache, strict=True):
            tensor[:, : self.num_context] = part[tables].flatten(1, 2)[:, : self.num_context]
            # A masked key has weight zero, but zero times the NaN that fresh memory may hold is NaN.
            tensor[:, self.num_context :] = 0
        if self.alone:
            return
        self.hidden = torch.finfo(self.keys.dtype).min
        shown = torch.arange(num_keys, device=lens.device) < (lens - 1)[:, None]
        mask = torch.where(shown, 0.0, self.hidden).to(self.keys.dtype)
        self.mask = mask[:, None].expand(-1, top_k, -1).clone()

    def attend(self, level: int, visible: Tensor | None, scaling: float) -> Attend:
        """The `attend` of one level.

        Args:
            visible: bool [num_reqs, top_k, levels * top_k], drafted pairs each node sees beside the context; None adds
                the level's own pairs to what the level before saw.
        """
        begin = self.num_context + level * self.top_k
        own = slice(begin, begin + self.top_k)
        if self.alone:
            return self._attend_alone(own, scaling)
        if visible is None:
            self.mask[:, :, own] = 0
        else:
            self.mask[:, :, self.num_context :] = torch.where(visible, 0.0, self.hidden)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[:, own], self.values[:, own] = key, value
            return masked_attention(query, self.keys, self.values, self.mask, scaling)

        return attend

    def _attend_alone(self, own: slice, scaling: float) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[:, own], self.values[:, own] = key, value
            return masked_attention(query, self.keys[:, : own.stop], self.values[:, : own.stop], None, scaling)

        return attend


def _grown(old: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero tensor of `shape` beginning with the rows of `old`, where they are alike; `old` itself if large enough."""
    same_rows = old.shape[1:] == shape[1:]
    if same_rows and old.shape[0] >= shape[0]:
        return old
    new = torch.zeros(shape, dtype=dtype, device=device)
    if same_rows:
        new[: old.shape[0]] = old
    return new


def _no_decodes(batch: DraftBatch) -> dict[str, Tensor]:
    """The fields of a batch's decodes, without rows."""
    return {name: part[:0] for name, part in batch._asdict().items() if name.startswith("decode_")}
