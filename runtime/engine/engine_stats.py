"""An engine's figures."""

from dataclasses import dataclass, field

from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.engine.round_clock import PhaseTimes
from wingbeat.runtime.graphs.graph_runner import GraphStats
from wingbeat.runtime.scheduling.request import SpeculationMetrics
from wingbeat.runtime.speculation.policy import PolicyStats
from wingbeat.runtime.verifier.round import RoundInFlight, RoundObserver, RoundResult


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


class AcceptanceCounter(RoundObserver):
    """Counts what the rounds of an engine verified, accepted and replayed.

    Args:
        forced: acceptance is drawn from a profile.
    """

    def __init__(self, forced: bool) -> None:
        self._forced = forced
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.metrics = SpeculationMetrics(forced_acceptance=self._forced)
        self.num_replayed_tokens = 0

    def launched(self, flight: RoundInFlight) -> None:
        """Count the context that is computed again."""
        self.num_replayed_tokens += sum(chunk.length for chunk in flight.plan.chunks if chunk.replay)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        """Count trees and accepted tokens, also with their requests."""
        for row, num_valid in enumerate(result.num_valid):
            if num_valid > 1 and flight.live[row]:
                counts = num_valid - 1, len(result.token_ids[row]) - 1
                flight.plan.decodes[row].metrics.record(*counts)
                self.metrics.record(*counts)
