"""Runs one round on the device: verifier forward pass, choice of tokens, walk of the trees, compaction of the KV cache.

On an accelerator a launch returns once all work is enqueued and does not wait for the device. The exception is a masked
round whose masks depend on the previous round's tokens: its launch waits for these tokens. Lengths, roots and block
tables are read from the slot state, which the previous round advances on the device; the host's lengths are upper
bounds.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.device_clock import DeviceClock
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.parts import first_result, hooks
from wingbeat.runtime.protocol.messages import TokenTree
from wingbeat.runtime.protocol.transfer import upload
from wingbeat.runtime.round.builder import BatchBuilder
from wingbeat.runtime.round.choice import Choosing, PathAcceptance, TokenChooser
from wingbeat.runtime.round.decode_graphs import DecodeGraphs
from wingbeat.runtime.round.eager_rounds import EagerRounds
from wingbeat.runtime.round.fixed_round import FixedRound
from wingbeat.runtime.round.flight import FirstTokens, RoundInFlight, epochs_of, launched_round
from wingbeat.runtime.round.rows import Feature, Model, ModelOutput, Pruner
from wingbeat.runtime.round.shapes import MOST_ROWS
from wingbeat.runtime.round.slots import DecodeRows, SlotState
from wingbeat.runtime.round.tree_check import TreeInbox
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence


class RoundParts(NamedTuple):
    """Components of a round that subclasses of `ModelRunner` replace."""

    builder: BatchBuilder
    chooser: TokenChooser
    acceptance: PathAcceptance
    inbox: Any
    """Receives arriving trees: a `TreeInbox`, or the class that another round kind uses instead."""
    pruner: Pruner | None
    """Prunes trees on the device; None if the device does not prune trees."""


class ModelRunner:
    """Runs rounds on one device in fixed shapes, without reading drafted trees on the host.

    Args:
        model: runs the verifier and returns its logits and taps.
        slots: per-sequence device state, shared with the drafter client.
        last_position: last position that the model supports.
        graph_device: captures rounds; None runs all rounds eagerly.
        features: features that add columns to this engine's batches.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        slots: SlotState,
        config: EngineConfig,
        last_position: int,
        graph_device: GraphDevice | None = None,
        features: tuple[Feature, ...] = (),
    ) -> None:
        self.model = model
        self.cache = cache
        self.slots = slots
        self.config = config
        self.device = slots.device
        self.device_clock = DeviceClock(self.device)
        """Times of the stages `prefill` (forward passes over prompt pieces without decodes), `verify` (forward passes
        over decodes, with or without prompt pieces), `accept`, and `round` (all of a round in one graph)."""
        # Prompt chunks are cut into pieces if their rounds can be captured, which every feature must allow.
        pieces = graph_device is not None and all(feature.captures for feature in features)
        self.max_depth = config.speculation.max_path - 1
        most_rows = min(MOST_ROWS, config.max_num_seqs * config.speculation.num_nodes)
        parts = self._make_parts(last_position, pieces, features, 0 if graph_device is None else most_rows)
        self.builder, self.chooser, acceptance, self.inbox, self.pruner = parts
        self.masks: Any = first_result("token_masks", slots.processors)
        """Fills masks of allowed tokens; None if no part does, and then no request has masks."""
        own = (model, self.builder, slots, self.chooser, acceptance, self.pruner)
        self.eager = EagerRounds(*own)
        self.fixed = FixedRound(*own)
        self.graphs: DecodeGraphs | None = None
        self.whole: Any = None
        """Rounds captured together with the drafter in this process, by the hook `whole_rounds`; None without."""
        if graph_device is not None:
            slots.processors.allocate()
            limits = config if pieces else replace(config, cuda_graphs="decode_only")
            self.graphs = DecodeGraphs(self.fixed, self.eager, slots, self.inbox, limits, last_position, graph_device)
            self.graphs.capture_roots()

    def _make_parts(
        self, last_position: int, pieces: bool, features: tuple[Feature, ...], most_rows: int
    ) -> RoundParts:
        """Creates the components that depend on the kind of round.

        Args:
            pieces: as for `BatchBuilder`.
            most_rows: maximum number of rows for which a captured round chooses tokens.
        """
        slots, config = self.slots, self.config
        builder = BatchBuilder(self.cache, slots, config, last_position, pieces=pieces, features=features)
        return RoundParts(
            builder,
            TokenChooser(slots, most_rows, self.max_depth),
            PathAcceptance(slots, self.cache, builder, config),
            TreeInbox(slots, config.speculation.num_nodes, chains=config.speculation.draft_top_k == 1),
            first_result("pruner", slots.spare + 1, self.max_depth, slots.device)
            if config.speculation.adaptive
            else None,
        )

    @property
    def rows_can_be_alike(self) -> bool:
        """Whether this runner's own steps keep a row's result independent of the round's other rows."""
        return self.device.type != "cpu"

    def prepare_trees(self) -> None:
        """Captures the graphs for rounds with trees, unless they are captured already. No round may be in flight."""
        if self.graphs is not None:
            self.graphs.capture_trees()

    @torch.inference_mode()
    def check(self, plan: SchedulerOutput, rows: DecodeRows, drafted: TreeInbox | None) -> TokenTree | TreeInbox | None:
        """Checks the trees that arrived for a round's decodes, and adds nodes that the host computes.

        The host computes, for example, nodes for tokens that a grammar forces. If the round is captured and the host
        adds no nodes, the trees are returned unchecked, because the graphs check them.

        Args:
            rows: result of `SlotState.load` for this plan.
            drafted: the inbox with the trees that arrived; None if no tree arrived.
        """
        if self.pruner is not None:
            self.pruner.follow(plan)
        if not plan.adds_nodes:
            captured = self.graphs is not None and bool(plan.decodes)
            return drafted if drafted is None or captured else drafted.checked(rows)
        trees = None if drafted is None else drafted.checked(rows)
        for add_nodes in hooks("add_nodes"):
            trees = add_nodes(plan, trees, self.config.speculation, self.device)
        return trees

    @torch.inference_mode()
    def launch(
        self,
        plan: SchedulerOutput,
        rows: DecodeRows,
        trees: TokenTree | TreeInbox | None,
        num_nodes: int | None = None,
        before_choice: Callable[[], object] | None = None,
    ) -> RoundInFlight:
        """Enqueues one round.

        Args:
            rows: as for `check`.
            trees: result of `check`, one tree per decode; None for bare roots. Root tokens are filled in here.
            num_nodes: number of nodes of each tree to verify, if trees are pruned on the device; None for all nodes.
            before_choice: called between a masked round's forward pass and the choice of its tokens. Masks are computed
                after this call; if None, they are computed while the pass runs.
        """
        if self.whole is not None and self.whole.takes(plan, trees):
            return self._launch_whole(plan, rows)
        num_nodes = num_nodes or self.config.speculation.num_nodes
        captured = self.graphs is not None and bool(plan.decodes)
        for feature in self.builder.features if plan.chunks else self.builder.of_decodes:
            feature.prepare(plan)
        masked = plan.is_masked
        executor = self.eager if self.graphs is None else self.graphs if captured else self.graphs.without_decodes
        clock, epochs = self.device_clock, epochs_of(plan)
        began = clock.begin()
        if masked and before_choice is not None:
            sent = self.masks.send(plan, trees)
            done = executor.forward(plan, rows, trees, num_nodes, None)
            before_choice()
            done = executor.with_roots(done, self.masks.fill(plan, sent))
        elif masked:
            with self.masks.started(plan, trees) as masks:
                done = executor.forward(plan, rows, trees, num_nodes, masks)
        else:
            done = executor.forward(plan, rows, trees, num_nodes, None)
        clock.end("verify" if plan.decodes else "prefill", began)
        began = clock.begin()
        accepted = executor.decide(plan, done)
        first = FirstTokens(rows.slots[:0]) if done.chunks is None else self._decide_chunks(plan, done.chunks)
        clock.end("accept", began)
        asking = None if captured else plan.asking
        return launched_round(plan, epochs, accepted, first, done.forward_s, asking=asking)

    def _launch_whole(self, plan: SchedulerOutput, rows: DecodeRows) -> RoundInFlight:
        """Enqueues one round and the draft after it, as one graph."""
        for feature in self.builder.of_decodes:
            feature.prepare(plan)
        epochs, started, began = epochs_of(plan), time.perf_counter(), self.device_clock.begin()
        accepted = self.whole.replay(plan, rows)
        self.device_clock.end("round", began)
        first, seconds = FirstTokens(rows.slots[:0]), time.perf_counter() - started
        flight = launched_round(plan, epochs, accepted, first, seconds)
        flight.has_drafted = True
        return flight

    @torch.inference_mode()
    def widest_round(self) -> None:
        """Runs a round of the largest batch with the widest trees, in the spare slot, to measure the round's memory."""
        num_reqs, num_nodes = self.config.max_num_seqs, self.config.speculation.num_nodes
        slots = torch.full((num_reqs,), self.slots.spare, device=self.device)
        zeros = [slots.new_zeros(num_reqs, num_nodes) for _ in range(3)]
        trees = TokenTree(*zeros, zeros[0].to(torch.float32), torch.ones_like(slots))
        self.fixed.decide(self.fixed.forward(slots, trees, num_nodes), Choosing.ALTERED)

    def _decide_chunks(self, plan: SchedulerOutput, chunks: ModelOutput) -> FirstTokens:
        """Chooses the tokens of sequences whose prompts end, and updates their slot state.

        Args:
            chunks: see `ForwardResult.chunks`.
        """
        sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
        sampled = self.chooser.choose_first(sampling, chunks.logits[: len(sampling)])
        if sampling:
            slots = upload([seq.slot for seq in sampling], self.device)
            self.slots.committed_lens[slots] += 1
            self.slots.last_token_ids[slots] = sampled
            if any(seq.request.params.has_penalties for seq in sampling):
                self.slots.processors.count(slots, sampled[:, None], torch.ones_like(sampled))
        logprobs = self._chunk_logprobs(plan, sampling, sampled, chunks.logits)
        told: dict[str, Tensor] = {}
        for feature in self.builder.features:
            told |= feature.reported_values(plan)
        return FirstTokens(sampled, chunks.taps, logprobs, told)

    def _chunk_logprobs(
        self, plan: SchedulerOutput, sampling: list[Sequence], sampled: Tensor, logits: Tensor
    ) -> Tensor | None:
        """Returns log-probabilities: first of the tokens sampled after chunks, then of the reported prompt tokens.

        Returns None if no request asks for log-probabilities.
        """
        targets = [token_id for chunk in plan.chunks for token_id in chunk.prompt_targets()]
        if not targets and not any(seq.request.params.logprobs is not None for seq in sampling):
            return None
        return self.chooser.chunk_logprobs(logits, torch.cat([sampled, upload(targets, self.device)]))
