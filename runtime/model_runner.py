"""One round on the device: flatten the batch, run the verifier, choose tokens, walk the trees, compact the KV.

A launch waits for nothing: on an accelerator it returns with everything enqueued. Lengths, roots and block tables come
from the slot state, which the round before advances on the device, and the host's lengths are upper bounds.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wingbeat.kernels.kv_cache import move_kv
from wingbeat.kernels.sampling import choose_tokens, sampling_workspace
from wingbeat.kernels.tree import ancestor_mask, ancestor_words, walk_tree
from wingbeat.runtime.attention import AttentionMetadata, AttentionSegment, Packing, build_segment, worth_packing
from wingbeat.runtime.batch import AcceptedPaths, TokenTree
from wingbeat.runtime.compiled_decode import CompiledDecode
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.decode_graphs import MOST_ROWS, DecodeGraphs
from wingbeat.runtime.device_pruning import DevicePruner
from wingbeat.runtime.dummy_batch import dummy_decode_batch
from wingbeat.runtime.forced_acceptance import AcceptanceForcer
from wingbeat.runtime.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.kv_cache import KVCache
from wingbeat.runtime.layer_compile import faster_layers, replay_ms
from wingbeat.runtime.model_loader import LoadedModel
from wingbeat.runtime.round_in_flight import RoundInFlight, launched_round
from wingbeat.runtime.scheduler import Chunk, SchedulerOutput
from wingbeat.runtime.sequence import Sequence
from wingbeat.runtime.slot_state import DecodeRows, SlotState
from wingbeat.runtime.transfer import upload
from wingbeat.runtime.verifier_model import ForwardBatch, VerifierModel


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
        graph_device: captures decode rounds in place of CUDA.

    Raises:
        ValueError: `cuda_graphs` or `compile` is not to be had on this device.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        model: VerifierModel,
        cache: KVCache,
        slots: SlotState,
        config: EngineConfig,
        graph_device: GraphDevice | None = None,
    ) -> None:
        self.loaded = loaded
        self.model = model
        self.cache = cache
        self.slots = slots
        self.config = config
        self.device = slots.device
        graph_device = _graph_device(config, self.device, graph_device)
        self.on_host = self.device.type == "cpu" and graph_device is None
        """Whether the device is the host itself, so that looking at what it computed is no wait."""
        self.dtype = loaded.dtype
        self.windows = loaded.windows
        self.max_depth = config.speculation.max_path - 1
        self.forcer: AcceptanceForcer | None = None
        if config.forced_acceptance is not None:
            self.forcer = AcceptanceForcer(config.forced_acceptance, self.max_depth, self.device)
        self.pruner: DevicePruner | None = None
        if config.speculation.adaptive and not self.on_host:
            self.pruner = DevicePruner(slots, self.max_depth)
        self.decode = model
        if config.compile and self.device.type == "cpu":
            self.decode = CompiledDecode(model, cache, self.windows, config)
            self.decode.warm_up(with_trees=model.taps_size > 0)
        self.graphs: DecodeGraphs | None = None
        self._workspace_rows = 0
        if graph_device is not None:
            self._workspace_rows = min(MOST_ROWS, config.max_num_seqs * config.speculation.num_nodes)
            self._workspace = sampling_workspace(self._workspace_rows, loaded.vocab_size, self.device)
            self.graphs = DecodeGraphs(self._decode_round, slots, config, graph_device)
            self._layers = self._faster_layers() if config.compile else None
            self.graphs.capture_roots(self._layers)

    def prepare_trees(self) -> None:
        """Capture what trees need, once; no round may be in flight."""
        if self.graphs is not None:
            self.graphs.capture_trees(self._layers)

    @torch.inference_mode()
    def _faster_layers(self) -> AbstractContextManager:
        def forward(num_nodes: int) -> Callable[[], object]:
            width = self.config.max_blocks_per_seq
            batch = dummy_decode_batch(self.cache, self.windows, 1, num_nodes, width)
            return lambda: self.model(batch)

        steps = [forward(num_nodes) for num_nodes in (1, self.config.speculation.num_nodes)]
        return faster_layers(self.loaded, steps, lambda step: replay_ms(step, self.device))

    @torch.inference_mode()
    def launch(
        self, plan: SchedulerOutput, rows: DecodeRows, trees: TokenTree | None, num_nodes: int | None = None
    ) -> RoundInFlight:
        """Enqueue one round.

        Args:
            rows: what `SlotState.load` made of the plan.
            trees: one per decoding sequence, or None where all are bare roots; its roots are filled in here.
            num_nodes: of each tree, those to verify where it is pruned on the device; None verifies all.
        """
        num_nodes = num_nodes or self.config.speculation.num_nodes
        if self.graphs is not None and not plan.chunks:
            return self._replay(plan, rows.slots, trees, num_nodes)
        evidence = None
        if trees is not None and self.pruner is not None:
            trees, evidence = self.pruner.prune(trees, rows.slots, num_nodes)
        decodes = self._prepare_decodes(rows.slots, trees) if plan.decodes else None
        batch = self._flatten(plan, decodes)
        started = time.perf_counter()
        output = self.model(batch) if plan.chunks else self.decode(batch)
        forward_s = time.perf_counter() - started
        chosen = self._choose(plan, decodes, output.logits)
        return self._commit(plan, decodes, chosen, output.taps, forward_s, evidence)

    def _replay(self, plan: SchedulerOutput, slots: Tensor, trees: TokenTree | None, num_nodes: int) -> RoundInFlight:
        """`launch` of a round without prompt chunks, as one graph."""
        sampled = any(seq.request.params.temperature > 0 for seq in plan.decodes)
        started = time.perf_counter()
        accepted = self.graphs.run(slots, trees, 1 if trees is None else num_nodes, sampled)
        return launched_round(plan, accepted, slots[:0], None, time.perf_counter() - started)

    def _decode_round(self, slots: Tensor, trees: TokenTree | None, num_nodes: int, sampled: bool) -> AcceptedPaths:
        """A whole round at shapes that its arguments' shapes decide: what is captured.

        Args:
            slots: int64 [num_reqs]; rows of the spare slot compute in block 0.
            num_nodes: of each tree, those to verify.
            sampled: False promises that every temperature is 0.
        """
        evidence = None
        if trees is not None and self.pruner is not None:
            trees, evidence = self.pruner.prune(trees, slots, num_nodes)
        elif trees is not None:
            # The roots are written in place, and what is returned must not be the caller's.
            trees = trees._replace(token_ids=trees.token_ids.clone(), num_valid=trees.num_valid.clone())
        decodes = self._prepare_decodes(slots, trees)
        segment = self._masked_segment(decodes, self.slots.block_tables[slots])
        metadata = AttentionMetadata(self.cache.layers, decodes.kv_slots.flatten(), [segment])
        token_ids, positions = decodes.token_ids.flatten(), decodes.positions.flatten()
        output = self.model(ForwardBatch(token_ids[None], positions[None], None, metadata))
        if sampled:
            rows = slots[:, None].expand_as(decodes.positions).flatten()
            chosen = self._sample(output.logits, rows, positions + 1, any_filtered=True)
        else:
            chosen = output.logits.argmax(dim=-1)
        return self._accept(decodes, chosen, output.taps)._replace(evidence=evidence)

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
        return self._masked_segment(decodes, tables)._replace(run=run, packing=decodes.packing)

    def _masked_segment(self, decodes: _Decodes, tables: Tensor) -> AttentionSegment:
        """Each node sees its ancestors: as words on CUDA, where chains need none, and as masks elsewhere."""
        num_nodes = decodes.token_ids.shape[1]
        chains = decodes.tree is None or self.config.speculation.draft_top_k == 1
        visible = words = None
        if not chains:
            depth = min(self.max_depth, num_nodes - 1)
            if self.device.type == "cuda":
                words = ancestor_words(decodes.tree.parents, depth)
            else:
                visible = ancestor_mask(decodes.tree.parents, depth)
        return build_segment(
            0,
            decodes.positions,
            decodes.roots,
            visible,
            tables,
            self.config.block_size,
            self.windows,
            self.dtype,
            words,
        )

    def _chunk_segment(self, start: int, chunk: Chunk, positions: Tensor) -> AttentionSegment:
        end = chunk.start + chunk.length
        tables = self.slots.block_tables[chunk.seq.slot : chunk.seq.slot + 1, : -(-end // self.config.block_size)]
        context = torch.full((1,), chunk.start, device=self.device)
        return build_segment(
            start, positions[None], context, None, tables, self.config.block_size, self.windows, self.dtype
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
        any_filtered = any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p in params)
        return self._sample(logits, torch.cat(slots), torch.cat(positions), any_filtered)

    def _sample(self, logits: Tensor, rows: Tensor, positions: Tensor, any_filtered: bool) -> Tensor:
        """Tokens of sequences in slots `rows` [num_rows], to stand at `positions` [num_rows]."""
        state = self.slots
        fits = len(rows) <= self._workspace_rows
        return choose_tokens(
            logits,
            state.temperatures[rows],
            state.top_ks[rows],
            state.top_ps[rows],
            state.min_ps[rows],
            state.seeds[rows],
            positions,
            any_sampled=True,
            any_filtered=any_filtered,
            workspace=self._workspace if fits else None,
        )

    def _commit(
        self,
        plan: SchedulerOutput,
        decodes: _Decodes | None,
        chosen: Tensor,
        taps: Tensor | None,
        forward_s: float,
        evidence: Tensor | None,
    ) -> RoundInFlight:
        num_decode_rows = 0 if decodes is None else decodes.num_rows
        accepted = self._accept(decodes, chosen[:num_decode_rows], taps)
        sampled = chosen[num_decode_rows:]
        sampling = [chunk.seq.slot for chunk in plan.chunks if chunk.samples]
        if sampling:
            slots = upload(sampling, self.device)
            self.slots.committed_lens[slots] += 1
            self.slots.last_token_ids[slots] = sampled
        if evidence is not None:
            accepted = accepted._replace(evidence=evidence)
        return launched_round(plan, accepted, sampled, None if taps is None else taps[num_decode_rows:], forward_s)

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
        walked, targets = tree.token_ids, targets.view(num_reqs, num_nodes)
        if self.forcer is not None:
            walked, targets = self.forcer.apply(tree, targets, self.slots.epochs[decodes.slots], decodes.roots)
        walk = walk_tree(walked, tree.parents, tree.num_valid, targets, longest)
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
        move_kv(self.cache.layers, source, target)


def _graph_device(config: EngineConfig, device: torch.device, given: GraphDevice | None) -> GraphDevice | None:
    """What captures decode rounds; None where they run eagerly.

    Raises:
        ValueError: the configuration asks for what there is not.
    """
    on_cuda = device.type == "cuda"
    if config.cuda_graphs and given is None and not on_cuda:
        raise ValueError(f"cuda_graphs is True: the verifier is on {device}, where nothing is captured")
    wanted = config.cuda_graphs if config.cuda_graphs is not None else on_cuda or given is not None
    if not wanted and config.compile and on_cuda:
        raise ValueError("compile is True and cuda_graphs is False: on CUDA compiled layers live in captured graphs")
    if not wanted:
        return None
    return CudaGraphDevice(device) if given is None else given


def _pack(real: Tensor) -> Packing | None:
    """Where the real nodes [num_reqs, num_nodes] lie side by side; None where padding is too little to be taken out."""
    flat = real.flatten()
    if not worth_packing(int(flat.sum()), len(flat)):
        return None
    return Packing((flat.cumsum(0) - 1).clamp_min(0), flat.nonzero()[:, 0])


def _run(seqs: list[Sequence], num_blocks: int, block_size: int) -> slice | None:
    """Slots of a single sequence whose first `num_blocks` blocks follow one another in the pool."""
    blocks = seqs[0].blocks[:num_blocks]
    if len(seqs) > 1 or blocks != list(range(blocks[0], blocks[0] + num_blocks)):
        return None
    return slice(blocks[0] * block_size, (blocks[0] + num_blocks) * block_size)
