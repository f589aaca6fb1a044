"""One round on the device: flatten the batch, run the verifier, choose tokens, walk the trees, compact the KV."""

import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wingbeat.kernels.kv_cache import move_kv
from wingbeat.kernels.sampling import choose_tokens
from wingbeat.kernels.tree import ancestor_mask, walk_tree
from wingbeat.runtime.attention import AttentionMetadata, AttentionSegment, build_segment
from wingbeat.runtime.batch import TokenTree
from wingbeat.runtime.compiled_decode import CompiledDecode
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv_cache import KVCache
from wingbeat.runtime.model_loader import LoadedModel
from wingbeat.runtime.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.sequence import Sequence
from wingbeat.runtime.slot_state import SlotState
from wingbeat.runtime.verifier_model import ForwardBatch, VerifierModel


class RoundResult(NamedTuple):
    """What a round decided. Decode rows are in the order of `SchedulerOutput.decodes`."""

    positions: Tensor
    """int64 [num_decodes]: position of each root."""
    token_ids: Tensor
    """int64 [num_decodes, max_path]: accepted tokens, then the bonus token; the rest is zero."""
    num_tokens: Tensor
    """int64 [num_decodes]: tokens emitted, 1..max_path."""
    taps: Tensor | None
    """[num_decodes, max_path, taps_size] along the accepted path; one column where all roots are bare."""
    chunk_taps: Tensor | None
    """[num_chunk_tokens, taps_size], chunks back to back."""
    token_lists: list[list[int]]
    """The emitted tokens on the host, by decode."""
    num_tokens_list: list[int]
    chunk_token_ids: list[list[int]]
    """By chunk: the token its last row yields, or nothing."""
    path_nodes: Tensor | None = None
    """int64 [num_decodes, max_path]: root and accepted nodes, the last one repeated; None without decodes."""


class _Decodes(NamedTuple):
    """Device inputs of a round's decodes: [num_reqs] or [num_reqs, num_nodes]."""

    slots: Tensor
    roots: Tensor
    tree: TokenTree
    positions: Tensor
    kv_slots: Tensor


class ModelRunner:
    """Runs rounds on one device.

    Args:
        model: the verifier with its taps.
        slots: per-sequence device state, shared with the draft session.
    """

    def __init__(
        self, loaded: LoadedModel, model: VerifierModel, cache: KVCache, slots: SlotState, config: EngineConfig
    ) -> None:
        self.model = model
        self.cache = cache
        self.slots = slots
        self.config = config
        self.device = slots.device
        self.dtype = loaded.dtype
        self.windows = loaded.windows
        self.max_depth = config.speculation.max_path - 1
        self.decode = model
        self.forward_s = 0.0
        if config.compile:
            self.decode = CompiledDecode(model, cache, self.windows, config)
            self.decode.warm_up(with_trees=model.taps_size > 0)

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput, trees: TokenTree | None) -> RoundResult:
        """Compute one round.

        Args:
            trees: one per decoding sequence, or None where all are bare roots.
        """
        for seq in plan.admitted:
            self.slots.admit(seq)
        for seq in plan.decodes:
            self.slots.sync_blocks(seq)
        for chunk in plan.chunks:
            self.slots.sync_blocks(chunk.seq)
        decodes = self._prepare_decodes(plan.decodes, trees)
        batch = self._flatten(plan, decodes)
        started = time.perf_counter()
        output = self.model(batch) if plan.chunks else self.decode(batch)
        self.forward_s += time.perf_counter() - started
        chosen = self._choose(plan, decodes, output.logits)
        return self._commit(plan, decodes, chosen, output.taps)

    def _prepare_decodes(self, seqs: list[Sequence], trees: TokenTree | None) -> _Decodes | None:
        if not seqs:
            return None
        slots = torch.tensor([seq.slot for seq in seqs], device=self.device)
        roots = self.slots.committed_lens[slots] - 1
        root_ids = self.slots.last_token_ids[slots]
        if trees is None:
            zeros = torch.zeros_like(root_ids)[:, None]
            trees = TokenTree(root_ids[:, None], zeros - 1, zeros, zeros.float(), torch.ones_like(slots))
        else:
            trees.token_ids[:, 0] = root_ids
        storage = roots[:, None] + torch.arange(trees.token_ids.shape[1], device=self.device)
        real = storage - roots[:, None] < trees.num_valid[:, None]
        positions = roots[:, None] + torch.where(real, trees.depths, 0)
        return _Decodes(slots, roots, trees, positions, torch.where(real, self._kv_slots(slots, storage), 0))

    def _kv_slots(self, slots: Tensor, storage: Tensor) -> Tensor:
        """Slot in the pool of each stored position [num_reqs, n] of sequences in `slots` [num_reqs]."""
        size = self.config.block_size
        last = self.slots.block_tables.shape[1] - 1
        blocks = self.slots.block_tables[slots].gather(1, (storage // size).clamp_max(last))
        return blocks * size + storage % size

    def _flatten(self, plan: SchedulerOutput, decodes: _Decodes | None) -> ForwardBatch:
        token_ids, positions, kv_slots, rows = [], [], [], []
        segments: list[AttentionSegment] = []
        num_rows = 0
        if decodes is not None:
            segments.append(self._decode_segment(plan.decodes, decodes))
            token_ids.append(decodes.tree.token_ids.flatten())
            positions.append(decodes.positions.flatten())
            kv_slots.append(decodes.kv_slots.flatten())
            num_rows = token_ids[0].shape[0]
            rows.append(torch.arange(num_rows, device=self.device))
        for chunk in plan.chunks:
            chunk_positions = torch.arange(chunk.start, chunk.start + chunk.length, device=self.device)
            slots = torch.tensor([chunk.seq.slot], device=self.device)
            segments.append(self._chunk_segment(num_rows, chunk, chunk_positions))
            tokens = chunk.seq.token_ids[chunk.start : chunk.start + chunk.length]
            token_ids.append(torch.tensor(tokens, device=self.device))
            positions.append(chunk_positions)
            stored = self._kv_slots(slots, chunk_positions[None])[0]
            # A replay reads the KV that stands; writing it again could change a shared block's last bits.
            kv_slots.append(torch.zeros_like(stored) if chunk.replay else stored)
            num_rows += chunk.length
            if chunk.samples:
                rows.append(torch.tensor([num_rows - 1], device=self.device))
        metadata = AttentionMetadata(self.cache.layers, torch.cat(kv_slots), segments)
        logits_rows = torch.cat(rows) if plan.chunks and rows else None
        if not rows:
            logits_rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        return ForwardBatch(torch.cat(token_ids)[None], torch.cat(positions)[None], logits_rows, metadata)

    def _decode_segment(self, seqs: list[Sequence], decodes: _Decodes) -> AttentionSegment:
        num_nodes = decodes.tree.token_ids.shape[1]
        longest = max(len(seq.token_ids) for seq in seqs) - 1 + num_nodes
        num_blocks = -(-longest // self.config.block_size)
        tables = self.slots.block_tables[decodes.slots, :num_blocks]
        visible = ancestor_mask(decodes.tree.parents, self.max_depth if num_nodes > 1 else 0)
        segment = build_segment(
            0, decodes.positions, decodes.roots, visible, tables, self.config.block_size, self.windows, self.dtype
        )
        # A compiled graph would be specialised on the number, and a captured one on the address.
        if self.config.compile or self.device.type != "cpu":
            return segment
        return segment._replace(first_block=_first_of_run(seqs, num_blocks))

    def _chunk_segment(self, start: int, chunk: Chunk, positions: Tensor) -> AttentionSegment:
        end = chunk.start + chunk.length
        tables = self.slots.block_tables[chunk.seq.slot : chunk.seq.slot + 1, : -(-end // self.config.block_size)]
        visible = torch.ones(1, chunk.length, chunk.length, dtype=torch.bool, device=self.device).tril()
        context = torch.tensor([chunk.start], device=self.device)
        return build_segment(
            start, positions[None], context, visible, tables, self.config.block_size, self.windows, self.dtype
        )

    def _choose(self, plan: SchedulerOutput, decodes: _Decodes | None, logits: Tensor) -> Tensor:
        """The target's token at each row that has logits: int64 [num_rows]."""
        sampled = [chunk.seq for chunk in plan.chunks if chunk.samples]
        if decodes is None and not sampled:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        params = [seq.request.params for seq in (*plan.decodes, *sampled)]
        if not any(p.temperature > 0 for p in params):
            return logits.argmax(dim=-1)
        slots, positions = [], []
        if decodes is not None:
            slots.append(decodes.slots.repeat_interleave(decodes.positions.shape[1]))
            positions.append(decodes.positions.flatten() + 1)
        if sampled:
            slots.append(torch.tensor([seq.slot for seq in sampled], device=self.device))
            positions.append(torch.tensor([len(seq.token_ids) for seq in sampled], device=self.device))
        row = torch.cat(slots)
        state = self.slots
        return choose_tokens(
            logits,
            state.temperatures[row],
            state.top_ks[row],
            state.top_ps[row],
            state.min_ps[row],
            state.seeds[row],
            torch.cat(positions),
            any_sampled=True,
            any_filtered=any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p in params),
        )

    def _commit(
        self, plan: SchedulerOutput, decodes: _Decodes | None, chosen: Tensor, taps: Tensor | None
    ) -> RoundResult:
        num_decode_rows = 0 if decodes is None else decodes.tree.token_ids.numel()
        path_taps = path_nodes = None
        if decodes is None:
            empty = torch.zeros(0, dtype=torch.int64, device=self.device)
            roots, token_ids, num_tokens = empty, empty.view(0, self.max_depth + 1), empty
        else:
            tree, roots = decodes.tree, decodes.roots
            num_reqs, num_nodes = tree.token_ids.shape
            targets = chosen[:num_decode_rows].view(num_reqs, num_nodes)
            max_path = self.max_depth + 1 if num_nodes > 1 else 1
            walk = walk_tree(tree.token_ids, tree.parents, tree.num_valid, targets, max_path)
            # Bare roots walk nowhere: their one token is padded to the width that the drafter's buffers have.
            token_ids = pad(walk.token_ids, (0, self.max_depth + 1 - max_path))
            num_tokens, path_nodes = walk.num_tokens, walk.nodes
            self._compact(decodes, walk.nodes, num_tokens)
            self.slots.committed_lens[decodes.slots] += num_tokens
            bonus = token_ids.gather(1, (num_tokens - 1)[:, None])[:, 0]
            self.slots.last_token_ids[decodes.slots] = bonus
            if taps is not None:
                rows = walk.nodes + torch.arange(num_reqs, device=self.device)[:, None] * num_nodes
                path_taps = taps[rows]
        sampled = chosen[num_decode_rows:].tolist()
        chunk_token_ids = [[sampled.pop(0)] if chunk.samples else [] for chunk in plan.chunks]
        for chunk, tokens in zip(plan.chunks, chunk_token_ids, strict=True):
            if tokens:
                self.slots.committed_lens[chunk.seq.slot] += 1
                self.slots.last_token_ids[chunk.seq.slot] = tokens[0]
        counts = num_tokens.tolist()
        return RoundResult(
            positions=roots,
            token_ids=token_ids,
            num_tokens=num_tokens,
            taps=path_taps,
            chunk_taps=None if taps is None else taps[num_decode_rows:],
            token_lists=[row[:count] for row, count in zip(token_ids.tolist(), counts, strict=True)],
            num_tokens_list=counts,
            chunk_token_ids=chunk_token_ids,
            path_nodes=path_nodes,
        )

    def _compact(self, decodes: _Decodes, nodes: Tensor, num_tokens: Tensor) -> None:
        """Move the accepted nodes' KV from their scratch slots to the positions they now occupy."""
        if decodes.tree.token_ids.shape[1] == 1 or self.config.speculation.draft_top_k == 1:
            return
        steps = torch.arange(nodes.shape[1], device=self.device)
        moved = (steps < num_tokens[:, None]) & (nodes != steps)
        if self.device.type == "cpu" and not bool(moved.any()):
            return
        start = decodes.roots[:, None]
        source = torch.where(moved, self._kv_slots(decodes.slots, start + nodes), 0)
        target = torch.where(moved, self._kv_slots(decodes.slots, start + steps), 0)
        move_kv(self.cache.layers, source.flatten(), target.flatten())


def _first_of_run(seqs: list[Sequence], num_blocks: int) -> int | None:
    """First block of a single sequence whose first `num_blocks` blocks follow one another in the pool."""
    blocks = seqs[0].blocks[:num_blocks]
    alone_in_order = len(seqs) == 1 and blocks == list(range(blocks[0], blocks[0] + num_blocks))
    return blocks[0] if alone_in_order else None
