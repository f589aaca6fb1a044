"""The engine: one `step` is one wingbeat - draft trees are taken, verified in one forward pass, and accepted."""

import logging
from array import array
from collections import deque

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.adaptive import AdaptiveSpeculation, RoundTimes
from wingbeat.runtime.engine.calibrated_speculation import calibrated_speculation
from wingbeat.runtime.engine.drafter_client import DrafterState, DraftSession
from wingbeat.runtime.engine.engine_stats import EngineStats
from wingbeat.runtime.engine.phase_times import PhaseTimes, Stopwatch
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import ChannelSpec
from wingbeat.runtime.scheduling.request import Request, RequestOutput, SamplingParams, SpeculationMetrics
from wingbeat.runtime.scheduling.scheduler import Scheduler, SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.loader import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel
from wingbeat.runtime.verifier.round import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.verifier.runner import ModelRunner
from wingbeat.runtime.verifier.slots import SlotState

logger = logging.getLogger(__name__)
PROBE = Request("probe", (0,), SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, speculation=False))
"""What an engine runs to find out whether it still works."""
PROBE_ROUNDS = 8


class Engine:
    """Generates for many requests at once. All calls come from one thread.

    Args:
        loaded: the verifier.
        config: limits; its max_model_len must not exceed the model's positions.
        needs: of the drafter to come.
        graph_device: captures decode rounds in place of CUDA.

    Raises:
        ValueError: the configuration asks for what the model or its device does not have; names field and value.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        needs: DrafterNeeds = DrafterNeeds(),
        graph_device: GraphDevice | None = None,
    ) -> None:
        if config.max_model_len > loaded.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {config.max_model_len}: {loaded.name} has {loaded.max_position_embeddings} positions"
            )
        self.config = config
        self.loaded = loaded
        self.model = VerifierModel(loaded, needs.tap_layers, needs.kv_layers)
        self.needs = needs
        self.cache = KVCache(loaded.layers, config, loaded.dtype, loaded.device)
        self.block_manager = BlockManager(self.cache.num_blocks, config.block_size, config.enable_prefix_caching)
        self.slots = SlotState(config, loaded.vocab_size, loaded.device)
        self.scheduler = Scheduler(config, self.block_manager, loaded.eos_token_ids)
        self.runner = ModelRunner(loaded, self.model, self.cache, self.slots, config, graph_device)
        self.drafting = DraftSession(config, self.block_manager, self.slots)
        self.drafting.on_host = self.runner.on_host
        self.adaptive: AdaptiveSpeculation | None = None
        self.speculation = SpeculationMetrics(forced_acceptance=config.forced_acceptance is not None)
        self.phases = PhaseTimes()
        self.overlap = loaded.device.type != "cpu" if config.overlap is None else config.overlap
        self._in_flight: deque[RoundInFlight] = deque()
        self._outputs: list[RequestOutput] = []
        self._plan: SchedulerOutput | None = None
        """Of the round that is being launched."""
        self._observer: RoundObserver | None = None
        self._num_attached = 0
        self._num_replayed_tokens = 0

    @property
    def channel_spec(self) -> ChannelSpec:
        """Shapes of the channel that a drafter of this engine is attached through."""
        speculation = self.config.speculation
        return ChannelSpec(
            num_slots=self.config.max_num_seqs,
            num_nodes=speculation.num_nodes,
            max_path=speculation.max_path,
            max_prefill_tokens=self.config.max_num_batched_tokens,
            taps_size=self.model.taps_size,
            max_model_len=self.config.max_model_len,
            max_blocks_per_seq=self.config.max_blocks_per_seq,
            block_size=self.config.block_size,
            num_blocks=self.cache.num_blocks,
            taps_dtype=self.loaded.dtype,
            keeps_context=self.needs.keeps_context,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run (empty or too long a prompt, token ids outside the vocabulary).
        """
        try:
            ids = array("q", request.prompt_token_ids)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"prompt holds what is no token id: {error}") from None
        bad = [token_id for token_id in ids and (min(ids), max(ids)) if not 0 <= token_id < self.loaded.vocab_size]
        if bad:
            raise ValueError(f"prompt holds token id {bad[0]}: the vocabulary has {self.loaded.vocab_size}")
        self.scheduler.add(request)

    def abort_request(self, request_id: str) -> None:
        """Drop a request, wherever it is, and free its blocks; one that has ended already is ignored."""
        self.scheduler.abort(request_id)
        if self._observer is not None:
            self._observer.ended(request_id)
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do."""
        scheduler = self.scheduler
        return any((scheduler.running, scheduler.waiting, scheduler.failures, self._in_flight, self._outputs))

    def attach_drafter(self, end: VerifierEnd) -> None:
        """Draft through this end from the next round on; running sequences join once their context stands."""
        self._settle(Stopwatch(self.phases), leave=0)
        self.runner.prepare_trees()
        if self.config.speculation.adaptive and self.adaptive is None:
            patience_s = self.drafting.patience_s
            self.adaptive = self.drafting.adaptive = calibrated_speculation(self.runner, self.config, end, patience_s)
        self.drafting.attach(end, self.scheduler.running)
        self._num_attached += 1

    def detach_drafter(self) -> None:
        """Decode plainly from the next round on."""
        self.drafting.detach()

    def observe(self, observer: RoundObserver | None) -> None:
        """Show this observer the rounds from the next one on; None ends that."""
        self._settle(Stopwatch(self.phases), leave=0)
        self._observer = observer

    @property
    def drafter_state(self) -> DrafterState:
        """LOST once the drafter died or fell silent; the engine then has let go of it."""
        return self.drafting.state

    def step(self) -> list[RequestOutput]:
        """One wingbeat: schedule, take the drafted trees, verify and accept, feed the drafter, hand out tokens.

        With overlap the tokens are those of the round before: the host sees to them while the device runs the round
        just launched. A request whose processing raises ends with a `failure` among the outputs.

        Raises:
            RoundFailed: the engine is broken; none of its requests can go on here.
        """
        try:
            self._round()
            if self.scheduler.failures:
                self.check_integrity()
        except Exception as error:
            self._recover(error)
        outputs, self._outputs = self._outputs + self.scheduler.failures, []
        if self.scheduler.failures:
            if self._observer is not None:
                for output in self.scheduler.failures:
                    self._observer.ended(output.request_id)
            self.scheduler.failures = []
        return outputs

    def _round(self) -> None:
        watch = Stopwatch(self.phases)
        plan = self._schedule()
        launched = bool(plan.decodes or plan.chunks)
        if launched:
            rows = self.slots.load(plan)
            watch.lap("schedule_s")
            asked_s, num_drafter_tokens = self.drafting.ring_s, self.drafting.num_chunk_tokens
            trees = self.drafting.collect(plan.decodes, rows)
            waited_s = watch.lap("draft_wait_s")
            if self.adaptive is not None:
                trees = self.adaptive.prune(trees, plan.decodes)
            num_nodes = None if self.adaptive is None else self.adaptive.num_nodes
            flight = self.runner.launch(plan, rows, trees, num_nodes)
            self.scheduler.advance(plan, with_trees=trees is not None)
            self._in_flight.append(flight)
            self._plan = None
            if self._observer is not None:
                self._observer.launched(flight)
            watch.lap("accept_s", verify_s=flight.forward_s)
            if not self.overlap:
                flight.wait()
                watch.lap("wait_s")
            self.drafting.publish(plan, flight)
            # Where the drafter shares the core, ringing for it is waiting for it.
            published_s = watch.lap("publish_s", draft_wait_s=self.drafting.ring_s) - self.drafting.ring_s
        self._settle(watch, leave=1 if launched and self.overlap else 0)
        if self.adaptive is not None and launched:
            host_s = watch.total_s - waited_s - flight.forward_s - self.drafting.ring_s - published_s
            num_chunk_tokens = sum(chunk.length for chunk in plan.chunks)
            num_new_tokens = sum(len(output.token_ids) for output in self._outputs)
            seconds = asked_s + waited_s, flight.forward_s, host_s, published_s
            times = RoundTimes(*seconds, num_chunk_tokens, num_drafter_tokens, num_new_tokens)
            self.adaptive.observe(times)

    def _recover(self, error: Exception) -> None:
        """A round raised, and nobody knows for whom: what ran is computed again, one sequence at a time.

        One that raises when it runs alone has failed. The others are where they were, and their texts do not change.
        The drafter is let go of: it costs speed, and may be what raised.

        Raises:
            RoundFailed: the engine's own probe raises too, or this is no request's doing.
        """
        logger.warning("A round raised %s: its requests are tried one by one", type(error).__name__, exc_info=error)
        scheduler = self.scheduler
        failure = RoundFailed(f"{type(error).__name__}: {error}", *self._entangled())
        try:
            alone = scheduler.running[0] if len(scheduler.running) == 1 else None
            self._in_flight.clear()
            self.drafting.lose()
            if self.adaptive is not None:
                self.adaptive.abandon()
            if self._observer is not None:
                self._observer.abandoned()
            scheduler.restart()
            self._probe()
            if alone is not None:
                scheduler.fail(alone, error)
        except Exception as broken:
            logger.error("The engine is broken", exc_info=broken)
            raise failure from error

    def _entangled(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Ids of the requests in a first round that is not settled, or failed, and of those never taken up."""
        plans = [flight.plan for flight in self._in_flight] + ([self._plan] if self._plan is not None else [])
        seqs = [seq for plan in plans for seq in plan.admitted if seq.slot >= 0 and not seq.num_output_tokens]
        failed = [output.request_id for output in self.scheduler.failures]
        queued = (seq.request.request_id for seq in self.scheduler.waiting if not seq.preempted)
        return (*(seq.request.request_id for seq in seqs), *failed), tuple(queued)

    def _probe(self) -> None:
        """Run a request of the engine's own, alone; raises whatever is wrong."""
        self.scheduler.add_first(PROBE)
        for _ in range(PROBE_ROUNDS):
            self._round()
            own = [output for output in self._outputs if output.request_id == PROBE.request_id]
            if own and own[-1].finish_reason is not None:
                break
        else:
            raise RuntimeError(f"the probe did not end within {PROBE_ROUNDS} rounds")
        self._outputs = [output for output in self._outputs if output.request_id != PROBE.request_id]
        self.check_integrity()

    def _take_up(self, seq: Sequence) -> None:
        self.drafting.admit(seq)
        if self.adaptive is not None:
            self.adaptive.admit(seq)

    def _schedule(self) -> SchedulerOutput:
        plan = self._plan = self.scheduler.schedule()
        for seq in plan.admitted:
            self.scheduler.isolated(seq, self._take_up, seq)
        if self.scheduler.failures:
            plan = plan.without_dropped()
        plan = self.drafting.plan_replay(plan)
        self._num_replayed_tokens += sum(chunk.length for chunk in plan.chunks if chunk.replay)
        return plan

    def _settle(self, watch: Stopwatch, leave: int) -> None:
        """Learn what the rounds in flight decided, oldest first, until `leave` of them are left."""
        while len(self._in_flight) > leave:
            flight = self._in_flight[0]
            result = flight.wait()
            watch.lap("wait_s")
            self._update(flight, result)
            self._in_flight.popleft()
            watch.lap("update_s")
            self.phases.num_rounds += 1

    def _update(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Take a round's tokens. Rows of sequences that finished, were aborted or preempted meanwhile are void."""
        epochs = iter(flight.epochs)
        live = [seq.epoch == next(epochs) for seq in flight.plan.decodes]
        if self.adaptive is not None:
            self.adaptive.learn(result, live)
        decodes = []
        for row, seq in enumerate(flight.plan.decodes):
            if not live[row]:
                continue
            token_ids, num_valid = result.token_ids[row], result.num_valid[row]
            if num_valid > 1:
                seq.metrics.record(num_valid - 1, len(token_ids) - 1)
                self.speculation.record(num_valid - 1, len(token_ids) - 1)
            self.drafting.settle(seq, len(token_ids))
            decodes.append((seq, token_ids))
        chunks = [
            (chunk, token_ids)
            for chunk, token_ids in zip(flight.plan.chunks, result.chunk_token_ids, strict=True)
            if chunk.seq.epoch == next(epochs)
        ]
        if self._observer is not None:
            self._observer.settled(flight, result)
        outputs = self.scheduler.update(decodes, chunks)
        # First of all: sequences have these tokens by now, and must not be the only ones to know them.
        self._outputs += outputs
        if self._observer is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self._observer.ended(output.request_id)

    def forget(self) -> None:
        """Be as before the first request, for an engine that was only tried: no prefix is cached, every figure is zero.

        Raises:
            IntegrityError: requests are unfinished.
        """
        self.block_manager.forget()
        self.scheduler.num_preemptions = 0
        self.speculation = SpeculationMetrics(forced_acceptance=self.config.forced_acceptance is not None)
        self.phases = PhaseTimes()
        self._num_replayed_tokens = 0
        if self.runner.graphs is not None:
            self.runner.graphs.stats.replays.clear()
            self.runner.graphs.stats.eager_runs.clear()

    def stats(self) -> EngineStats:
        """Load, free blocks, acceptance and phase times."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_free_blocks=self.block_manager.num_free,
            num_blocks=self.cache.num_blocks,
            num_preemptions=self.scheduler.num_preemptions,
            drafter_state=str(self.drafter_state),
            num_drafters_attached=self._num_attached,
            num_replayed_tokens=self._num_replayed_tokens,
            speculation=self.speculation,
            phases=self.phases,
            policy=None if self.adaptive is None else self.adaptive.stats(),
            graphs=None if self.runner.graphs is None else self.runner.graphs.stats,
            forced_acceptance=self.config.forced_acceptance,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError where slots or block reference counts disagree with the running sequences."""
        self.scheduler.check_integrity()
