"""The engine: one `step` is one wingbeat - draft trees are taken, verified in one forward pass, and accepted."""

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from wingbeat.runtime.acceptance import AcceptanceTracker
from wingbeat.runtime.adaptive import AdaptiveSpeculation, RoundTimes
from wingbeat.runtime.batch import ChannelSpec
from wingbeat.runtime.block_manager import BlockManager
from wingbeat.runtime.calibration import cost_tables, drafter_times, verifier_times
from wingbeat.runtime.config import EngineConfig, ForcedAcceptance
from wingbeat.runtime.cuda_graph import GraphStats
from wingbeat.runtime.decode_graphs import node_buckets
from wingbeat.runtime.device_adaptive import DeviceAdaptiveSpeculation
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.drafting import DrafterState, DraftSession
from wingbeat.runtime.graph_device import GraphDevice
from wingbeat.runtime.kv_cache import KVCache
from wingbeat.runtime.link import VerifierEnd
from wingbeat.runtime.model_loader import LoadedModel
from wingbeat.runtime.model_runner import ModelRunner
from wingbeat.runtime.request import Request, RequestOutput, SpeculationMetrics
from wingbeat.runtime.round_costs import RoundCosts
from wingbeat.runtime.round_in_flight import RoundInFlight, RoundObserver, RoundResult
from wingbeat.runtime.scheduler import Scheduler, SchedulerOutput
from wingbeat.runtime.slot_state import SlotState
from wingbeat.runtime.speculation_policy import PolicyStats, SpeculationPolicy
from wingbeat.runtime.verifier_model import VerifierModel

logger = logging.getLogger(__name__)


@dataclass
class PhaseTimes:
    """Host seconds spent in each phase of the rounds so far; on an accelerator, mostly spent on enqueueing."""

    num_rounds: int = 0
    schedule_s: float = 0.0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    """The verifier's forward passes."""
    accept_s: float = 0.0
    """Flattening the batch, choosing tokens, walking trees, compacting KV."""
    publish_s: float = 0.0
    wait_s: float = 0.0
    """For the accepted tokens: what the device still has to do when the host has nothing left to do."""
    update_s: float = 0.0


class _Stopwatch:
    """Adds the time since its last lap to a phase."""

    def __init__(self, phases: PhaseTimes) -> None:
        self._phases = phases
        self._started = self._last = time.perf_counter()

    @property
    def total_s(self) -> float:
        """Of all laps."""
        return self._last - self._started

    def lap(self, phase: str, **within: float) -> float:
        """End a phase and return its seconds.

        Args:
            within: seconds of it that belong to other phases.
        """
        now = time.perf_counter()
        spent, self._last = now - self._last, now
        for name, seconds in (within | {phase: spent - sum(within.values())}).items():
            setattr(self._phases, name, getattr(self._phases, name) + seconds)
        return spent


@dataclass
class EngineStats:
    """A snapshot of the engine's load and what speculation brought so far."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    drafter_state: str
    num_drafters_attached: int
    num_replayed_tokens: int
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    policy: PolicyStats | None = None
    """What was decided on speculation, and why; None where trees have a fixed shape."""
    graphs: GraphStats | None = None
    """Captured rounds and their replays; None where nothing is captured."""
    forced_acceptance: ForcedAcceptance | None = None
    """The profile that acceptance is drawn from, in a benchmark: the text is not the model's."""


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
        self._settled_outputs: list[RequestOutput] = []
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
        bad = [t for t in request.prompt_token_ids if not 0 <= t < self.loaded.vocab_size]
        if bad:
            raise ValueError(f"prompt holds token id {bad[0]}: the vocabulary has {self.loaded.vocab_size}")
        self.scheduler.add(request)

    def abort_request(self, request_id: str) -> None:
        """Drop a request, wherever it is, and free its blocks; one that has ended already is ignored."""
        self.scheduler.abort(request_id)
        if self._observer is not None:
            self._observer.ended(request_id)
        self._settled_outputs = [output for output in self._settled_outputs if output.request_id != request_id]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._in_flight or self._settled_outputs)

    def attach_drafter(self, end: VerifierEnd) -> None:
        """Draft through this end from the next round on; running sequences join once their context stands."""
        self._settled_outputs = self._settle(_Stopwatch(self.phases), leave=0)
        self.runner.prepare_trees()
        if self.config.speculation.adaptive and self.adaptive is None:
            self.adaptive = self.drafting.adaptive = self._calibrate(end)
        self.drafting.attach(end, self.scheduler.running)
        self._num_attached += 1

    def detach_drafter(self) -> None:
        """Decode plainly from the next round on."""
        self.drafting.detach()

    def observe(self, observer: RoundObserver | None) -> None:
        """Show this observer the rounds from the next one on; None ends that."""
        self._settled_outputs = self._settle(_Stopwatch(self.phases), leave=0)
        self._observer = observer

    @property
    def drafter_state(self) -> DrafterState:
        """LOST once the drafter died or fell silent; the engine then has let go of it."""
        return self.drafting.state

    def step(self) -> list[RequestOutput]:
        """One wingbeat: schedule, take the drafted trees, verify and accept, feed the drafter, hand out tokens.

        With overlap the tokens are those of the round before: the host sees to them while the device runs the round
        just launched.
        """
        watch = _Stopwatch(self.phases)
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
            if self._observer is not None:
                self._observer.launched(flight)
            watch.lap("accept_s", verify_s=flight.forward_s)
            if not self.overlap:
                flight.wait()
                watch.lap("wait_s")
            self.drafting.publish(plan, flight)
            # Where the drafter shares the core, ringing for it is waiting for it.
            published_s = watch.lap("publish_s", draft_wait_s=self.drafting.ring_s) - self.drafting.ring_s
        outputs = self._settle(watch, leave=1 if launched and self.overlap else 0)
        if self.adaptive is not None and launched:
            host_s = watch.total_s - waited_s - flight.forward_s - self.drafting.ring_s - published_s
            num_chunk_tokens = sum(chunk.length for chunk in plan.chunks)
            num_new_tokens = sum(len(output.token_ids) for output in outputs)
            seconds = asked_s + waited_s, flight.forward_s, host_s, published_s
            times = RoundTimes(*seconds, num_chunk_tokens, num_drafter_tokens, num_new_tokens)
            self.adaptive.observe(times)
        return outputs

    def _schedule(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        for seq in plan.admitted:
            self.drafting.admit(seq)
            if self.adaptive is not None:
                self.adaptive.admit(seq)
        plan = self.drafting.plan_replay(plan)
        self._num_replayed_tokens += sum(chunk.length for chunk in plan.chunks if chunk.replay)
        return plan

    def _calibrate(self, end: VerifierEnd) -> AdaptiveSpeculation | None:
        """Measure what rounds cost; None, and so trees of the configured shape, when the drafter does not answer."""
        speculation = self.config.speculation
        graphs = self.runner.graphs if self.loaded.device.type == "cuda" else None
        device = graphs.pool.device if graphs is not None and graphs.stats.captured else None
        verifier = verifier_times(self.loaded, self.model, self.cache, self.config, device)
        drafter = drafter_times(end, verifier.batch_sizes, self.drafting.patience_s)
        if drafter is None:
            logger.warning("the drafter did not answer the calibration: speculating with fixed trees")
            return None
        costs = RoundCosts(cost_tables(verifier, drafter))
        max_depth = speculation.max_path - 1
        tracker = AcceptanceTracker(self.config.max_num_seqs, max_depth)
        stops_early = self.runner.on_host
        policy = SpeculationPolicy(costs, tracker, max_depth, speculation.num_nodes, stops_early=stops_early)
        if self.runner.pruner is None:
            return AdaptiveSpeculation(policy)
        return DeviceAdaptiveSpeculation(policy, self.runner.pruner, node_buckets(self.config))

    def _settle(self, watch: "_Stopwatch", leave: int) -> list[RequestOutput]:
        """Learn what the rounds in flight decided, oldest first, until `leave` of them are left."""
        outputs, self._settled_outputs = self._settled_outputs, []
        while len(self._in_flight) > leave:
            flight = self._in_flight.popleft()
            result = flight.wait()
            watch.lap("wait_s")
            outputs += self._update(flight, result)
            watch.lap("update_s")
            self.phases.num_rounds += 1
        return outputs

    def _update(self, flight: RoundInFlight, result: RoundResult) -> list[RequestOutput]:
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
        if self._observer is None:
            return self.scheduler.update(decodes, chunks)
        self._observer.settled(flight, result)
        outputs = self.scheduler.update(decodes, chunks)
        for output in outputs:
            if output.finish_reason is not None:
                self._observer.ended(output.request_id)
        return outputs

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
