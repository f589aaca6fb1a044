"""The engine: each `step` collects draft trees, verifies them in one pass, accepts tokens and requests new trees."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.assembly import assemble
from wingbeat.runtime.engine.clocks import RequestClock
from wingbeat.runtime.engine.drafter_client import DrafterState
from wingbeat.runtime.engine.engine_stats import EngineStats, cache_config, stages_of, tree_config
from wingbeat.runtime.engine.round_counts import RoundCounter
from wingbeat.runtime.engine.round_failed import PROBE, PROBE_ROUNDS, InnerDrafterFailed, RoundFailed
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import ChannelSpec
from wingbeat.runtime.round.flight import RoundInFlight, RoundObserver
from wingbeat.runtime.scheduling.maskers import CompiledGrammar, masker_of
from wingbeat.runtime.scheduling.request import Request, RequestOutput
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.verifier.backend import TORCH, Backend
from wingbeat.runtime.verifier.loading.loader import LoadedModel
from wingbeat.runtime.verifier_errors import BackendLost

logger = logging.getLogger(__name__)


class Engine:
    """Continuous-batching engine with speculative decoding. All calls must come from one thread.

    Args:
        loaded: the loaded verifier.
        config: limits of the engine; max_model_len must not exceed the model's number of positions.
        needs: properties of the drafter that will be attached, such as the verifier layers that it reads.
        graph_device: device that captures decode rounds in place of CUDA, for tests.
        on_host: whether an engine on a CPU uses the CPU round kind; False makes such an engine use device rounds.
        backend: builds the verifier model and its KV cache.

    Raises:
        ValueError: the configuration needs something that the model or its device lacks; the message names the field
            and its value.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        needs: DrafterNeeds = DrafterNeeds(),
        graph_device: GraphDevice | None = None,
        on_host: bool | None = None,
        backend: Backend = TORCH,
    ) -> None:
        scheduler, runner, drafting = assemble(loaded, config, needs, backend, graph_device, on_host)
        self.scheduler, self.runner, self.drafting = scheduler, runner, drafting
        self.config = config = runner.config
        self.loaded, self.needs = loaded, needs
        self.model, self.cache, self.slots = runner.model, runner.cache, runner.slots
        self.block_manager, self.features, self.clock = scheduler.block_manager, drafting.features, drafting.clock
        self.policy, self.contexts = drafting.speculation, drafting.contexts
        self.detach_drafter = drafting.detach
        self.request_rules: Callable[[Request], Request] = lambda request: request
        """Function that adds the rules of the model's files to a request."""
        self.counter = RoundCounter(drafting, self.clock, forced=config.forced_acceptance is not None)
        self.requests = RequestClock()
        self.is_waiting = self.requests.is_waiting
        self.drafts_from_other_requests = drafting.texts is not None
        """Whether draft trees may be built from the text of other requests, independent of the attached drafter."""
        # Overlap is off by default with text drafts, because extending a text requires the latest tokens on the host.
        overlaps = loaded.device.type != "cpu" and not self.drafts_from_other_requests
        self.overlap = overlaps if config.overlap is None else config.overlap
        self.shown: Any = None
        """Records the rounds of requests with `trace`; None before the first such request."""
        own = (self.clock, self.counter, self.requests, drafting, self.policy)
        self._own_observers: tuple[RoundObserver, ...] = own if drafting.texts is None else (*own, drafting.texts)
        self._observers: tuple[RoundObserver, ...] = self._own_observers
        self._in_flight: deque[RoundInFlight] = deque()
        self._outputs: list[RequestOutput] = []
        self._plan: SchedulerOutput | None = None  # plan of the round that is being launched
        self._num_attached = 0
        self.tell_round: Callable[[int, list[str]], object] = lambda num_tokens, request_ids: None
        """Function called before each round is computed, with the round's number of tokens and its request ids."""

    @property
    def channel_spec(self) -> ChannelSpec:
        """Shapes and dtypes of the channel through which a drafter is attached to this engine."""
        return ChannelSpec.of(
            self.config,
            taps_size=self.model.taps_size,
            num_blocks=self.cache.num_blocks,
            taps_dtype=self.loaded.dtype,
            keeps_context=self.needs.keeps_context,
            **self.loaded.channel_fields(self.needs.embedding_width if self.needs.keeps_context else None),
        )

    def add_request(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """Queues a request.

        Args:
            grammar: the request's grammar as compiled by a `GrammarCompiler`; None without a grammar.

        Raises:
            ValueError: the request can never run (empty or too long a prompt, token ids outside the vocabulary).
        """
        request = self.request_rules(request)
        grammar_asked = request.params.grammar
        if grammar_asked is not None and self.config.forced_acceptance is not None:
            raise ValueError(
                f"{grammar_asked.field} is set, but this engine runs with forced_acceptance, which ignores grammars"
            )
        self.loaded.check(request, self.config.max_num_batched_tokens)
        if request.params.trace and self.shown is None:
            self._show_rounds()
        self.scheduler.add(request, masker_of(request, grammar))
        self.requests.arrived(request)

    def _show_rounds(self) -> None:
        """Records the rounds of requests with `trace` from now on.

        Raises:
            ValueError: no part records rounds.
        """
        self.shown = first_result("shown_rounds", self.drafting)
        if self.shown is None:
            raise ValueError("speculation.trace is not served here: no part records rounds")
        self._settle(leave=0)
        self._own_observers, self._observers = (*self._own_observers, self.shown), (*self._observers, self.shown)

    def abort_request(self, request_id: str) -> SpeculationMetrics | None:
        """Drops a request and frees its blocks.

        Returns the request's metrics, or None if the request has already ended.
        """
        seq = self.scheduler.abort(request_id)
        self._ended(request_id)
        self._outputs = [output for output in self._outputs if output.request_id != request_id]
        return None if seq is None else seq.metrics

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do."""
        scheduler = self.scheduler
        return any((scheduler.running, scheduler.waiting, scheduler.failures, self._in_flight, self._outputs))

    def attach_drafter(self, end: VerifierEnd) -> None:
        """Requests trees through this channel end from the next round on.

        A running sequence gets trees once the drafter has the sequence's context.
        """
        self._settle(leave=0)
        self.runner.whole = None
        self.runner.prepare_trees()
        if not self.scheduler.running:  # calibration overwrites channel rows and would delay running streams
            self.policy.calibrate(end, self.drafting.waits.patience_s)
        self.drafting.attach(end, self.scheduler.running)
        self._num_attached += 1

    def look_for_late_drafter(self) -> None:
        """Re-attaches a late drafter whose answer has arrived; drops a drafter that died or is late for too long."""
        if (end := self.drafting.returned()) is not None:
            self._settle(leave=0)
            self.drafting.attach(end, self.scheduler.running)

    def observe(self, observer: RoundObserver | None) -> None:
        """Notifies `observer` of rounds from the next round on, in place of the previous observer.

        None removes the observer.
        """
        self._settle(leave=0)
        self._observers = self._own_observers if observer is None else (*self._own_observers, observer)

    @property
    def drafter_state(self) -> DrafterState:
        """State of the drafter; LOST once the engine has dropped a drafter that died or stopped answering."""
        return self.drafting.state

    @property
    def speculation(self) -> SpeculationMetrics:
        """Counts of verified and accepted tokens so far."""
        return self.counter.metrics

    def step(self) -> list[RequestOutput]:
        """Runs one round: schedule, collect draft trees, verify, accept, publish to the drafter, return tokens.

        With overlap, the returned tokens are those of the previous round: the host processes them while the device runs
        the round just launched. A request for which the engine's own code raises ends with an output that has `failure`
        set.

        Raises:
            RoundFailed: the engine is broken; its requests have to be repeated in another engine.
        """
        try:
            self._wingbeat()
        except Exception as error:
            self._recover(error)
        return self._hand_out()

    def _wingbeat(self) -> None:
        if self._in_flight and self._is_held_up():
            self._settle(leave=0)
        self.look_for_late_drafter()
        with self.clock.schedule:
            plan = self._schedule()
            if not (plan.decodes or plan.chunks):
                return self._settle(leave=0)
            self.tell_round(plan.num_tokens, plan.request_ids())
            rows = self.slots.load(plan)
        with self.clock.draft_wait:
            drafted = self.drafting.collect(plan, rows)
        with self.clock.accept:
            trees = self.runner.check(plan, rows, drafted)
            trees = self.policy.prune(trees, plan.decodes, drafted)
            advance = partial(self.scheduler.advance, plan, with_trees=trees is not None)
            before, take_before = None, None
            if self.overlap and plan.is_masked:
                before = self._in_flight[-1] if self._in_flight else None
                take_before = partial(self._take_before, advance)
            flight = self.runner.launch(plan, rows, trees, self.policy.num_nodes, take_before)
            if take_before is None:
                advance()
            self._launched(flight)
        held = self._held() if before is None else before
        with self.clock.publish:
            self.drafting.publish(plan, flight, held)
        self._settle(leave=1 if self.overlap else 0)

    def _is_held_up(self) -> bool:
        """Whether to settle all rounds in flight before scheduling.

        True in two cases. Either every sequence waits for its tokens in flight, because its grammar may force further
        tokens after these. Or a drafter is attached and every sequence is masked; settling then lets the drafter get
        root masks, which gain more than overlap.
        """
        running = self.scheduler.running
        if self.drafter_state is DrafterState.ATTACHED and all(seq.masker is not None for seq in running):
            return True
        return all(seq.is_awaited for seq in running)

    def _held(self) -> RoundInFlight | None:
        """If running sequences skipped the latest round, waits for the second-latest round and returns that round.

        The drafter drafts for the skipped sequences while the device computes the latest round. Returns None if no
        sequence waits.
        """
        awaited = (seq for seq in self.scheduler.running if seq.is_awaited and seq.in_flight)
        if len(self._in_flight) < 2 or next(awaited, None) is None:
            return None
        before = self._in_flight[-2]
        with self.clock.wait:
            before.wait()
        return before

    def _recover(self, error: Exception) -> None:
        """Recovers from a round that raised: recomputes the running sequences, one at a time.

        The exception does not identify the request, so the engine retries the sequences one at a time and fails a
        sequence whose round raises while it runs alone. The other sequences keep their tokens. The drafter is dropped,
        because the drafter may have raised and dropping it costs only speed.

        Raises:
            RoundFailed: the probe request raises too, an inner drafter raised, or the backend was lost.
        """
        if isinstance(error, BackendLost):
            raise RoundFailed(str(error), queued=self._entangled()[1]) from error  # no request is a suspect
        if isinstance(error, InnerDrafterFailed):
            raise RoundFailed(str(error), *self._entangled()) from error
        logger.warning(
            "A round raised %s: retrying its requests one at a time to find the one that failed",
            type(error).__name__,
            exc_info=error,
        )
        failure = RoundFailed(f"{type(error).__name__}: {error}", *self._entangled())
        drafted = self.drafter_state is DrafterState.ATTACHED
        try:
            alone = running[0] if len(running := self.scheduler.running) == 1 else None
            self._in_flight.clear()
            for observer in self._observers:
                observer.abandoned()
            self.scheduler.restart(drafted)
            self._probe()
            if alone is not None:
                self.scheduler.fail(alone, error)
        except Exception as broken:
            logger.error("The engine is broken", exc_info=broken)
            raise failure from error

    def _entangled(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns ids of requests whose first round raised or is unsettled, and ids of requests never admitted."""
        plans = [flight.plan for flight in self._in_flight] + ([self._plan] if self._plan is not None else [])
        seqs = [seq for plan in plans for seq in plan.admitted if seq.slot >= 0 and not seq.num_output_tokens]
        failed = [output.request_id for output in self.scheduler.failures]
        queued = (seq.request.request_id for seq in self.scheduler.waiting if not seq.preempted)
        return (*(seq.request.request_id for seq in seqs), *failed), tuple(queued)

    def _probe(self) -> None:
        """Runs the probe request alone; raises if the engine does not complete the request."""
        self.scheduler.add_first(PROBE)
        for _ in range(PROBE_ROUNDS):
            self._wingbeat()
            own = [output for output in self._outputs if output.request_id == PROBE.request_id]
            if own and own[-1].finish_reason is not None:
                break
        else:
            raise RuntimeError(f"the probe did not end within {PROBE_ROUNDS} rounds")
        self._outputs = [output for output in self._outputs if output.request_id != PROBE.request_id]
        self.check_integrity()

    def _schedule(self) -> SchedulerOutput:
        plan = self._plan = self.scheduler.schedule()
        self.requests.admitted(plan.admitted)
        for seq in plan.admitted:
            for feature in self.features:
                self.scheduler.isolated(seq, feature.admit, seq)
            self.scheduler.isolated(seq, self.drafting.admit, seq)
        if self.scheduler.failures:
            plan = plan.without_dropped()
        return self.drafting.plan_replay(plan)

    def _take_before(self, advance: Callable[[], object]) -> None:
        """Advances sequences and settles the previous round while the device runs the launched round's forward pass.

        The launched round's grammar masks are computed afterwards, because they depend on the previous round's tokens.
        """
        advance()
        self._settle(leave=0)

    def _launched(self, flight: RoundInFlight) -> None:
        """Records a launched round and notifies observers; without overlap, waits for the round."""
        self._in_flight.append(flight)
        self._plan = None
        for observer in self._observers:
            observer.launched(flight)
        if self.contexts is not None and self.contexts.recording:
            self.contexts.launched(flight)
        if not self.overlap:
            with self.clock.wait:
                flight.wait()

    def _settle(self, leave: int) -> None:
        """Settles rounds in flight, oldest first, until `leave` rounds are left in flight."""
        while len(self._in_flight) > leave:
            with self.clock.wait:
                self._in_flight[0].wait()
            with self.clock.update:
                self._update(self._in_flight[0])
                self._in_flight.popleft()
        if self.scheduler.failures:
            self.check_integrity()

    def _update(self, flight: RoundInFlight) -> None:
        """Applies a settled round.

        Rows of sequences that have finished, were aborted or were preempted since the launch are ignored.
        """
        plan, result = flight.plan, flight.settle()
        flight.report(result)
        for observer in self._observers:
            observer.settled(flight, result)
        live = iter(flight.live)
        decodes = [pair for pair in zip(plan.decodes, result.token_ids, strict=True) if next(live)]
        chunks = [pair for pair in zip(plan.chunks, result.chunk_token_ids, strict=True) if next(live)]
        outputs = self.requests.took(self.scheduler.update(decodes, chunks))
        # The outputs are stored before any other code can raise, because the sequences already contain these tokens.
        self._outputs += outputs if self.shown is None else self.shown.with_rounds(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._ended(output.request_id)

    def _hand_out(self) -> list[RequestOutput]:
        failures, self.scheduler.failures = self.scheduler.failures, []
        for output in failures:
            self._ended(output.request_id)
        outputs, self._outputs = self._outputs + failures, []
        return outputs

    def _ended(self, request_id: str) -> None:
        for observer in self._observers:
            observer.ended(request_id)

    def forget(self) -> None:
        """Clears the prefix cache and all statistics after a trial run.

        Raises:
            IntegrityError: requests are unfinished.
        """
        self.block_manager.forget()
        self.scheduler.num_preemptions = 0
        for part in (self.counter, self.clock, self.requests, self.runner.device_clock):
            part.reset()
        if self.runner.graphs is not None:
            self.runner.graphs.stats.forget_runs()

    def reset_prefix_cache(self) -> None:
        """Clears the prefix cache; running requests continue."""
        self.block_manager.reset_cache()

    def settle(self) -> list[RequestOutput]:
        """Waits for the rounds in flight and returns the outputs of their requests."""
        self._settle(leave=0)
        return self._hand_out()

    def recompute(self) -> list[RequestOutput]:
        """Schedules the KV of all sequences to be recomputed from their tokens; returns outputs as `settle` does."""
        outputs = self.settle()
        self.scheduler.recompute()
        self.reset_prefix_cache()
        return outputs

    def renew(self, keep_kv: bool) -> list[RequestOutput]:
        """Notifies observers that the model's weights were replaced; returns outputs as `settle` does.

        Args:
            keep_kv: whether KV computed with the old weights is kept; False recomputes the KV with the new weights.
        """
        outputs = self.settle() if keep_kv else self.recompute()
        for observer in self._observers:
            observer.renewed()
        return outputs

    def stats(self) -> EngineStats:
        """Returns load, free blocks, acceptance and phase times."""
        graphs, scheduler = None if self.runner.graphs is None else self.runner.graphs.stats, self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_deferred=scheduler.num_deferred,
            num_preemptions=scheduler.num_preemptions,
            drafter_state=str(self.drafter_state),
            num_drafters_attached=self._num_attached,
            phases=self.clock.times,
            policy=self.policy.stats(),
            graphs=graphs,
            stages=stages_of(graphs, self.clock.drafter),
            device_s=self.runner.device_clock.seconds | self.loaded.part_seconds() | self.clock.draft_s,
            request_labels=self.loaded.requests(scheduler.running, scheduler.waiting),
            forced_acceptance=self.config.forced_acceptance,
            requests=self.requests.times,
            parts=self.loaded.part_figures(),
            cache_config=cache_config(self.config, self.loaded.dtype, self.cache.num_blocks, self.cache.num_bytes),
            tree_config=tree_config(self.config.speculation),
            **self.counter.figures(),
            **self.block_manager.figures(),
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError if slots or block reference counts disagree with the running sequences."""
        self.scheduler.check_integrity()
