"""One round on the device: run the verifier over the batch, choose tokens, walk the trees, compact the KV.

A launch waits for nothing: on an accelerator it returns with everything enqueued. Lengths, roots and block tables come
from the slot state, which the round before advances on the device, and the host's lengths are upper bounds.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.protocol.messages import AcceptedPaths, TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.batch import BatchBuilder, Decodes
from wingbeat.runtime.verifier.choices.certain_tokens import add_certain
from wingbeat.runtime.verifier.choices.choice import Choosing, PathAcceptance, TokenChooser
from wingbeat.runtime.verifier.choices.token_masks import TokenMasks
from wingbeat.runtime.verifier.compiled import CompiledDecode, faster_layers, replay_ms
from wingbeat.runtime.verifier.decode_graphs import DecodeGraphs, MixedResult, RoundFunctions
from wingbeat.runtime.verifier.dummy_batch import dummy_decode_batch
from wingbeat.runtime.verifier.forward_result import ForwardResult
from wingbeat.runtime.verifier.loading.loader import LoadedModel
from wingbeat.runtime.verifier.model import ModelOutput, VerifierModel
from wingbeat.runtime.verifier.prompt_chunks import Pieces
from wingbeat.runtime.verifier.pruning import DevicePruner, verified_nodes
from wingbeat.runtime.verifier.round import RoundInFlight, launched_round
from wingbeat.runtime.verifier.round_shapes import MOST_ROWS
from wingbeat.runtime.verifier.slots import DecodeRows, SlotState
from wingbeat.runtime.verifier.state_keeper import StateKeeper
from wingbeat.runtime.verifier.tree_check import TreeInbox


class ModelRunner:
    """Runs rounds on one device.

    Args:
        model: the verifier with its taps.
        slots: per-sequence device state, shared with the drafter client.
        graph_device: captures decode rounds in place of CUDA.
        on_host: whether the device is the host itself, so that looking at what it computed is no wait; None where it
            is a CPU and nothing is captured. False gives a CPU the fixed shapes of an accelerator.
        states: of layers that keep a state of their own.

    Raises:
        ValueError: `cuda_graphs`, `compile` or `deterministic` is not to be had on this device.
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
        states: StateKeeper | None = None,
    ) -> None:
        self.loaded = loaded
        self.model = model
        self.cache = cache
        self.slots = slots
        self.config = config
        self.device = slots.device
        graph_device = _graph_device(config, self.device, graph_device)
        self.on_host = self.device.type == "cpu" and graph_device is None if on_host is None else on_host
        pieces = graph_device is not None
        self.builder = BatchBuilder(loaded, cache, slots, config, self.on_host, pieces, states)
        if config.deterministic and not (loaded.deterministic and self.builder.in_place):
            raise ValueError("deterministic is True: this verifier was not loaded so, or its rounds have fixed shapes")
        self.windows = loaded.windows
        self.max_depth = config.speculation.max_path - 1
        self._ahead = torch.arange(1, config.speculation.max_path + 1, device=self.device)
        self.acceptance = PathAcceptance(slots, cache, self.builder, config)
        self.pruner: DevicePruner | None = None
        if config.speculation.adaptive and not self.on_host:
            self.pruner = DevicePruner(slots, self.max_depth)
        self.decode = model
        if config.compile and self.device.type == "cpu":
            self.decode = CompiledDecode(model, cache, self.windows, config)
            self.decode.warm_up(with_trees=model.taps_size > 0)
        self.inbox: TreeInbox | None = None
        """Where trees go as they come; None where the device is the host itself."""
        if not self.on_host:
            chains = config.speculation.draft_top_k == 1
            self.inbox = TreeInbox(slots, config.speculation.num_nodes, chains=chains)
        self.graphs: DecodeGraphs | None = None
        most_rows = min(MOST_ROWS, config.max_num_seqs * config.speculation.num_nodes)
        self.chooser = TokenChooser(slots, 0 if graph_device is None else most_rows, self.max_depth)
        self.masks = TokenMasks(slots.processors)
        if graph_device is not None:
            slots.processors.allocate()
            functions = RoundFunctions(
                self._forward_round, self._forward_pieces, self._forward_chunks, self._decide_round
            )
            last_position = loaded.max_position_embeddings - 1
            self.graphs = DecodeGraphs(functions, slots, self.inbox, config, last_position, graph_device)
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
        self,
        plan: SchedulerOutput,
        rows: DecodeRows,
        trees: TokenTree | TreeInbox | None,
        num_nodes: int | None = None,
    ) -> RoundInFlight:
        """Enqueue one round.

        Args:
            rows: what `SlotState.load` made of the plan.
            trees: one per decoding sequence, or the inbox, or None where all are bare roots; roots are filled in here.
            num_nodes: of each tree, those to verify where it is pruned on the device; None verifies all.
        """
        num_nodes = num_nodes or self.config.speculation.num_nodes
        captured = self.graphs is not None and bool(plan.decodes)
        if isinstance(trees, TreeInbox):
            if captured and not self.masks.wanted(plan):
                return self._replay(plan, rows, num_nodes)
            trees = add_certain(plan, trees.checked(rows), self.config.speculation)
        masks = self.masks.start(plan, trees)
        if captured:
            trees = _rooted(trees, masks)
            if trees is None:
                return self._replay(plan, rows, 1)
            return self._replay(plan, self.inbox.put(rows.slots, trees), num_nodes)
        evidence = None
        if self.pruner is not None:
            # Masks are of the nodes before pruning.
            trees = _rooted(trees, masks)
            if trees is not None:
                trees, evidence = self.pruner.prune(trees, rows.slots, num_nodes)
        decodes = self.builder.decodes(rows.slots, trees) if plan.decodes else None
        batch = self.builder.flatten(plan, decodes)
        started = time.perf_counter()
        output = self.model(batch) if plan.chunks else self.decode(batch)
        forward_s = time.perf_counter() - started
        if decodes is not None and decodes.tree is not None:
            decodes = decodes._replace(tree=_rooted(decodes.tree, masks))
        elif masks is not None:
            masks.result()
        num_rows = (0 if decodes is None else decodes.num_rows) + sum(chunk.samples for chunk in plan.chunks)
        chosen = self.chooser.choose(plan, decodes, output.logits[:num_rows])
        return self._commit(plan, decodes, chosen, output, batch.chunk_rows, forward_s, evidence)

    @torch.inference_mode()
    def widest_round(self) -> None:
        """A whole round of the most and the widest trees, all of the spare slot: for what it allocates."""
        self.slots.reset_spare()
        num_reqs, num_nodes = self.config.max_num_seqs, self.config.speculation.num_nodes
        slots = torch.full((num_reqs,), self.slots.spare, device=self.device)
        zeros = [slots.new_zeros(num_reqs, num_nodes) for _ in range(3)]
        trees = TokenTree(*zeros, zeros[0].to(torch.float32), torch.ones_like(slots))
        result = self._forward_round(slots, trees, num_nodes)
        self._decide_round(result, Choosing.ALTERED)

    def _replay(self, plan: SchedulerOutput, rows: DecodeRows, num_nodes: int) -> RoundInFlight:
        """`launch` by graphs; what first tokens are chosen by follows eagerly."""
        choosing = Choosing.of([seq.request.params for seq in plan.decodes])
        started = time.perf_counter()
        if plan.chunks:
            accepted, output = self.graphs.run_mixed(plan, rows, num_nodes, choosing)
            accepted = accepted._replace(packed=None)  # which has no room for what chunks tell the host
            num_samples = sum(chunk.samples for chunk in plan.chunks)
            chosen = self.chooser.choose(plan._replace(decodes=[]), None, output.logits[:num_samples])
            chunks = self._take_chunks(plan, chosen, output.logits, output.taps)
        else:
            accepted, chunks = self.graphs.run(rows, num_nodes, choosing), _Chunks(rows.slots[:0])
        forward_s = time.perf_counter() - started
        return launched_round(plan, accepted, chunks.sampled, chunks.taps, forward_s, None, chunks.logprobs)

    def _forward_round(self, slots: Tensor, trees: TokenTree | None, num_nodes: int) -> ForwardResult:
        """A round's forward pass at shapes that its arguments' shapes decide: what is captured.

        Args:
            slots: int64 [num_reqs]; rows of the spare slot compute in block 0.
            num_nodes: of each tree, those to verify.
        """
        decodes, evidence = self._pruned_decodes(slots, trees, num_nodes)
        return ForwardResult(decodes, self.model(self.builder.fixed(decodes)), evidence)

    def _forward_pieces(
        self, slots: Tensor, trees: TokenTree | None, num_nodes: int, pieces: Pieces, wanted: Tensor
    ) -> MixedResult:
        """The same with pieces of prompt chunks in the pass; arguments as for `BatchBuilder.fixed`."""
        decodes, evidence = self._pruned_decodes(slots, trees, num_nodes)
        own, chunks = self.model(self.builder.fixed(decodes, pieces, wanted)).split(decodes.num_rows)
        return MixedResult(ForwardResult(decodes, own, evidence), chunks)

    def _forward_chunks(
        self, plan: SchedulerOutput, slots: Tensor, trees: TokenTree | None, num_nodes: int
    ) -> MixedResult:
        """The same with any prompt chunks, eagerly."""
        decodes, evidence = self._pruned_decodes(slots, trees, num_nodes)
        batch = self.builder.flatten(plan, decodes)
        own, chunks = _parts(self.model(batch), decodes.num_rows, batch.chunk_rows)
        return MixedResult(ForwardResult(decodes, own, evidence), chunks)

    def _pruned_decodes(self, slots: Tensor, trees: TokenTree | None, num_nodes: int) -> tuple[Decodes, Tensor | None]:
        """With the evidence of trees that were pruned."""
        evidence = None
        if trees is not None and self.pruner is not None:
            trees, evidence = self.pruner.prune(trees, slots, num_nodes)
        return self.builder.decodes(slots, trees), evidence

    def _decide_round(self, result: ForwardResult, choosing: Choosing) -> AcceptedPaths:
        """What such a round decides, captured likewise.

        Args:
            choosing: what the parameters of the sequences ask for, at most.
        """
        decodes, output, evidence = result
        slots, nodes = decodes.slots, None
        if evidence is not None:
            nodes = verified_nodes(evidence, decodes.token_ids.shape[1])
        chosen = self.chooser.choose_fixed(decodes, output.logits, choosing, nodes)
        accepted = self.acceptance.accept(decodes, chosen, output.taps)._replace(evidence=evidence)
        if choosing is Choosing.ALTERED:
            self.slots.processors.count(slots, accepted.token_ids, accepted.num_tokens)
            accepted = accepted._replace(logprobs=self.chooser.path_logprobs(decodes, accepted, output.logits, None))
        # Here it is part of a graph: beside it, each of these would be a launch of its own.
        columns = (accepted.positions[:, None] + self._ahead).clamp_max_(self.config.max_model_len)
        told = torch.cat([part.view(len(slots), -1) for part in accepted.told().values()], dim=1)
        return accepted._replace(columns=columns, packed=told)

    def _commit(
        self,
        plan: SchedulerOutput,
        decodes: Decodes | None,
        chosen: Tensor,
        output: ModelOutput,
        chunk_rows: Tensor | None,
        forward_s: float,
        evidence: Tensor | None,
    ) -> RoundInFlight:
        num_rows = 0 if decodes is None else decodes.num_rows
        logits, taps = output
        accepted = self.acceptance.accept(decodes, chosen[:num_rows], taps)._replace(evidence=evidence)
        if any(seq.request.params.has_penalties for seq in plan.decodes):
            self.slots.processors.count(accepted.slots, accepted.token_ids, accepted.num_tokens)
        asking = [row for row, seq in enumerate(plan.decodes) if seq.request.params.logprobs is not None]
        if asking:
            accepted = accepted._replace(logprobs=self.chooser.path_logprobs(decodes, accepted, logits, asking))
        of_chunks = _parts(output, num_rows, chunk_rows)[1]
        chunks = self._take_chunks(plan, chosen[num_rows:], *of_chunks)
        return launched_round(plan, accepted, chunks.sampled, chunks.taps, forward_s, asking, chunks.logprobs)

    def _take_chunks(self, plan: SchedulerOutput, sampled: Tensor, logits: Tensor, taps: Tensor | None) -> "_Chunks":
        """Bring the state of sequences whose prompts end up to date.

        Args:
            sampled: int64 [num_sampling_chunks].
            logits: of the chunks: those that sample, then prompt tokens whose log-probabilities are asked for.
            taps: [num_chunk_tokens, taps_size].
        """
        sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
        if sampling:
            slots = upload([seq.slot for seq in sampling], self.device)
            self.slots.committed_lens[slots] += 1
            self.slots.last_token_ids[slots] = sampled
            if any(seq.request.params.has_penalties for seq in sampling):
                self.slots.processors.count(slots, sampled[:, None], torch.ones_like(sampled))
        logprobs = self._chunk_logprobs(plan, sampling, sampled, logits)
        return _Chunks(sampled, taps, logprobs)

    def _chunk_logprobs(
        self, plan: SchedulerOutput, sampling: list[Sequence], sampled: Tensor, logits: Tensor
    ) -> Tensor | None:
        """Of the tokens that chunks yield, then of the prompts' own tokens; None where nobody asks."""
        targets = [token_id for chunk in plan.chunks for token_id in chunk.prompt_targets()]
        if not targets and not any(seq.request.params.logprobs is not None for seq in sampling):
            return None
        return self.chooser.chunk_logprobs(logits, torch.cat([sampled, upload(targets, self.device)]))


class _Chunks(NamedTuple):
    """What a round decided for its prompt chunks; fields as in `RoundInFlight` and `RoundResult`."""

    sampled: Tensor
    taps: Tensor | None = None
    logprobs: Tensor | None = None


def _parts(output: ModelOutput, num_rows: int, chunk_rows: Tensor | None) -> tuple[ModelOutput, ModelOutput]:
    """Of the decodes' rows, which are the first, and of the chunks' without padding; see `ForwardBatch.chunk_rows`."""
    decodes, chunks = output.split(num_rows)
    if output.taps is not None and chunk_rows is not None:
        chunks = chunks._replace(taps=output.taps.index_select(0, chunk_rows))
    return decodes, chunks


def _rooted(trees: TokenTree | None, masks: "Future[list[int]] | None") -> TokenTree | None:
    """The trees once their masks are there; of those that came too late only the root counts."""
    late = [] if masks is None else masks.result()
    if trees is None or not late:
        return trees
    num_valid = trees.num_valid.clone()
    num_valid[late] = 1
    return trees._replace(num_valid=num_valid)


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
