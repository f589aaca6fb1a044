"""An engine's figures."""

from dataclasses import dataclass, field

from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.engine.phase_times import PhaseTimes
from wingbeat.runtime.graphs.graph_runner import GraphStats
from wingbeat.runtime.scheduling.request import SpeculationMetrics
from wingbeat.runtime.speculation.policy import PolicyStats


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
