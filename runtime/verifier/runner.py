"""One round on the device: run the verifier over the batch, choose tokens, walk the trees, compact the KV.

A launch waits for nothing: on an accelerator it returns with everything enqueued. Lengths, roots and block tables come
from the slot state, which the round before advances on the device, and the host's lengths are upper bounds.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.functional import pad

from wingbeat.kernels.kv.reference import move_kv
from wingbeat.kernels.sampling.reference import choose_tokens, sampling_workspace
from wingbeat.kernels.tree.reference import walk_tree
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.verifier.batch import BatchBuilder, Decodes
from wingbeat.runtime.verifier.compiled import CompiledDecode, faster_layers, replay_ms
from wingbeat.runtime.verifier.decode_graphs import MOST_ROWS, DecodeGraphs
from wingbeat.runtime.verifier.dummy_batch import dummy_decode_batch
from wingbeat.runtime.verifier.forced_acceptance import AcceptanceForcer
from wingbeat.runtime.verifier.loader import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel
from wingbeat.runtime.verifier.pruning import DevicePruner
from wingbeat.runtime.verifier.round import RoundInFlight, launched_round
from wingbeat.runtime.verifier.slots import DecodeRows, SlotState


class ModelRunner:
    """Runs rounds on one device.

    Args:
        model: the verifier with its taps.
        slots: per-sequence device state, shared with the drafter client.
        graph_device: captures decode rounds in place of CUDA.
        on_host: whether the device is the host itself, so that looking at what it computed is no wait; None where it
            is a CPU and nothing is captured. False gives a CPU the fixed shapes of an accelerator.

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
        on_host: bool | None = None,
    ) -> None:
        self.loaded = loaded
        self.model = model
        self.cache = cache
        self.slots = slots
        self.config = config
        self.device = slots.device
        graph_device = _graph_device(config, self.device, graph_device)
        self.on_host = self.device.type == "cpu" and graph_device is None if on_host is None else on_host
        self.builder = BatchBuilder(loaded, cache, slots, config, self.on_host)
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
        return faster_layers(self.loaded, steps, lambda step: replay_ms(step, self.graphs.pool.device))

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
        decodes = self.builder.decodes(rows.slots, trees) if plan.decodes else None
        batch = self.builder.flatten(plan, decodes)
        started = time.perf_counter()
        output = self.model(batch) if plan.chunks else self.decode(batch)
        forward_s = time.perf_counter() - started
        chosen = self._choose(plan, decodes, output.logits)
        return self._commit(plan, decodes, chosen, output.taps, forward_s, evidence)

    @torch.inference_mode()
    def widest_round(self) -> None:
        """A whole round of the most and the widest trees, all of the spare slot: for what it allocates."""
        self.slots.reset_spare()
        num_reqs, num_nodes = self.config.max_num_seqs, self.config.speculation.num_nodes
        slots = torch.full((num_reqs,), self.slots.spare, device=self.device)
        zeros = slots.new_zeros(num_reqs, num_nodes)
        trees = TokenTree(zeros, zeros, zeros, zeros.to(torch.float32), torch.ones_like(slots))
        self._decode_round(slots, trees, num_nodes, sampled=True)

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
        decodes = self.builder.decodes(slots, trees)
        output = self.model(self.builder.fixed(decodes))
        if sampled:
            rows = slots[:, None].expand_as(decodes.positions).flatten()
            chosen = self._sample(output.logits, rows, decodes.positions.flatten() + 1, any_filtered=True)
        else:
            chosen = output.logits.argmax(dim=-1)
        return self._accept(decodes, chosen, output.taps)._replace(evidence=evidence)

    def _choose(self, plan: SchedulerOutput, decodes: Decodes | None, logits: Tensor) -> Tensor:
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
        decodes: Decodes | None,
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

    def _accept(self, decodes: Decodes | None, chosen: Tensor, taps: Tensor | None) -> AcceptedPaths:
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

    def _accept_bare(self, decodes: Decodes, chosen: Tensor, taps: Tensor | None) -> AcceptedPaths:
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

    def _compact(self, decodes: Decodes, nodes: Tensor, num_tokens: Tensor) -> None:
        """Move the accepted nodes' KV from their scratch slots to the positions they now occupy."""
        if self.config.speculation.draft_top_k == 1:
            return
        steps = torch.arange(nodes.shape[1], device=self.device)
        moved = (steps < num_tokens[:, None]) & (nodes != steps)
        if self.on_host and not bool(moved.any()):
            return
        start = decodes.roots[:, None]
        source = torch.where(moved, self.builder.slot_mapping(decodes.slots, start + nodes), 0)
        target = torch.where(moved, self.builder.slot_mapping(decodes.slots, start + steps), 0)
        move_kv(self.cache.layers, source, target, self.cache.table)


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
