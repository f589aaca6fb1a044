"""One round on the device: flatten the batch, run the verifier, choose tokens, walk the trees, compact the KV.

A launch waits for nothing: on an accelerator it returns with everything enqueued. Lengths, roots and block tables come
from the slot state, which the round before advances on the device, and the host's lengths are upper bounds.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wingbeat.kernels.kv_cache import move_kv
from wingbeat.kernels.sampling import choose_tokens
from wingbeat.kernels.tree import ancestor_mask, walk_tree
from wingbeat.runtime.attention import AttentionMetadata, AttentionSegment, Packing, build_segment
from wingbeat.runtime.batch import TokenTree
from wingbeat.runtime.compiled_decode import CompiledDecode
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv_cache import KVCache
from wingbeat.runtime.model_loader import LoadedModel
from wingbeat.runtime.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.sequence import Sequence
from wingbeat.runtime.slot_state import DecodeRows, SlotState
from wingbeat.runtime.transfer import Download, upload
from wingbeat.runtime.verifier_model import ForwardBatch, VerifierModel


class RoundResult(NamedTuple):
    """What a round decided, on the host."""

    token_ids: list[list[int]]
    """The emitted tokens, by decode."""
    num_valid: list[int]
    """Nodes of the tree that was verified, by decode; 1 is a bare root."""
    chunk_token_ids: list[list[int]]
    """By chunk: the token its last row yields, or nothing."""
    path_nodes: Tensor
    """int64 [num_decodes, 1..max_path]: root and accepted nodes, the last one repeated."""


class AcceptedPaths(NamedTuple):
    """What a round decided for its decodes, on the device; rows are in the order of `SchedulerOutput.decodes`."""

    slots: Tensor
    """int64 [num_decodes]"""
    positions: Tensor
    """int64 [num_decodes]: position of each root."""
    token_ids: Tensor
    """int64 [num_decodes, max_path]: accepted tokens, then the bonus token; the rest is zero."""
    num_tokens: Tensor
    """int64 [num_decodes]: tokens emitted, 1..max_path."""
    num_valid: Tensor
    """int64 [num_decodes]: nodes that were verified, root included."""
    nodes: Tensor
    """int64 [num_decodes, 1..max_path]: root and accepted nodes, the last one repeated."""
    taps: Tensor | None
    """[num_decodes, 1..max_path, taps_size] along the path, as many columns as `nodes` has."""


@dataclass
class RoundInFlight:
    """A launched round."""

    plan: SchedulerOutput
    epochs: list[int]
    """By decode, then by chunk: a sequence whose epoch is another one by now has left, and its row is void."""
    decodes: AcceptedPaths
    sampled: Tensor
    """int64 [num_sampling_chunks]: the token that each chunk with `samples` yields."""
    chunk_taps: Tensor | None
    """[num_chunk_tokens, taps_size], chunks back to back."""
    forward_s: float
    """Host seconds in the verifier's forward pass; on an accelerator, for enqueueing it."""
    download: Download
    result: RoundResult | None = None
    """What it decided, once the host knows."""

    def wait(self) -> RoundResult:
        """The tokens, once the device has decided them: the one wait of a round."""
        if self.result is None:
            self.result = self._result()
        return self.result

    def num_new_tokens(self, row: int) -> int:
        """Tokens a decode emitted, or the least it can have emitted while the host does not know."""
        return 1 if self.result is None else len(self.result.token_ids[row])

    def _result(self) -> RoundResult:
        num_tokens, num_valid, token_ids, nodes, sampled = self.download.wait()
        left = iter(sampled.tolist())
        return RoundResult(
            token_ids=[row[:count] for row, count in zip(token_ids.tolist(), num_tokens.tolist(), strict=True)],
            num_valid=num_valid.tolist(),
            chunk_token_ids=[[next(left)] if chunk.samples else [] for chunk in self.plan.chunks],
            path_nodes=nodes,
        )


class _Decodes(NamedTuple):
    """Device inputs of a round's decodes: [num_reqs] or [num_reqs, num_nodes]."""

    slots: Tensor
    roots: Tensor
    token_ids: Tensor
    tree: TokenTree | None
    """None where all are bare roots."""
    positions: Tensor
    kv_slots: Tensor
    packing: Packing | None = None
    """Where the trees lie side by side without padding."""

    def packed(self, padded: Tensor) -> Tensor:
        """[num_reqs, num_nodes] as rows of the flattened batch."""
        flat = padded.flatten()
        return flat if self.packing is None else flat[self.packing.nodes]

    def rows_of(self, nodes: Tensor) -> Tensor:
        """Row of the flattened batch of each node [num_reqs, n]."""
        num_reqs, num_nodes = self.token_ids.shape
        if self.packing is None:
            return nodes + torch.arange(num_reqs, device=nodes.device)[:, None] * num_nodes
        return self.packing.rows.view(num_reqs, num_nodes).gather(1, nodes)

    @property
    def num_rows(self) -> int:
        """Rows of the flattened batch."""
        return self.token_ids.numel() if self.packing is None else len(self.packing.nodes)


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
        self.on_host = self.device.type == "cpu"
        """Whether the device is the host itself, so that looking at what it computed is no wait."""
        self.dtype = loaded.dtype
        self.windows = loaded.windows
        self.max_depth = config.speculation.max_path - 1
        self.decode = model
        if config.compile:
            self.decode = CompiledDecode(model, cache, self.windows, config)
            self.decode.warm_up(with_trees=model.taps_size > 0)

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput, rows: DecodeRows, trees: TokenTree | None) -> RoundInFlight:
        """Enqueue one round.

        Args:
            rows: what `SlotState.load` made of the plan.
            trees: one per decoding sequence, or None where all are bare roots; its roots are filled in here.
        """
        decodes = self._prepare_decodes(rows.slots, trees) if plan.decodes else None
        batch = self._flatten(plan, decodes)
        started = time.perf_counter()
        output = self.model(batch) if plan.chunks else self.decode(batch)
        forward_s = time.perf_counter() - started
        chosen = self._choose(plan, decodes, output.logits)
        return self._commit(plan, decodes, chosen, output.taps, forward_s)

    def _prepare_decodes(self, slots: Tensor, tree: TokenTree | None) -> _Decodes:
        roots = self.slots.committed_lens[slots] - 1
        root_ids = self.slots.last_token_ids[slots]
        if tree is None:
            positions = roots[:, None]
            return _Decodes(slots, roots, root_ids[:, None], None, positions, self._kv_slots(slots, positions))
        tree.token_ids[:, 0] = root_ids
        steps = torch.arange(tree.token_ids.shape[1], device=self.device)
        real = steps < tree.num_valid[:, None]
        positions = roots[:, None] + torch.where(real, tree.depths, 0)
        kv_slots = torch.where(real, self._kv_slots(slots, roots[:, None] + steps), 0)
        packing = _pack(real) if self.on_host and not self.config.compile else None
        return _Decodes(slots, roots, tree.token_ids, tree, positions, kv_slots, packing)

    def _kv_slots(self, slots: Tensor | slice, storage: Tensor) -> Tensor:
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
            token_ids.append(decodes.packed(decodes.token_ids))
            positions.append(decodes.packed(decodes.positions))
            kv_slots.append(decodes.packed(decodes.kv_slots))
            num_rows = decodes.num_rows
            rows.append(torch.arange(num_rows, device=self.device))
        for chunk in plan.chunks:
            chunk_positions = torch.arange(chunk.start, chunk.start + chunk.length, device=self.device)
            segments.append(self._chunk_segment(num_rows, chunk, chunk_positions))
            tokens = chunk.seq.token_ids[chunk.start : chunk.start + chunk.length]
            token_ids.append(upload(tokens, self.device))
            positions.append(chunk_positions)
            stored = self._kv_slots(slice(chunk.seq.slot, chunk.seq.slot + 1), chunk_positions[None])[0]
            # A replay reads the KV that stands; writing it again could change a shared block's last bits.
            kv_slots.append(torch.zeros_like(stored) if chunk.replay else stored)
            num_rows += chunk.length
            if chunk.samples:
                rows.append(torch.full((1,), num_rows - 1, device=self.device))
        metadata = AttentionMetadata(self.cache.layers, torch.cat(kv_slots), segments)
        logits_rows = torch.cat(rows) if plan.chunks and rows else None
        if not rows:
            logits_rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        return ForwardBatch(torch.cat(token_ids)[None], torch.cat(positions)[None], logits_rows, metadata)

    def _decode_segment(self, seqs: list[Sequence], decodes: _Decodes) -> AttentionSegment:
        num_nodes = decodes.token_ids.shape[1]
        longest = max(seq.max_len for seq in seqs) - 1 + num_nodes
        num_blocks = -(-longest // self.config.block_size)
        tables = self.slots.block_tables[decodes.slots, :num_blocks]
        # A compiled graph would be specialised on the place, and a captured one on the address.
        run = _run(seqs, num_blocks, self.config.block_size) if self.on_host and not self.config.compile else None
        if run is not None and num_nodes == 1 and self.windows == (0,) and seqs[0].min_len == seqs[0].max_len:
            # A bare root sees all there is, which ends with itself.
            return AttentionSegment(0, 1, 1, tables, {0: None}, slice(run.start, run.start + seqs[0].max_len))
        segment = build_segment(
            0,
            decodes.positions,
            decodes.roots,
            self._visible(decodes),
            tables,
            self.config.block_size,
            self.windows,
            self.dtype,
        )
        return segment._replace(run=run, packing=decodes.packing)

    def _visible(self, decodes: _Decodes) -> Tensor:
        """Which nodes each node of a round's trees sees: bool [num_reqs, num_nodes, num_nodes]."""
        num_reqs, num_nodes = decodes.token_ids.shape
        if decodes.tree is None or self.config.speculation.draft_top_k == 1:
            chain = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=self.device).tril()
            return chain.expand(num_reqs, -1, -1)
        return ancestor_mask(decodes.tree.parents, min(self.max_depth, num_nodes - 1))

    def _chunk_segment(self, start: int, chunk: Chunk, positions: Tensor) -> AttentionSegment:
        end = chunk.start + chunk.length
        tables = self.slots.block_tables[chunk.seq.slot : chunk.seq.slot + 1, : -(-end // self.config.block_size)]
        visible = torch.ones(1, chunk.length, chunk.length, dtype=torch.bool, device=self.device).tril()
        context = torch.full((1,), chunk.start, device=self.device)
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
            slots.append(decodes.packed(decodes.slots[:, None].expand_as(decodes.positions)))
            positions.append(decodes.packed(decodes.positions) + 1)
        if sampled:
            columns = upload([[seq.slot for seq in sampled], [len(seq.token_ids) for seq in sampled]], self.device)
            slots.append(columns[0])
            positions.append(columns[1])
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
        self,
        plan: SchedulerOutput,
        decodes: _Decodes | None,
        chosen: Tensor,
        taps: Tensor | None,
        forward_s: float,
    ) -> RoundInFlight:
        num_decode_rows = 0 if decodes is None else decodes.num_rows
        accepted = self._accept(decodes, chosen[:num_decode_rows], taps)
        sampled = chosen[num_decode_rows:]
        sampling = [chunk.seq.slot for chunk in plan.chunks if chunk.samples]
        if sampling:
            slots = upload(sampling, self.device)
            self.slots.committed_lens[slots] += 1
            self.slots.last_token_ids[slots] = sampled
        download = Download([accepted.num_tokens, accepted.num_valid, accepted.token_ids, accepted.nodes, sampled])
        return RoundInFlight(
            plan=plan,
            epochs=[seq.epoch for seq in plan.decodes] + [chunk.seq.epoch for chunk in plan.chunks],
            decodes=accepted,
            sampled=sampled,
            chunk_taps=None if taps is None else taps[num_decode_rows:],
            forward_s=forward_s,
            download=download,
        )

    def _accept(self, decodes: _Decodes | None, chosen: Tensor, taps: Tensor | None) -> AcceptedPaths:
        """Walk the trees along the target's choices; KV and slot state follow the accepted paths."""
        max_path = self.max_depth + 1
        if decodes is None:
            empty = torch.zeros(0, dtype=torch.int64, device=self.device)
            none = empty.view(0, max_path)
            return AcceptedPaths(empty, empty, none, empty, empty, none, None)
        if decodes.tree is None:
            return self._accept_bare(decodes, chosen, taps)
        tree = decodes.tree
        num_reqs, num_nodes = tree.token_ids.shape
        targets = chosen if decodes.packing is None else chosen[decodes.packing.rows]
        longest = min(max_path, num_nodes)
        walk = walk_tree(tree.token_ids, tree.parents, tree.num_valid, targets.view(num_reqs, num_nodes), longest)
        # A walk is no longer than its tree: the tokens are padded to the width that the drafter's buffers have.
        token_ids = pad(walk.token_ids, (0, max_path - longest))
        self._compact(decodes, walk.nodes, walk.num_tokens)
        self.slots.committed_lens[decodes.slots] += walk.num_tokens
        self.slots.last_token_ids[decodes.slots] = token_ids.gather(1, (walk.num_tokens - 1)[:, None])[:, 0]
        path_taps = None
        if taps is not None:
            path_taps = taps[decodes.rows_of(walk.nodes)]
        return AcceptedPaths(
            decodes.slots, decodes.roots, token_ids, walk.num_tokens, tree.num_valid, walk.nodes, path_taps
        )

    def _accept_bare(self, decodes: _Decodes, chosen: Tensor, taps: Tensor | None) -> AcceptedPaths:
        """`_accept` of bare roots: each emits the target's choice."""
        ones = torch.ones_like(decodes.slots)
        self.slots.committed_lens[decodes.slots] += 1
        self.slots.last_token_ids[decodes.slots] = chosen
        return AcceptedPaths(
            slots=decodes.slots,
            positions=decodes.roots,
            token_ids=pad(chosen[:, None], (0, self.max_depth)),
            num_tokens=ones,
            num_valid=ones,
            nodes=torch.zeros_like(chosen)[:, None],
            taps=None if taps is None else taps[: len(chosen), None],
        )

    def _compact(self, decodes: _Decodes, nodes: Tensor, num_tokens: Tensor) -> None:
        """Move the accepted nodes' KV from their scratch slots to the positions they now occupy."""
        if self.config.speculation.draft_top_k == 1:
            return
        steps = torch.arange(nodes.shape[1], device=self.device)
        moved = (steps < num_tokens[:, None]) & (nodes != steps)
        if self.on_host and not bool(moved.any()):
            return
        start = decodes.roots[:, None]
        source = torch.where(moved, self._kv_slots(decodes.slots, start + nodes), 0)
        target = torch.where(moved, self._kv_slots(decodes.slots, start + steps), 0)
        move_kv(self.cache.layers, source.flatten(), target.flatten())


def _pack(real: Tensor) -> Packing | None:
    """Where the real nodes [num_reqs, num_nodes] lie side by side; None where all are real."""
    flat = real.flatten()
    if bool(flat.all()):
        return None
    return Packing((flat.cumsum(0) - 1).clamp_min(0), flat.nonzero()[:, 0])


def _run(seqs: list[Sequence], num_blocks: int, block_size: int) -> slice | None:
    """Slots of a single sequence whose first `num_blocks` blocks follow one another in the pool."""
    blocks = seqs[0].blocks[:num_blocks]
    if len(seqs) > 1 or blocks != list(range(blocks[0], blocks[0] + num_blocks)):
        return None
    return slice(blocks[0] * block_size, (blocks[0] + num_blocks) * block_size)
