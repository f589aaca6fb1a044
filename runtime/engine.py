"""The engine: one `step` is one wingbeat - draft trees are taken, verified in one forward pass, and accepted."""

import logging
import time
from dataclasses import dataclass, field

from wingbeat.runtime.acceptance import AcceptanceTracker
from wingbeat.runtime.adaptive import AdaptiveSpeculation, RoundTimes
from wingbeat.runtime.batch import ChannelSpec, TokenTree
from wingbeat.runtime.block_manager import BlockManager
from wingbeat.runtime.calibration import cost_tables, drafter_times, verifier_times
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafting import DrafterState, DraftSession
from wingbeat.runtime.kv_cache import KVCache
from wingbeat.runtime.link import VerifierEnd
from wingbeat.runtime.model_loader import LoadedModel
from wingbeat.runtime.model_runner import ModelRunner, RoundResult
from wingbeat.runtime.request import Request, RequestOutput, SpeculationMetrics
from wingbeat.runtime.round_costs import RoundCosts
from wingbeat.runtime.scheduler import Scheduler, SchedulerOutput
from wingbeat.runtime.slot_state import SlotState
from wingbeat.runtime.speculation_policy import PolicyStats, SpeculationPolicy
from wingbeat.runtime.verifier_model import VerifierModel

logger = logging.getLogger(__name__)


@dataclass
class PhaseTimes:
    """Seconds spent in each phase of the rounds so far."""

    num_rounds: int = 0
    schedule_s: float = 0.0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    """The verifier's forward passes."""
    accept_s: float = 0.0
    """Flattening the batch, choosing tokens, walking trees, compacting KV."""
    publish_s: float = 0.0
    update_s: float = 0.0


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


class Engine:
    """Generates for many requests at once. All calls come from one thread.

    Args:
        loaded: the verifier.
        config: limits; its max_model_len must not exceed the model's positions.
        tap_layers: layers whose input the drafter needs; empty for drafters that need tokens only.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, tap_layers: tuple[int, ...] = ()) -> None:
        if config.max_model_len > loaded.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {config.max_model_len}: {loaded.name} has {loaded.max_position_embeddings} positions"
            )
        self.config = config
        self.loaded = loaded
        self.model = VerifierModel(loaded, tap_layers)
        self.cache = KVCache(loaded.layers, config, loaded.dtype, loaded.device)
        self.block_manager = BlockManager(self.cache.num_blocks, config.block_size, config.enable_prefix_caching)
        self.slots = SlotState(config, loaded.vocab_size, loaded.device)
        self.scheduler = Scheduler(config, self.block_manager, loaded.eos_token_ids)
        self.runner = ModelRunner(loaded, self.model, self.cache, self.slots, config)
        self.drafting = DraftSession(config, self.block_manager, self.slots)
        self.adaptive: AdaptiveSpeculation | None = None
        self.speculation = SpeculationMetrics()
        self.phases = PhaseTimes()
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

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work to do."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def attach_drafter(self, end: VerifierEnd) -> None:
        """Draft through this end from the next round on; running sequences join once their context stands."""
        if self.config.speculation.adaptive and self.adaptive is None:
            self.adaptive = self.drafting.adaptive = self._calibrate(end)
        self.drafting.attach(end, self.scheduler.running)
        self._num_attached += 1

    def detach_drafter(self) -> None:
        """Decode plainly from the next round on."""
        self.drafting.detach()

    @property
    def drafter_state(self) -> DrafterState:
        """LOST once the drafter died or fell silent; the engine then has let go of it."""
        return self.drafting.state

    def step(self) -> list[RequestOutput]:
        """One wingbeat: schedule, take the drafted trees, verify and accept, feed the drafter, hand out tokens."""
        started = time.perf_counter()
        plan = self._schedule()
        scheduled = time.perf_counter()
        trees = self.drafting.collect(plan.decodes)
        drafted = time.perf_counter()
        if self.adaptive is not None:
            trees = self.adaptive.prune(trees, plan.decodes)
        forward_s = self.runner.forward_s
        result = self.runner.run(plan, trees)
        forward_s = self.runner.forward_s - forward_s
        verified = time.perf_counter()
        if self.adaptive is not None:
            self.adaptive.learn(plan.decodes, result)
        self.drafting.publish(plan, result)
        published = time.perf_counter()
        outputs = self._update(plan, trees, result)
        phases = self.phases
        phases.num_rounds += 1
        phases.schedule_s += scheduled - started
        phases.draft_wait_s += drafted - scheduled
        phases.verify_s += forward_s
        phases.accept_s += verified - drafted - forward_s
        phases.publish_s += published - verified
        finished = time.perf_counter()
        phases.update_s += finished - published
        if self.adaptive is not None and not plan.chunks:
            self.adaptive.observe(RoundTimes(drafted - scheduled, forward_s, finished - started))
        return outputs

    def _schedule(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        for seq in plan.admitted:
            self.drafting.admit(seq)
            if self.adaptive is not None:
                self.adaptive.admit(seq)
        replays = self.drafting.plan_replay(plan)
        self._num_replayed_tokens += sum(chunk.length for chunk in replays)
        return plan._replace(chunks=plan.chunks + replays) if replays else plan

    def _calibrate(self, end: VerifierEnd) -> AdaptiveSpeculation | None:
        """Measure what rounds cost; None, and so trees of the configured shape, when the drafter does not answer."""
        speculation = self.config.speculation
        verifier = verifier_times(self.loaded, self.model, self.cache, self.config)
        drafter = drafter_times(end, verifier.batch_sizes, self.config.drafter_timeout_s)
        if drafter is None:
            logger.warning("the drafter did not answer the calibration: speculating with fixed trees")
            return None
        costs = RoundCosts(cost_tables(verifier, drafter))
        max_depth = speculation.max_path - 1
        tracker = AcceptanceTracker(self.config.max_num_seqs, max_depth)
        return AdaptiveSpeculation(SpeculationPolicy(costs, tracker, max_depth, speculation.num_nodes))

    def _update(self, plan: SchedulerOutput, trees: TokenTree | None, result: RoundResult) -> list[RequestOutput]:
        if trees is not None:
            counts = zip(plan.decodes, trees.num_valid.tolist(), result.num_tokens_list, strict=True)
            for seq, num_valid, num_tokens in counts:
                if num_valid > 1:
                    seq.metrics.record(num_valid - 1, num_tokens - 1)
                    self.speculation.record(num_valid - 1, num_tokens - 1)
        decodes = list(zip(plan.decodes, result.token_lists, strict=True))
        chunks = list(zip(plan.chunks, result.chunk_token_ids, strict=True))
        return self.scheduler.update(decodes, chunks)

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
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError where block reference counts disagree with the running sequences."""
        self.block_manager.check_integrity([seq.blocks for seq in self.scheduler.running])
